"""Which share of a step's communication waits, by hardware and kind, as read from the schedules of compiled steps.

`benchmarks/schedule.py` compiles and reads the steps; `tests/cost/test_exposed.py` compares them with the predictions.
"""

import dataclasses
import functools
from pathlib import Path

from pretrax.cost.devices import Device, tpus
from pretrax.tables import read_table


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Share of the time of collectives in which the step waits: what XLA does not hide with the options that pretrax
    sets.
    """

    tables: float  # gathers over d of the embedding and the unembedding
    table_sums: float  # sums over d of their gradients
    # gathers, sums: of the weights and gradients of layers over d
    gathers: float
    sums: float
    # gathers_beside_t, sums_beside_t: the same shares if the mesh also has t, whose collectives run at the same time
    gathers_beside_t: float
    sums_beside_t: float
    last_sums: float  # last sums of one layer over d: the last of the backward pass, which nothing hides
    t: float  # activations over t, if the backward pass keeps those of the forward pass
    t_again: float  # the share over t if layers are recomputed
    t_in_parts: float  # the share over t if layers run in parts of the batch (`model.batch_parts`)
    # e, c, p: activations over that axis
    e: float
    c: float
    p: float
    copies: float  # sums of gradients over the axes that replicate weights
    layer_copies: float  # those of layers over r, in a step of one pass; that of the last layer always waits
    # Names of attributes above whose collectives use one ring if d spans a whole slice, of several dimensions
    one_ring: frozenset[str] = frozenset()
    all_reduced: frozenset[str] = frozenset()  # names of those that are all-reduces, which send twice the bytes


@functools.cache
def _table(name: str) -> dict[str, Exposed]:
    """A section of exposed.yaml."""
    rows = read_table(Path(__file__).with_suffix('.yaml'))[name]
    sets = ('one_ring', 'all_reduced')
    return {device: Exposed(**row | {key: frozenset(row.get(key, ())) for key in sets}) for device, row in rows.items()}


def exposed_by_default(device: Device) -> Exposed | None:
    """What is not hidden without compiler options; None: not known."""
    return _table('by_default').get(device.name)


def exposed_on(device: Device, slices: int = 1) -> Exposed:
    """What is not hidden on a device, of one slice or of several, with the compiler options that pretrax sets."""
    table = _table('with_options')
    if not device.name.startswith('TPU'):
        return table['GPU']
    name = f'{device.name}, slices' if slices > 1 else device.name
    found = table.get(name) or table.get(device.name) or table['SparseCore']
    # With SparseCores, sums over r run layer by layer between slices: `model.plan.choose_reduction`. Read from whole
    # rows of MaxText's tables on two slices of v5p: those of all layers but the last are hidden, and more of the
    # activations over t wait.
    if slices > 1 and any(tpu.sparse_core for tpu in tpus().values() if tpu.device.name == device.name):
        return dataclasses.replace(found, layer_copies=0.0, t=0.6)
    return found
