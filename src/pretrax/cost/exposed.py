"""Which share of a step's communication waits, by hardware and kind, as read from the schedules of compiled steps.

`benchmarks/schedule.py` compiles and reads the steps; `tests/cost/test_exposed.py` compares them with the predictions.
"""

import dataclasses

from pretrax.cost.devices import Device


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Share of the time of collectives in which the step waits: what XLA does not hide with the options that pretrax
    sets.

    Attributes:
        tables: gathers over d of the embedding and the unembedding.
        table_sums: sums over d of their gradients.
        gathers, sums: of the weights and gradients of layers over d.
        gathers_beside_t, sums_beside_t: the same shares if the mesh also has t, whose collectives run at the same time.
        last_sums: last sums of one layer over d: the last of the backward pass, which nothing hides.
        t: activations over t, if the backward pass keeps those of the forward pass.
        t_again: the share over t if layers are recomputed.
        t_in_parts: the share over t if layers run in parts of the batch (`model.batch_parts`).
        e, c, p: activations over that axis.
        copies: sums of gradients over the axes that replicate weights.
        layer_copies: those of layers over r, in a step of one pass; that of the last layer always waits.
        one_ring: names of attributes above whose collectives use one ring if d spans a whole slice, of several
            dimensions.
        all_reduced: names of those that are all-reduces, which send twice the bytes.
    """

    tables: float
    table_sums: float
    gathers: float
    sums: float
    gathers_beside_t: float
    sums_beside_t: float
    last_sums: float
    t: float
    t_again: float
    t_in_parts: float
    e: float
    c: float
    p: float
    copies: float
    layer_copies: float
    one_ring: frozenset[str] = frozenset()
    all_reduced: frozenset[str] = frozenset()


_V5E = Exposed(
    tables=1.0, table_sums=1.0, gathers=0.07, sums=0.27, gathers_beside_t=0.25, sums_beside_t=1.0, last_sums=0.0,
    t=0.73, t_again=0.73, t_in_parts=0.73, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
    one_ring=frozenset({'tables', 'gathers', 'sums'}), all_reduced=frozenset({'table_sums', 'sums'}),
)  # fmt: skip
_V5E_SLICES = dataclasses.replace(_V5E, sums=1.0, one_ring=frozenset({'tables', 'gathers'}))
_EXPOSED = {
    'GPU': Exposed(
        tables=0.9, table_sums=0.5, gathers=0.05, sums=0.0, gathers_beside_t=0.05, sums_beside_t=0.0, last_sums=0.75,
        t=0.55, t_again=0.55, t_in_parts=0.55, e=0.6, c=0.3, p=0.7, copies=0.9, layer_copies=0.35,
    ),
    'SparseCore': Exposed(
        tables=1.0, table_sums=0.5, gathers=0.01, sums=0.11, gathers_beside_t=0.12, sums_beside_t=0.24, last_sums=0.0,
        t=0.43, t_again=0.72, t_in_parts=0.2, e=1.0, c=1.0, p=0.2, copies=1.0, layer_copies=1.0,
        one_ring=frozenset({'sums'}),
    ),
    'TPU v6e': Exposed(
        tables=1.0, table_sums=0.7, gathers=0.22, sums=0.55, gathers_beside_t=0.12, sums_beside_t=0.24, last_sums=0.0,
        t=0.43, t_again=0.72, t_in_parts=0.2, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
    ),
    'TPU v5e': _V5E,
    'TPU v5e, slices': _V5E_SLICES,
    'TPU v4': Exposed(
        tables=1.0, table_sums=1.0, gathers=0.0, sums=1.0, gathers_beside_t=0.0, sums_beside_t=1.0, last_sums=0.0,
        t=1.0, t_again=1.0, t_in_parts=1.0, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
        all_reduced=frozenset({'table_sums', 'sums'}),
    ),
}  # fmt: skip

# Without the compiler options that pretrax sets, where steps were compiled so. On several slices of v5e there are none.
_BY_DEFAULT = {
    'TPU v5e': _V5E_SLICES,
    'TPU v5p': Exposed(
        tables=1.0, table_sums=1.0, gathers=1.0, sums=1.0, gathers_beside_t=1.0, sums_beside_t=1.0, last_sums=0.0,
        t=1.0, t_again=1.0, t_in_parts=1.0, e=1.0, c=1.0, p=1.0, copies=1.0, layer_copies=1.0,
        all_reduced=frozenset({'tables', 'table_sums', 'gathers', 'sums'}),
    ),
}  # fmt: skip


# TPUs whose sums over r run layer by layer between slices: `model.plan.choose_reduction`. Read from whole rows of
# MaxText's tables on two slices of v5p: those of all layers but the last are hidden, and more of the activations over t
# wait.
_LAYER_BY_LAYER = ('TPU v5p', 'TPU v6e', 'TPU v7 (half a chip)')


def exposed_by_default(device: Device) -> Exposed | None:
    """What is not hidden without compiler options; None: not known."""
    return _BY_DEFAULT.get(device.name)


def exposed_on(device: Device, slices: int = 1) -> Exposed:
    """What is not hidden on a device, of one slice or of several, with the compiler options that pretrax sets."""
    if not device.name.startswith('TPU'):
        return _EXPOSED['GPU']
    name = f'{device.name}, slices' if slices > 1 else device.name
    found = _EXPOSED.get(name) or _EXPOSED.get(device.name) or _EXPOSED['SparseCore']
    if slices > 1 and device.name in _LAYER_BY_LAYER:
        return dataclasses.replace(found, layer_copies=0.0, t=0.6)
    return found
