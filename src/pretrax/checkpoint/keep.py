"""Which checkpoints are good, which to keep, and which to remove. Nothing here touches a file."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any


def has_finite_state(description: Mapping[str, Any]) -> bool:
    """Whether the weights and the optimizer state of a checkpoint had no NaN and no infinity when it was saved."""
    return description.get('finite_state', True)


def is_good(description: Mapping[str, Any]) -> bool:
    """Whether a rollback may return to a checkpoint: no steps were being skipped, and its state is finite."""
    return not description.get('skipped_in_a_row') and has_finite_state(description)


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints to keep after a save: the union of the rules below.

    A doubtful checkpoint never takes the place of a good one: it is kept only while it is the newest checkpoint.
    """

    last: int = 3  # keep the newest `last` good checkpoints
    every: int = 0  # keep each checkpoint whose step is a multiple of `every`; 0: none
    best: int = 0  # keep the `best` good checkpoints with the lowest `val_loss`; 0: none

    def reasons(
        self,
        losses: Mapping[int, float | None],
        doubtful: Collection[int] = (),
        unreadable: Collection[int] = (),
    ) -> dict[int, list[str]]:
        """The reasons to keep each step; none: it is removed.

        Args:
            losses: validation loss of each step; None if it was not evaluated.
            doubtful: steps whose checkpoints are not good.
            unreadable: steps whose manifests cannot be read, which may be temporary. Such a checkpoint is kept until
                `last` newer good ones exist, and counts for none of the other rules.
        """
        readable = sorted(set(losses) - set(unreadable))
        # Without a good checkpoint the doubtful ones are all there is.
        good = [step for step in readable if step not in doubtful] or readable
        newest = good[-self.last :]
        rated = sorted((loss, step) for step in good if (loss := losses[step]) is not None and math.isfinite(loss))
        kept = {
            'newest': newest,
            'newest, doubtful': [step for step in readable[-1:] if step not in good],
            f'every {self.every}': [step for step in losses if self.every and step % self.every == 0],
            'best': [step for _, step in rated[: self.best]],
            'unreadable': [step for step in unreadable if len(good) < self.last or step > newest[0]],
        }
        return {step: [reason for reason, which in kept.items() if step in which] for step in sorted(losses)}

    def superfluous(self, saved: int, descriptions: Mapping[int, Mapping[str, Any] | None]) -> list[int]:
        """The steps to remove after a save, oldest first.

        Only a good checkpoint supersedes good ones. It also supersedes all later ones: training continued from an
        earlier step than theirs, because they were damaged, had a non-finite state, or a rollback could not remove
        them.

        Args:
            saved: the step that was just saved.
            descriptions: description of each checkpoint; None if it cannot be read.
        """
        ours = {step: description for step, description in descriptions.items() if step <= saved}
        losses = {step: (description or {}).get('val_loss') for step, description in ours.items()}
        doubtful = {step for step, description in ours.items() if description is not None and not is_good(description)}
        unreadable = {step for step, description in ours.items() if description is None}
        superseded = {step for step, why in self.reasons(losses, doubtful, unreadable).items() if not why}
        if saved in doubtful | unreadable:
            return sorted(superseded & doubtful)
        return sorted(superseded | (descriptions.keys() - ours.keys()))
