"""The gradient noise scale while a run trains (`log.noise_scale`). McCandlish et al. 2018, arXiv:1812.06162."""

import math
from typing import Any

from pretrax.errors import Report, UserError
from pretrax.model.loss import Batch
from pretrax.run.clock import Clock
from pretrax.run.logged_program import LoggedProgram
from pretrax.run.setup import Run
from pretrax.train.noise_scale import make_noise
from pretrax.train.step import TrainState

_KEPT = 0.95  # decay of both sums per estimate: they cover about the last 20


class NoiseScale:
    """Estimates tr(Sigma) and |G|^2 every `log.noise_scale` steps, and divides their averages.

    Both estimates are noisy, so they are averaged separately; the average of quotients would be biased.

    Args:
        description: description of the checkpoint that training starts from, for `rewind`.

    Raises:
        UserError: a batch has one sequence.
    """

    def __init__(self, run: Run, description: dict[str, Any], clock: Clock, report: Report):
        if run.log.noise_scale and run.rows < 2:
            raise UserError(
                'log.noise_scale compares two halves of a batch, but a batch has one sequence\n'
                'use larger batch.tokens, or log.noise_scale=0'
            )
        self._length = run.size.sequence_length
        self._program = LoggedProgram(
            run=run,
            name='the noise scale',
            key='noise_scale',
            make=lambda: make_noise(run.recipe),
            arguments=lambda _: (),
            clock=clock,
            report=report,
        )
        self.rewind(description)

    def compute(self, number: int, index: int, state: TrainState, batch: Batch) -> None:
        """Starts the estimates of a step that is about to be taken, if they are due."""
        self._program.compute(number, index, state, batch)

    def read(self, number: int) -> dict[str, float]:
        """The metrics of a step that has ended; {}: none were due, or half of the batch has no target.

        `noise_scale` is missing if an estimate is not finite, and as long as the average of |G|^2 is not positive.
        """
        noise = self._program.read(number)
        if noise is None:
            return {}
        trace, square = map(float, noise)
        if math.isnan(trace):
            return {}
        found = {'noise_trace': trace, 'noise_square': square}
        if not (math.isfinite(trace) and math.isfinite(square)):
            return found
        self._trace, self._square = _KEPT * self._trace + trace, _KEPT * self._square + square
        if self._square > 0:
            found['noise_scale'] = self._length * self._trace / self._square
        return found

    def description(self) -> dict[str, Any]:
        """The part of a checkpoint's description that `rewind` needs."""
        return {'noise_sums': [self._trace, self._square]} if self._trace else {}

    def rewind(self, description: dict[str, Any]) -> None:
        """Returns to the averages of a checkpoint."""
        self._trace, self._square = description.get('noise_sums', (0.0, 0.0))
        self._program.forget()
