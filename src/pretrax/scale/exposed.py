"""Which share of a step's communication waits, by hardware and kind, as read from the schedules of compiled steps.

`benchmarks/schedule.py` compiles and reads the steps; `tests/ahead/test_exposed.py` compares them with the predictions.
"""

import dataclasses

from pretrax.scale.devices import Device


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Share of the time of collectives in which the step waits: what XLA does not hide with the options that pretrax sets.

    Attributes:
        tables: gathers of the embedding and the unembedding over d, at the start of a pass.
        table_sums: sums of their gradients.
        gathers: gathers of the weights of layers over d.
        sums: sums of the gradients of layers over d.
        gathers_beside, sums_beside: likewise, if the mesh has e, c, t or p too, so that d spans a part of a slice.
        last_sums: of the last layer of the backward pass alone.
        t, e, c, p: activations over that axis.
        copies: sums of gradients over the axes that replicate weights.
        layer_copies: those of layers over r, in a step of one pass.
        one_ring: those of the above over d that use one ring, although d spans several dimensions of a torus; tables_beside:
            the tables' gathers there.
        all_reduced: those of the sums above over d that are all-reduces, which send twice the bytes.
    """

    tables: float
    table_sums: float
    gathers: float
    sums: float
    gathers_beside: float
    sums_beside: float
    last_sums: float
    t: float
    e: float
    c: float
    p: float
    copies: float
    layer_copies: float
    one_ring: frozenset[str] = frozenset()
    all_reduced: frozenset[str] = frozenset()


_EXPOSED = {
    'GPU': Exposed(
        tables=0.9, table_sums=0.5, gathers=0.05, sums=0.0, gathers_beside=0.05, sums_beside=0.0, last_sums=0.75,
        t=0.6, e=0.7, c=0.3, p=1.0, copies=0.9, layer_copies=0.35,
    ),
    'SparseCore': Exposed(
        tables=1.0, table_sums=0.5, gathers=0.01, sums=0.11, gathers_beside=1.0, sums_beside=0.15, last_sums=0.0,
        t=0.37, e=1.0, c=1.0, p=0.4, copies=1.0, layer_copies=1.0,
        one_ring=frozenset({'sums', 'gathers_beside', 'tables_beside'}),
    ),
    'TPU v6e': Exposed(
        tables=1.0, table_sums=0.6, gathers=1.0, sums=0.4, gathers_beside=1.0, sums_beside=0.15, last_sums=0.0,
        t=0.37, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
    ),
    'TPU v5e': Exposed(
        tables=1.0, table_sums=1.0, gathers=0.07, sums=0.27, gathers_beside=0.25, sums_beside=1.0, last_sums=0.0,
        t=0.75, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
        one_ring=frozenset({'tables', 'gathers', 'sums'}), all_reduced=frozenset({'table_sums', 'sums'}),
    ),
    'TPU v5e, slices': Exposed(
        tables=1.0, table_sums=1.0, gathers=0.07, sums=1.0, gathers_beside=0.25, sums_beside=1.0, last_sums=0.0,
        t=0.75, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
        one_ring=frozenset({'tables', 'gathers'}), all_reduced=frozenset({'table_sums', 'sums'}),
    ),
    'TPU v4': Exposed(
        tables=1.0, table_sums=1.0, gathers=0.0, sums=1.0, gathers_beside=0.0, sums_beside=1.0, last_sums=0.0,
        t=1.0, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
        all_reduced=frozenset({'table_sums', 'sums'}),
    ),
}  # fmt: skip


# Without the compiler options that pretrax sets, where steps were compiled so. On several slices of v5e there are none.
_BY_DEFAULT = {
    'TPU v5e': _EXPOSED['TPU v5e, slices'],
    'TPU v5p': Exposed(
        tables=1.0, table_sums=1.0, gathers=1.0, sums=1.0, gathers_beside=1.0, sums_beside=1.0, last_sums=0.0,
        t=1.0, e=1.0, c=1.0, p=1.0, copies=1.0, layer_copies=1.0,
        all_reduced=frozenset({'tables', 'table_sums', 'gathers', 'sums'}),
    ),
}  # fmt: skip


def exposed_by_default(device: Device) -> Exposed | None:
    """What is not hidden without compiler options; None: not known."""
    return _BY_DEFAULT.get(device.name)


def exposed_on(device: Device, slices: int = 1) -> Exposed:
    """What is not hidden on a device, of one slice or of several, with the compiler options that pretrax sets."""
    if not device.name.startswith('TPU'):
        return _EXPOSED['GPU']
    name = f'{device.name}, slices' if slices > 1 else device.name
    return _EXPOSED.get(name) or _EXPOSED.get(device.name) or _EXPOSED['SparseCore']
