"""The terms of the loss on a batch, without a gradient."""

from collections.abc import Callable
from typing import Any

import jax

from pretrax.model.axes import TOKENS
from pretrax.model.base import AutomaticModel, Model
from pretrax.model.loss import Batch
from pretrax.shardlib import f32, psum, typed_shard_map
from pretrax.train.host_memory import on_device
from pretrax.train.step import Weights

# weights, batch -> {term: (numerator, denominator)}
Evaluate = Callable[[Weights, Batch], dict[str, tuple[Any, Any]]]


def make_evaluate(model: Model) -> Evaluate:
    """weights, batch -> numerator and denominator of every term of the loss, summed over the mesh."""
    if isinstance(model, AutomaticModel):
        return model.make_evaluate()
    weights_type = model.Weights

    @typed_shard_map
    def evaluate(weights: weights_type, batch: Batch) -> dict[str, tuple[f32[''], f32['']]]:
        terms = {name: term for name, term in model.loss(weights, batch).items() if term[1] is not None}
        return {name: (psum(TOKENS, n), psum(TOKENS, count)) for name, (n, count) in terms.items()}

    return jax.jit(lambda weights, batch: evaluate(on_device(weights), batch))
