"""Chooses the pairs of nodes to measure, and finds slow nodes and links from their rates. Imports no JAX."""

import statistics
from collections.abc import Iterator, Mapping

from pretrax.doctor.findings import Finding, warning

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
