"""Stacked weights of layers that differ: the leading dimension of a weight counts the layers that have it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """Layers `start` to `start + length * repeats`: the same `length` layers, `repeats` times."""

    start: int
    length: int
    repeats: int


def segments(layers: Sequence[Any]) -> list[Segment]:
    """Cuts layers into segments. Layers of the same kind compare equal.

    At each start, the cycle whose repetitions cover the most layers is taken; of several, the shortest. Layers in a row
    that start no repetition form one segment, with one cycle.
    """
    found: list[Segment] = []
    start = 0
    while start < len(layers):
        best = max(
            (_repetition(layers, start, length) for length in range(1, (len(layers) - start) // 2 + 1)),
            key=lambda one: (one.length * one.repeats, -one.length),
            default=Segment(start, 1, 1),
        )
        if best.repeats == 1:
            best = Segment(start, 1, 1)
            if found and found[-1].repeats == 1:
                best = Segment(found[-1].start, found.pop().length + 1, 1)
        found.append(best)
        start = best.start + best.length * best.repeats
    return found


def _repetition(layers: Sequence[Any], start: int, length: int) -> Segment:
    repeats, cycle = 1, layers[start : start + length]
    while layers[start + repeats * length : start + (repeats + 1) * length] == cycle:
        repeats += 1
    return Segment(start, length, repeats) if repeats > 1 else Segment(start, 1, 1)


class Stack:
    """The weights of some layers by name.

    Args:
        weights: [layers that have it, ...] by name.
        names: of the weights of each layer.
    """

    def __init__(self, weights: Mapping[str, Any], names: Sequence[Collection[str]]):
        self.weights, self.names = weights, names

    def layer(self, i: int) -> dict[str, Any]:
        """The weights of layer i."""
        return {name: w[self._before(i, name)] for name, w in self.weights.items() if name in self.names[i]}

    def cycles(self, segment: Segment) -> dict[str, Any]:
        """The weights of a segment: [cycles, ...], or [cycles, layers of a cycle with it, ...] for several."""
        start, length, repeats = segment
        parts = {}
        for name, w in self.weights.items():
            first, end = (self._before(start + n, name) for n in (0, length * repeats))
            if first < end:
                part = w if end - first == w.shape[0] else w[first:end]
                parts[name] = part if length == 1 else part.reshape(repeats, -1, *w.shape[1:])
        return parts

    def cycle_layer(self, segment: Segment, i: int, cycle: Mapping[str, Any]) -> dict[str, Any]:
        """The weights of the i-th layer of a cycle, from one slice of `cycles`."""
        if segment.length == 1:
            return dict(cycle)
        start = segment.start
        return {
            name: w[self._before(start + i, name) - self._before(start, name)]
            for name, w in cycle.items()
            if name in self.names[start + i]
        }

    def _before(self, i: int, name: str) -> int:
        """How many layers before layer i have a weight."""
        return sum(name in names for names in self.names[:i])
