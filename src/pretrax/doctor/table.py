"""The table of `pretrax doctor`, in at most 100 columns and no more than the terminal has, and its JSON."""

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence

from pretrax.doctor.comparison import Row

_WIDTH = 100
_MARKS = {'ok': 'ok', 'warning': 'warning', 'failure': 'FAILURE'}
_ORDER = ('failure', 'warning', 'ok')


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        rows: rows of the table.
        names: names of the nodes, by process.
        seconds: it took.
    """

    rows: Sequence[Row]
    names: Mapping[int, str]
    seconds: float

    @property
    def exit_code(self) -> int:
        """1 if something would break training."""
        return int(any(row.status == 'failure' for row in self.rows))

    def to_json(self) -> str:
        """The rows as one JSON object."""
        rows = [{**dataclasses.asdict(row), 'nodes': [self.names[i] for i in row.nodes]} for row in self.rows]
        return json.dumps({'nodes': list(self.names.values()), 'exit_code': self.exit_code, 'checks': rows}, indent=1)

    def lines(self) -> list[str]:
        """The table, with the failures first."""
        rows = sorted(self.rows, key=lambda row: _ORDER.index(row.status))
        cells = [(row.check, self._where(row.nodes)) for row in rows]
        wide = [min(22, max((len(cell[i]) for cell in cells), default=0)) for i in (0, 1)]
        count = len(self.names)
        lines = [f'doctor: {count} node{"s" * (count > 1)}, {self.seconds:.0f} s', '']
        for row, (check, where) in zip(rows, cells, strict=True):
            head = f'{_MARKS[row.status]:<9}{check:<{wide[0]}}  ' + (f'{where:<{wide[1]}}  ' if count > 1 else '')
            lines += _wrapped(head, row.result, min(len(head), 52))
            if row.fix and row.status != 'ok':
                lines += _wrapped(' ' * 9 + 'fix: ', row.fix, 14)
        return [*lines, '', self._summary()]

    def _where(self, nodes: Sequence[int]) -> str:
        if len(nodes) == len(self.names):
            return 'all nodes' if len(nodes) > 2 else 'both nodes' if len(nodes) == 2 else self.names[nodes[0]]
        shown = ', '.join(self.names[i] for i in nodes[:2])
        return shown if len(nodes) <= 2 else f'{shown} and {len(nodes) - 2} more'

    def _summary(self) -> str:
        counts = {status: sum(row.status == status for row in self.rows) for status in ('failure', 'warning')}
        said = ', '.join(f'{n} {status}{"s" * (n > 1)}' for status, n in counts.items() if n)
        if counts['failure']:
            return f'{said}: training would fail'
        return f'{said}: training would run' if said else 'nothing found that would break or slow training'


def names_of(hosts: Mapping[int, str]) -> dict[int, str]:
    """A name for each process: its host, or host/process if processes share a host or have none."""
    taken = list(hosts.values())
    return {
        index: f'process {index}' if not host else host if taken.count(host) == 1 else f'{host}/{index}'
        for index, host in sorted(hosts.items())
    }


def _wrapped(head: str, text: str, indent: int) -> list[str]:
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
    after = ' ' * min(indent, width // 2)
    first = [] if len(head) + 12 <= width else [head.rstrip()]  # no room beside it
    lines = textwrap.wrap(
        text, width, initial_indent=after if first else head, subsequent_indent=after, break_on_hyphens=False
    )
    return [*first, *lines] or [head.rstrip()]
