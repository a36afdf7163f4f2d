"""What a layer knows besides its input and its weights.

Letters: B batch, L length, M d_model.
"""

import dataclasses

import jax

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.dropout import drop, seeds_of_layer
from pretrax.model.matmul import gather
from pretrax.model.numerics import Formats
from pretrax.model.part import Part
from pretrax.model.plan import ExecutionPlan
from pretrax.model.scores import Scores, scores_of
from pretrax.shardlib import bool_, i32, num, pytree_dataclass, u32


@pytree_dataclass
class Tokens:
    """What layers know of the tokens."""

    positions: i32['B/r/d/e L/c']  # in the token's document
    segments: i32['B/r/d/e L/c']  # the number of its document
    counted: bool_['B/r/d/e L/c'] | None  # tokens in the statistics of a router; None: no statistics
    seeds: u32['B/r/d/e L/c two'] | None = None  # random words for dropout; None: nothing is dropped


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A layer: the decoder that it is part of, its window and positions, and the number formats of its products."""

    arch: Architecture
    plan: ExecutionPlan
    kind: LayerKind
    formats: Formats
    gathered: dict[str, jax.Array] | None = None  # whole weights by name, of a layer that runs in parts
    number: i32[''] | None = None  # of the layer, if something is dropped

    @property
    def scores(self) -> Scores:
        """How attention scores are computed from products of queries and keys."""
        return scores_of(self.arch, self.kind)

    def gather(self, name: str, spec: str, w: Part, x: jax.Array) -> jax.Array:
        """`matmul.gather` of a weight, once for all parts of the batch."""
        known = {} if self.gathered is None else self.gathered
        if name not in known:
            known[name] = gather(spec, getattr(w, name), x, self.formats.sums)
        return known[name]

    def seeds(self, part: str, tokens: Tokens, rate: float) -> u32['B/r/d/e L/c two'] | None:
        """Random words of each token for dropout in a part of the layer; None: nothing is dropped."""
        if tokens.seeds is None or not rate:
            return None
        assert self.number is not None
        return seeds_of_layer(tokens.seeds, self.number, part)


def dropout(x: num['B/r/d/e L/c/t M'], part: str, tokens: Tokens, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """What a part of a layer adds to the residual stream, with dropout in training."""
    rate = layer.arch.block.dropout
    return drop(x, layer.seeds(part, tokens, rate), rate)
