"""Compares what nodes and pairs of nodes measured; writes the table of `pretrax doctor` and its JSON. Without JAX."""

import dataclasses
import json
import shutil
import statistics
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from pretrax.doctor.findings import Finding, Status, warning

_WORTH = 0.10  # a synchronous step waits for the slowest: 10% of all nodes' time is worth looking at
_SCORE = 3.5  # modified z-score: Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers
_NORMAL = 0.6745  # the median absolute deviation of a normal distribution, in standard deviations


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table. `nodes`: the processes it is about, in order; all for a check that passed everywhere."""

    check: str
    status: Status
    nodes: tuple[int, ...]
    result: str
    fix: str = ''


def outliers[Key: Hashable](rates: Mapping[Key, float]) -> dict[Key, float]:
    """The nodes that are far below the others, and the share of the median that each is below it.

    A rate is an outlier if it is at least 10% below the median (less is not worth a repair), and if its modified
    z-score 0.6745 (median - rate) / MAD is above 3.5, where MAD is the median absolute deviation. Median and MAD hold
    if almost half of the nodes are slow; a mean and a standard deviation do not, since one slow node moves both. With
    fewer than four rates the MAD says nothing, and with equal rates it is 0: then the 10% decide.
    """
    if len(rates) < 2:
        return {}
    middle = statistics.median(rates.values())
    spread = statistics.median(abs(rate - middle) for rate in rates.values()) if len(rates) >= 4 else 0.0
    return {
        key: 1 - rate / middle
        for key, rate in rates.items()
        if middle - rate > _WORTH * middle and _NORMAL * (middle - rate) > _SCORE * spread
    }


def share_of(speed: float, limit: float, name: str) -> str:
    """A speed as a share of a limit, in words, at most 100 %: an exceeded limit does not describe the hardware."""
    return f'more than {name}' if speed > limit else f'{speed / limit:.0%} of {name}'


def compare_nodes(found: Mapping[int, Iterable[Finding]]) -> list[Row]:
    """The rows of the table, in the order of the checks.

    Args:
        found: what each process that answered found.
    """
    by_check: dict[str, dict[int, list[Finding]]] = {}
    for index, findings in found.items():
        for finding in findings:
            by_check.setdefault(finding.check, {}).setdefault(index, []).append(finding)
    rows: list[Row] = []
    groups: dict[str, int] = {}  # the place of its row
    for check, nodes in by_check.items():
        bad = [*_bad(check, nodes), *_different(check, nodes, found), *_slow(check, nodes)]
        group = next(iter(nodes.values()))[0].group
        good = _good(check, nodes)
        if bad:
            rows += bad
        elif not group:
            rows.append(good)
        elif group in groups:
            before = rows[groups[group]]
            rows[groups[group]] = dataclasses.replace(before, result=f'{before.result}, {check} {good.result}')
        else:
            groups[group] = len(rows)
            rows.append(dataclasses.replace(good, check=group, result=f'{check} {good.result}'))
    return rows


def _bad(check: str, nodes: Mapping[int, list[Finding]]) -> list[Row]:
    """A row for each finding that is not 'ok'. Nodes with the same finding share a row."""
    rows: dict[tuple[Status, str, str], list[int]] = {}
    for index, findings in nodes.items():
        for finding in findings:
            if finding.status != 'ok':
                rows.setdefault((finding.status, finding.result, finding.fix), []).append(index)
    return [Row(check, status, tuple(who), result, fix) for (status, result, fix), who in rows.items()]


def _different(check: str, nodes: Mapping[int, list[Finding]], all_nodes: Iterable[int]) -> list[Row]:
    """A row for each value that is not the most common one."""
    of = {index: f for index, findings in nodes.items() for f in findings if f.same is not None}
    if not of:
        return []
    one = next(iter(of.values()))
    shown = {index: finding.result for index, finding in of.items()}
    values = {index: finding.same for index, finding in of.items()}
    if one.absent is not None:
        missing = [index for index in all_nodes if index not in nodes]
        shown |= dict.fromkeys(missing, one.absent)
        values |= dict.fromkeys(missing, None)
    counts = Counter(value for _, value in sorted(values.items()))
    usual, most = counts.most_common(1)[0]
    usually = next(shown[index] for index, value in values.items() if value == usual)
    rows = []
    for value in counts:
        if value != usual:
            who = tuple(sorted(index for index, other in values.items() if other == value))
            text = f'{shown[who[0]]}, but {usually} on {most} other{"s" if most > 1 else ""}'
            rows.append(Row(check, one.differs, who, text, one.fix))
    return rows


def _slow(check: str, nodes: Mapping[int, list[Finding]]) -> list[Row]:
    of = {index: f for index, findings in nodes.items() for f in findings if f.compare and f.amount is not None}
    slow = outliers({index: finding.amount or 0.0 for index, finding in of.items()})
    return [
        Row(
            check,
            'warning',
            (index,),
            f'slow: {of[index].result}, {below:.0%} below the median of {len(of)} nodes',
            of[index].fix,
        )
        for index, below in slow.items()
    ]


def _good(check: str, nodes: Mapping[int, list[Finding]]) -> Row:
    """One row for all nodes, with the lowest amount."""
    every = [(index, finding) for index, findings in nodes.items() for finding in findings]
    amounts = [(finding.amount, index, finding) for index, finding in every if finding.amount is not None]
    results = list(dict.fromkeys(finding.result for _, finding in every))
    if len(results) == 1:
        result = results[0]
    elif amounts:
        result = f'at least {min(amounts, key=lambda entry: entry[0])[2].result}'
    else:
        result = ' / '.join(results[:3]) + (' / ...' if len(results) > 3 else '')
    return Row(check, 'ok', tuple(nodes), result)


_WIDTH = 100
_MARKS = {'ok': 'ok', 'warning': 'warning', 'failure': 'FAILURE'}
_ORDER = ('failure', 'warning', 'ok')


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings of an examination."""

    rows: Sequence[Row]  # rows of the table
    names: Mapping[int, str]  # names of the nodes, by process
    seconds: float  # duration of the examination

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


NETWORK_FIX = 'look at the network of that node: ethtool, ip -s link, ibstat, iperf3 to another node'
_ROUNDS = 3  # of pairs: each node is measured with three others
_SLOW_PAIR = 0.5  # of the median pair


def rounds(n: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of n players, by the circle method; with an odd n one of them pauses in each round."""
    players = [*range(n), *([-1] if n % 2 else [])]
    for _ in range(min(_ROUNDS, len(players) - 1)):
        half = len(players) // 2
        yield [(a, b) for a, b in zip(players[:half], players[: half - 1 : -1], strict=True) if a >= 0 and b >= 0]
        players = [players[0], players[-1], *players[1:-1]]


def slow_pairs(rates: Mapping[tuple[int, int], float], names: Mapping[int, str]) -> Iterator[Finding]:
    """Findings about slow nodes, or else about slow links, from the rates of pairs.

    Args:
        rates: bytes/s of each pair of processes.
    """
    if not rates:
        return
    usual = statistics.median(rates.values())
    slow = {pair for pair, rate in rates.items() if rate < _SLOW_PAIR * usual}
    of = {i: [pair for pair in rates if i in pair] for i in names}
    nodes = [i for i in names if len(of[i]) > 1 and slow.issuperset(of[i])]
    for i in nodes:
        rate = statistics.median(rates[pair] for pair in of[i])
        text = f'{names[i]} is slow: {rate / 1e9:.3g} GB/s to each other node, the median is {usual / 1e9:.3g}'
        yield warning('node to node', text, NETWORK_FIX)
    for a, b in sorted(pair for pair in slow if not set(pair) & set(nodes)):
        text = f'{names[a]} - {names[b]} is slow: {rates[a, b] / 1e9:.3g} GB/s, the median is {usual / 1e9:.3g}'
        yield warning('node to node', text, NETWORK_FIX)
    if not slow:
        text = f'{usual / 1e9:.3g} GB/s in the median of {len(rates)} pairs, {min(rates.values()) / 1e9:.3g} at least'
        yield Finding('node to node', text, amount=min(rates.values()))
