"""Reads the published speeds of pretraining in published.yaml.

A third of the rows is held out by `is_held_out`, so that no constant of `pretrax plan` is ever set by looking at it.
"""

import dataclasses
import hashlib
import math
import pathlib
from typing import Any

import yaml

from pretrax.errors import UserError

HERE = pathlib.Path(__file__).parent
TABLE = HERE / 'published.yaml'

MATMULS = {'bf16': 'compute', 'fp8': 'fp8', 'mxfp8': 'fp8', 'int8': 'int8'}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of published.yaml, whose head describes the fields. `sizes`: of the model."""

    source: str
    id: str
    chip: str
    model: str
    sizes: dict[str, Any]
    chips: int
    topology: str | None = None
    nodes: int = 1
    network: float | None = None
    batch: int | None = None
    length: int | None = None
    micro: int | None = None
    precision: str = 'bf16'
    fsdp: int = 1
    dp: int | None = None
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: Any = None
    step: float | None = None
    tokens: float | None = None
    samples: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    counts: str | None = None
    note: str | None = None
    incomplete: str | None = None

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.source, self.id)

    @property
    def devices(self) -> int:
        """JAX devices: two per chip of tpu7x."""
        return self.chips * (2 if self.chip == 'TPU v7 (half a chip)' else 1)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh axes of the parallelism. Copies of the weights are along r.

        Raises:
            UserError: the sizes do not divide the devices.
        """
        sizes = {'d': self.fsdp, 'e': self.ep, 'c': self.cp, 't': self.tp, 'p': self.pp}
        copies, rest = divmod(self.devices, math.prod(sizes.values()))
        if rest:
            raise UserError('experts are spread over the devices of another axis, which pretrax cannot do')
        return {'r': copies, **sizes}


def is_held_out(source: str, name: str) -> bool:
    """Whether a row is held out: a third of all rows, by a hash of its source and id."""
    return int(hashlib.sha256(f'{source}|{name}'.encode()).hexdigest(), 16) % 3 == 0


def read_rows(path: pathlib.Path = TABLE) -> list[Row]:
    """All rows, with the fields that the rows of a source share."""
    table = yaml.safe_load(path.read_text(encoding='utf-8'))
    return [
        Row(source=name, **source['common'] | row, sizes=table['models'][(source['common'] | row)['model']])
        for name, source in table['sources'].items()
        for row in source['rows']
    ]
