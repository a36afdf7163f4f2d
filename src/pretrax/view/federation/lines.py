"""The rounds of a federation as lines of metrics, which all readers of `metrics.jsonl` read."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pretrax.federation.objects import Contribution, Taken
from pretrax.view.federation.read import Federation, Round


class Lines:
    """Makes lines of rounds, in their order. What islands found in a round has a line of its own, once it is known.

    Args:
        first: the first round; the tokens of a federation are counted from round 1 on.
    """

    def __init__(self, first: int = 1):
        self.next = first  # the round whose line is the next one
        self._used = self._left_out = 0  # tokens since the first round
        self._is_whole = first == 1
        self._last: Round | None = None
        self._found: set[str] = set()  # keys of what was found in the last round

    def make(self, rounds: Sequence[Round], taken: Sequence[Taken] = ()) -> list[dict[str, Any]]:
        """The lines of the next rounds, and of what was found in the last one. `taken`: as in `Federation`."""
        return [*(line for one in rounds for line in self._round_lines(one)), *self._found_lines(taken, are_all=False)]

    def _round_lines(self, one: Round) -> Iterator[dict[str, Any]]:
        assert one.closing is not None
        yield from self._found_lines([each.took for each in one.contributions.values() if each.took is not None])
        closing, members, tokens = one.closing, one.members, one.tokens
        self._left_out += sum(one.left_out.values())
        self._used += sum(tokens.values())
        totals = {'tokens': self._used, 'tokens_left_out': self._left_out} if self._is_whole else {}
        times = [each.time for each in one.contributions.values() if each.time]
        yield {
            'step': closing.step,
            **({'time': max(times)} if times else {}),
            **_mean_loss(members),
            **totals,
            **_speed(members),
            'round/round': one.number,
            'round/members': len(closing.members),
            'round/left_out': len(closing.left_out),
            'round/rejected': len(closing.rejected),
            'round/tokens': sum(tokens.values()),
            'round/bytes_up': sum(each.bytes for each in one.contributions.values()),
            **{f'island_loss/{each.name}': each.loss for each in members if each.loss is not None},
            **{f'island_tokens/{name}': count for name, count in tokens.items()},
        }
        self._last, self._found, self.next = one, set(), one.number + 1

    def _found_lines(self, taken: Sequence[Taken], are_all: bool = True) -> Iterator[dict[str, Any]]:
        """The line of what was found in the last round. `are_all`: no other island will say more."""
        if self._last is None or self._last.closing is None:
            return
        own = [one for one in taken if one.round == self._last.number]
        losses = [one.val_loss for one in own if one.val_loss is not None]
        norms = [one.norm for one in own if one.norm is not None]
        values: dict[str, Any] = {}
        if losses:
            values['val_loss'] = losses[0]
        if norms:
            values |= {'round/outer_norm': norms[0], **spread(self._last.members, norms[0])}
        if own and (are_all or len(own) == len(self._last.closing.members)):
            values['round/seconds'] = max(one.seconds for one in own)
            values['round/bytes_down'] = sum(one.bytes for one in own)
        new = {key: value for key, value in values.items() if key not in self._found}
        self._found |= new.keys()
        if new:
            yield {'step': self._last.closing.step, 'round/round': self._last.number, **new}


def metric_lines(federation: Federation) -> list[dict[str, Any]]:
    """The lines of a federation that was read."""
    first = federation.rounds[0].number if federation.rounds else 1
    return Lines(first).make(federation.rounds, federation.taken)


def as_file(lines: Sequence[dict[str, Any]]) -> bytes:
    """The lines as the content of a `metrics.jsonl`."""
    return b''.join(json.dumps(line, allow_nan=False).encode() + b'\n' for line in lines)


def spread(members: Sequence[Contribution], norm: float) -> dict[str, float]:
    """How far the differences D_i of a round lie apart, of which only norms are known. `norm`: of their mean G.

    With the weights w_i, the sum of w_i |D_i - G|^2 is that of w_i |D_i|^2 minus |G|^2. The sum of w_i D_i G is |G|^2.
    The sum of w_i w_j D_i D_j over pairs of different islands is |G|^2 minus the sum of w_i^2 |D_i|^2.
    """
    norms = [one.norm for one in members]
    tokens = sum(one.tokens for one in members)
    if len(norms) < 2 or None in norms:
        return {}
    pairs = [(one.tokens / tokens, float(one.norm or 0)) for one in members]
    mean, own = sum(w * x for w, x in pairs), sum((w * x) ** 2 for w, x in pairs)
    found = {'round/distance': math.sqrt(max(0.0, sum(w * x * x for w, x in pairs) - norm * norm))}
    if mean > 0 and mean * mean > own:
        found |= {'round/cosine': norm / mean, 'round/pair_cosine': (norm * norm - own) / (mean * mean - own)}
    return found


def _mean_loss(members: Sequence[Contribution]) -> dict[str, float]:
    known = [(one.tokens, one.loss) for one in members if one.loss is not None]
    tokens = sum(count for count, _ in known)
    return {'loss': sum(count * loss for count, loss in known) / tokens} if known else {}


def _speed(members: Sequence[Contribution]) -> dict[str, float]:
    speeds = [one.tokens / one.seconds for one in members if one.seconds > 0 and one.first_batch < one.last_batch]
    return {'tokens_per_second': sum(speeds)} if speeds and len(speeds) == len(members) else {}
