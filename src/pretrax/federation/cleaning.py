"""Deletes numbers in the bucket that no island reads any more, so that it does not grow with the rounds.

An island that comes in or catches up begins at the newest anchor, or, if that one is damaged, at the one before, and
reads the differences of the rounds since. So each island deletes its own differences up to the second newest anchor,
and an island that has closed a round deletes the anchors before that one, except that of round 0. Contributions and
closings stay.

Nothing is listed. What names other objects is deleted after them, and the differences of a round after those of the
rounds before. So what is left after a kill is found by the next clean-up. Never found are the numbers of a process that
was killed before it had created the object that names them.
"""

import threading
from collections.abc import Iterator

from pretrax.errors import Report, first_line
from pretrax.federation.anchors import Anchor, description_path
from pretrax.federation.differences import stored
from pretrax.federation.host_weights import in_parallel
from pretrax.federation.objects import ObjectError, Piece, read_contribution
from pretrax.federation.rounds import Rounds
from pretrax.storage.shared_path import ConditionalPath, delete

_LONGEST_WAIT = 30.0  # seconds for which the end of a run waits


class Cleaner:
    """Deletes in the background, in process 0 of an island.

    Args:
        rounds: of the island.
        keep: rounds between anchors.
    """

    def __init__(self, place: ConditionalPath, name: str, rounds: Rounds, keep: int, report: Report):
        self._place, self._name, self._rounds, self._keep = place, name, rounds, keep
        self._report, self._has_failed = report, False
        self._differences = self._anchors = 0  # rounds up to which they are deleted
        self._thread = threading.Thread()

    def start(self, newest: int, is_closer: bool) -> None:
        """Cleans up, unless that is going on. A failure is reported once, and the next clean-up finds what is left."""
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, args=[newest, is_closer], name='cleaning', daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Waits for the end of the clean-up, but not for long."""
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_WAIT)

    def clean(self, newest: int, is_closer: bool) -> None:
        """Deletes what no island reads any more.

        Args:
            newest: a round that is closed.
            is_closer: whether to delete anchors too.

        Raises:
            OSError: the rest is left for the next call.
        """
        while unused := self._rounds.unused:
            self._delete(unused[0])
            unused.pop(0)
        due = newest - newest % self._keep - self._keep  # the largest number of the second newest anchor
        if due <= self._differences and (due <= self._anchors or not is_closer):
            return
        anchors = self._existing(newest)
        if not next(anchors, None) or not (second := next(anchors, None)):
            return
        self._delete_differences(second)
        if is_closer:
            self._delete_anchors(second)

    def _run(self, newest: int, is_closer: bool) -> None:
        try:
            self.clean(newest, is_closer)
        except OSError as error:
            if not self._has_failed:
                self._report(f'WARNING: federation: old differences are not deleted: {first_line(error)}')
            self._has_failed = True

    def _existing(self, newest: int) -> Iterator[int]:
        """The numbers of the anchors, the newest first, without damaged ones."""
        for number in range(newest - newest % self._keep, -1, -self._keep):
            if self._anchor(number) is not None:
                yield number

    def _anchor(self, number: int) -> Anchor | None:
        try:
            return Anchor.read(description_path(self._place, number))
        except ObjectError:
            return None

    def _delete_differences(self, last: int) -> None:
        """Deletes those of this island up to a round. Looks back until it finds a round without numbers."""
        left: list[list[Piece]] = []
        for number in range(last, self._differences, -1):
            try:
                own = read_contribution(self._place, number, self._name)
            except ObjectError:
                continue
            pieces = [] if own is None else own[0].all_pieces()
            if pieces and not any(stored(self._place, piece) for piece in pieces):
                break
            left.append(pieces)
        for pieces in reversed(left):
            self._delete(pieces)
        self._differences = last

    def _delete_anchors(self, end: int) -> None:
        """Deletes those after round 0 and before a round."""
        for number in range(self._anchors + self._keep, end, self._keep):
            if (anchor := self._anchor(number)) is not None:
                self._delete([*anchor.weights, *anchor.momentum])
                delete(description_path(self._place, number))
        self._anchors = max(self._anchors, end - self._keep)

    def _delete(self, pieces: list[Piece]) -> None:
        found = [paths for piece in pieces if (paths := stored(self._place, piece))]
        in_parallel([(delete, path) for *objects, _ in found for path in objects])
        in_parallel([(delete, index) for *_, index in found])
