"""How the layers of a decoder run, and what of them is kept for the backward pass: chosen here, with the reason."""

from collections.abc import Mapping
from typing import Any

from pretrax.errors import UserError
from pretrax.model.axes import along
from pretrax.model.families import SAVE_PRESETS, SAVED_NAMES
from pretrax.shardlib import Choice

ALL_NAMED: dict[str, Choice] = dict.fromkeys(SAVED_NAMES, 'keep')


def choose_unrolled(wanted: str, n_layers: int, mesh: dict[str, int]) -> tuple[bool, str]:
    """Whether each layer is a part of the program, or one layer a loop; and why."""
    if wanted != 'auto':
        return wanted == 'unroll', f'{wanted} (as configured)'
    if along('d e c t p', mesh) == 1 and n_layers <= 48:
        return True, 'unroll (faster than a loop where weights are whole; model.layers=scan compiles faster)'
    return False, 'scan (many devices or layers: compiles faster)'


def choose_saved(wanted: Any, mesh: dict[str, int], host_memory: bool) -> tuple[Mapping[str, Choice] | None, str]:
    """What is kept for the backward pass, see `recompute_by_name`; and why.

    Raises:
        UserError: something is to be offloaded, and the devices reach no host memory.
    """
    if wanted == 'all' and mesh['d'] * mesh['p'] == 1:
        return None, 'all kept'
    if wanted == 'all':
        many = f'{"d" if mesh["d"] > 1 else "p"} > 1'
        return ALL_NAMED, f'kept: {", ".join(ALL_NAMED)}; gathered weights and cheap values are computed again ({many})'
    if wanted == 'none' and mesh['p'] > 1:
        return {}, 'of each stage and micro-batch the input is kept, the rest is recomputed (model.save=none)'
    if wanted == 'none':
        return {}, 'everything is recomputed in the backward pass (model.save=none)'
    saved: dict[str, Choice] = dict.fromkeys(SAVE_PRESETS[wanted], 'keep') if isinstance(wanted, str) else dict(wanted)
    kept, offloaded = ([name for name in saved if saved[name] == choice] for choice in ('keep', 'offload'))
    if offloaded and not host_memory:
        raise UserError(
            f'model.save: {", ".join(offloaded)}: offload: the devices know no pinned host memory\n'
            'keep or recompute instead'
        )
    told = f'; in host memory: {", ".join(offloaded)}' if offloaded else ''
    return saved, f'kept: {", ".join(kept) or "none"}{told}; the rest is recomputed (model.save)'
