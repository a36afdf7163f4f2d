"""How far published steps are from their predictions: the interval that a plan prints."""

import dataclasses
import functools
from pathlib import Path

from pretrax.tables import read_table

ALL = 'all chips'  # for chips with few published steps


@dataclasses.dataclass(frozen=True)
class Published:
    """Published steps of a kind. `low`, `high`: quantiles of published seconds over predicted ones, 10 % and 90 %."""

    chip: str
    runs: int
    low: float
    high: float

    def interval(self, seconds: float) -> str:
        """The interval around a predicted time that contains 8 of 10 of these steps."""
        low, high = (f'{ratio * seconds:.3g}' for ratio in (self.low, self.high))
        return f'80% interval {low} to {high} s, from {self.runs} published runs on {self.chip}'


@functools.cache
def published_steps(device: str, compute: str, in_eight_bits: bool, has_experts: bool) -> Published | None:
    """The published steps on a device in devices.yaml, or on all chips if it has few; None in f32."""
    if compute == 'f32':
        return None
    kind = 'mixtures of experts' if has_experts else 'dense, 8 bits' if in_eight_bits else 'dense, bf16'
    chips = read_table(Path(__file__).with_suffix('.yaml'))[kind]
    chip = device if device in chips else ALL
    return Published(chip, **chips[chip])
