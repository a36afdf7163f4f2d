"""Which checkpoints to keep, and why."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints to keep after a save: the union of the rules below.

    Attributes:
        last: keep the newest `last` checkpoints.
        every: keep each checkpoint whose step is a multiple of `every`; 0: none.
        best: keep the `best` checkpoints with the lowest `val_loss`; 0: none.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def reasons(self, losses: Mapping[int, float | None]) -> dict[int, list[str]]:
        """The reasons to keep each step. `losses` has the validation loss of each step, None if it was not evaluated."""
        steps = sorted(losses)
        rated = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        kept = {
            'newest': steps[-self.last :],
            f'every {self.every}': [step for step in steps if self.every and step % self.every == 0],
            'best': [step for _, step in rated[: self.best]],
        }
        return {step: [reason for reason, which in kept.items() if step in which] for step in steps}

    def chosen(self, losses: Mapping[int, float | None]) -> set[int]:
        """The steps to keep."""
        return {step for step, reasons in self.reasons(losses).items() if reasons}
