"""Which checkpoints stay, and why."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is whole: the union of what each field asks for.

    Attributes:
        last: the newest ones.
        every: those of steps that it divides; 0 for none.
        best: those with the lowest `val_loss` in their description; 0 for none.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def reasons(self, losses: Mapping[int, float | None]) -> dict[int, list[str]]:
        """Why each step stays, of steps and their validation losses (None: not evaluated there); [] for no reason."""
        steps = sorted(losses)
        rated = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        kept = {
            'newest': steps[-self.last :],
            f'every {self.every}': [step for step in steps if self.every and step % self.every == 0],
            'best': [step for _, step in rated[: self.best]],
        }
        return {step: [reason for reason, which in kept.items() if step in which] for step in steps}

    def chosen(self, losses: Mapping[int, float | None]) -> set[int]:
        """The steps that stay."""
        return {step for step, reasons in self.reasons(losses).items() if reasons}
