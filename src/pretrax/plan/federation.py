"""The rounds of a federation, as `pretrax plan --island-bandwidth` predicts them. It imports no JAX.

In each round, an island sends its difference of a fragment once, and reads those of all islands: each of its hosts
reads the part of the weights that it holds. All islands do so when the last one has contributed. `delay` steps hide
that time.
"""

import dataclasses
from collections.abc import Iterator

from pretrax.amounts import duration, size
from pretrax.config.schema import Federation
from pretrax.federation.encoding import encoded_size

# What the prediction leaves out, and the keys that change only that
LEFT_OUT = {
    'the loss, which grows with every and islands': ('mixing', 'outer_rate', 'outer_momentum'),
    'islands that are slower or late': ('patience', 'wait_for'),
    'the time to encode and average on the hosts, and of each request': ('bucket',),
    'islands that come in and read whole weights': ('name',),
}


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of one island.

    Attributes:
        numbers: weights of the model.
        step: seconds of a step.
        bandwidth: bytes/s between the island and the bucket, in each direction.
        readers: how many times the hosts of the island hold a weight, together.
    """

    section: Federation
    numbers: int
    step: float
    bandwidth: float
    readers: float

    @property
    def up(self) -> int:
        """Bytes that an island sends in a round."""
        return encoded_size(-(-self.numbers // self.section.fragments), self.section.encoding)

    @property
    def down(self) -> float:
        """Bytes that an island reads in a round."""
        return self.section.islands * self.up * self.readers

    @property
    def seconds(self) -> float:
        """From the contribution of an island to the average."""
        return (self.up + self.down) / self.bandwidth

    @property
    def stored(self) -> int:
        """Most bytes of numbers in the bucket: differences since the second newest anchor, and anchors.

        Besides the weights of round 0, there are two anchors, and one is being written.
        """
        return self.section.islands * 2 * self.section.keep * self.up + (4 + 3 * 8) * self.numbers

    @property
    def exposed(self) -> float:
        """Seconds of a round in which an island does not train."""
        return max(0.0, self.seconds - self.section.delay * self.step)

    @property
    def efficiency(self) -> float:
        """The part of the time in which an island trains."""
        between = self.section.rounds_apart * self.step
        return between / (between + self.exposed)

    @property
    def all_reduce(self) -> float:
        """Seconds in which a ring of the islands adds up gradients in f32, once."""
        return 8 * self.numbers * (1 - 1 / self.section.islands) / self.bandwidth

    def lines(self, tokens: int) -> Iterator[str]:
        """The lines that `pretrax plan --island-bandwidth` prints; `tokens`: of all steps of an island."""
        section, often = self.section, self.step / (self.step + self.all_reduce)
        yield f'federation of {section.islands} islands with {size(self.bandwidth)}/s each, to and from the bucket:'
        yield (
            f'    a round every {section.rounds_apart} steps, 1 / {section.fragments} of the weights in '
            f'{section.encoding}: {size(self.up)} up, {size(self.down)} down'
        )
        yield f'    every {section.keep} rounds, one island also writes {size(8 * self.numbers)}: weights and momentum'
        yield (
            f'    the bucket has up to {size(self.stored)}: the differences of {2 * section.keep} rounds, the first '
            'weights, and three times weights and momentum'
        )
        yield (
            f'    a round takes {duration(self.seconds)}; federation.delay={section.delay} hides '
            f'{duration(self.seconds - self.exposed)} of them; efficiency {self.efficiency:.1%}'
        )
        yield (
            f'    instead, an all-reduce of f32 gradients in every step takes {duration(self.all_reduce)}; efficiency '
            f'{often:.1%} if no step hides it'
        )
        yield f'    {section.islands * tokens:,} tokens of all islands together'
        yield f'    not in the prediction: {"; ".join(LEFT_OUT)}'
