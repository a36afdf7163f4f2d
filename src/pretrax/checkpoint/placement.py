"""Which processes receive a copy of a process's piece of a memory checkpoint. Imports no JAX.

Processes are sorted by place, and each sends to the process that comes some number of places later. As that is a
permutation, every process, and so every host, receives as many pieces as it sends.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pretrax.system.process_hosts import described

_MOST = 4  # processes that a text names


class Location(NamedTuple):
    """Where a process runs. What is likely to fail together has equal names; '': not known.

    `host`: the memory that it shares with other processes, for example that of a container.
    """

    rack: str
    slice: str
    machine: str
    host: str


def place_copies(places: Sequence[Location], copies: int) -> list[list[int]]:
    """The processes that receive the copies of each process's piece, the best one first.

    No copy is on the host of its process or of another copy. Among these choices, as many copies as possible are on
    another machine, slice and rack than the process and its other copies. A process for which there are fewer such
    hosts than `copies` gets fewer copies.
    """
    order = sorted(range(len(places)), key=lambda process: (places[process], process))
    placed = [places[process] for process in order]
    holders: list[list[int]] = [[i] for i in range(len(order))]  # in sorted order; each holds its own piece
    received = Counter[int]()
    for _ in range(copies):
        shift = max(_shifts(placed, copies), key=lambda shift: _gain(placed, holders, shift), default=0)
        for i, held in enumerate(holders):
            target = (i + shift) % len(order)
            if not _is_elsewhere(placed, held, target):  # hosts have different numbers of processes
                others = [other for other in range(len(order)) if _is_elsewhere(placed, held, other)]
                if not others:
                    continue
                target = min(others, key=lambda other: (received[other], *(-x for x in _apart(placed, held, other))))
            held.append(target)
            received[target] += 1
    found = {order[i]: [order[target] for target in held[1:]] for i, held in enumerate(holders)}
    return [found[process] for process in range(len(places))]


def describe_copies(targets: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    """The copies as text, such as 'process 0 (a) -> 2 (b), 1 (a) -> 3 (b)'.

    Args:
        hosts: the name of the machine of each process.
    """

    def name(process: int) -> str:
        return described([process], {process: hosts[process]}).removeprefix('process ')

    texts = [f'{name(process)} -> {" and ".join(map(name, to))}' for process, to in enumerate(targets) if to]
    without = [process for process, to in enumerate(targets) if not to]
    more = [f'{len(texts) - _MOST} more'] if len(texts) > _MOST else []
    more += [f'none of {described(without, dict(enumerate(hosts)))}'] if without and texts else []
    return f'process {", ".join([*texts[:_MOST], *more])}' if texts else 'none: there is no other host'


def _shifts(placed: Sequence[Location], copies: int) -> list[int]:
    """The shifts to choose from: a multiple of the largest group leaves the group of every process behind."""
    groups = [Counter(place[: level + 1] for place in placed) for level in range(len(Location._fields))]
    sizes = {max(group.values(), default=1) * k for group in groups for k in range(1, copies + 2)}
    return sorted({size for size in sizes if size < len(placed)} | {len(placed) // 2})


def _gain(placed: Sequence[Location], holders: Sequence[Sequence[int]], shift: int) -> tuple[int, ...]:
    """How many copies a shift places on another host; machine, slice and rack."""
    new = [(held, (i + shift) % len(placed)) for i, held in enumerate(holders)]
    usable = [_apart(placed, held, target) for held, target in new if _is_elsewhere(placed, held, target)]
    return len(usable), *map(sum, zip(*usable, strict=True))


def _is_elsewhere(placed: Sequence[Location], held: Sequence[int], target: int) -> bool:
    return all(placed[target].host != placed[holder].host for holder in held)


def _apart(placed: Sequence[Location], held: Sequence[int], target: int) -> tuple[int, int, int]:
    """From how many holders of a piece a process differs in machine, slice and rack."""
    to = placed[target]
    machine, tpu_slice, rack = (sum(placed[holder][level] != to[level] for holder in held) for level in (2, 1, 0))
    return machine, tpu_slice, rack
