"""Whether layers run in a loop, and which activations the backward pass keeps, with the reasons."""

from collections.abc import Mapping

from pretrax.errors import UserError
from pretrax.model.axes import along
from pretrax.model.families import SAVE_PRESETS, SAVED_NAMES
from pretrax.shardlib import Choice

ALL_NAMED: dict[str, Choice] = dict.fromkeys(SAVED_NAMES, 'keep')


def choose_unrolled(wanted: str, n_layers: int, mesh: dict[str, int]) -> tuple[bool, str]:
    """Whether the program contains every layer, or one layer in a loop; and the reason."""
    if wanted != 'auto':
        return wanted == 'unroll', f'{wanted} (as configured)'
    if along('d e c t p', mesh) == 1 and n_layers <= 48:
        return True, 'unroll (faster than a loop if weights are not sharded; model.layers=scan compiles faster)'
    return False, 'scan (many devices or layers: compiles faster)'


def choose_saved(
    wanted: str | Mapping[str, Choice], mesh: dict[str, int], host_memory: bool
) -> tuple[Mapping[str, Choice] | None, str]:
    """What the backward pass keeps, see `recompute_by_name`; and the reason.

    Raises:
        UserError: something is to be offloaded, and the devices have no pinned host memory.
    """
    if wanted == 'all' and mesh['d'] * mesh['p'] == 1:
        return None, 'all kept'
    if wanted == 'all':
        many = f'{"d" if mesh["d"] > 1 else "p"} > 1'
        return ALL_NAMED, f'kept: {", ".join(ALL_NAMED)}; gathered weights and cheap values are recomputed ({many})'
    if wanted == 'none' and mesh['p'] > 1:
        return {}, 'kept: the input of each stage and micro-batch; the rest is recomputed (model.save=none)'
    if wanted == 'none':
        return {}, 'everything is recomputed in the backward pass (model.save=none)'
    saved: dict[str, Choice] = dict.fromkeys(SAVE_PRESETS[wanted], 'keep') if isinstance(wanted, str) else dict(wanted)
    kept, offloaded = ([name for name in saved if saved[name] == choice] for choice in ('keep', 'offload'))
    if offloaded and not host_memory:
        raise UserError(
            f'model.save: {", ".join(offloaded)}: offload: the devices have no pinned host memory\n'
            'keep or recompute instead'
        )
    in_host = f'; in host memory: {", ".join(offloaded)}' if offloaded else ''
    return saved, f'kept: {", ".join(kept) or "none"}{in_host}; the rest is recomputed (model.save)'
