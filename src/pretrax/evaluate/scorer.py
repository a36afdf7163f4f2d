"""Log probabilities of tokens, from forward passes over batches of texts of about the same length.

Letters: B texts, L length, V vocabulary.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.infer.programs import serving_mesh
from pretrax.model.axes import ROWS, along
from pretrax.model.base import AutomaticModel, Model
from pretrax.model.numerics import Numerics
from pretrax.model.plan import ExecutionPlan
from pretrax.model.transformer import Transformer
from pretrax.shardlib import i32, make_shardings, num, typed_shard_map

_SHORTEST = 32  # tokens: few different lengths, few compilations


class Scorer:
    """Scores texts with a model.

    The decoder runs on the axes r, d, e and t, as in `infer`: without the capacity of experts, so that a score does not
    depend on the texts beside it, with products in the compute dtype, and with plain attention.

    Args:
        model: any model that gives logits.
        mesh: of the weights.
        longest: the most tokens of a text.
        batch_tokens: tokens in a batch, on each device that has texts of its own.
    """

    def __init__(self, model: Model, mesh: Any, longest: int, batch_tokens: int = 4096):
        self._batch_tokens = batch_tokens
        self._model, self._mesh = model, mesh
        if isinstance(model, Transformer):
            self._mesh = serving_mesh(mesh, model.arch.d_model)
            self._model = _alone(model, longest)
        self._shards = along(ROWS, self._mesh.shape)
        self._multiple = math.lcm(_SHORTEST, along('c t', self._mesh.shape))
        self._program = jax.jit(_make(self._model), out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def prepare(self, weights: Any) -> Any:
        """The weights on the mesh of the scorer."""
        with jax.set_mesh(self._mesh):
            if not isinstance(self._model, Transformer):
                return weights
            return jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, self._model.abstract())

    def score(self, weights: Any, texts: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """The log probability of the last tokens of each text, and whether each of them was the likeliest.

        Args:
            weights: from `prepare`.
            texts: token ids, and how many at the end are scored; at least one token comes before them.
        """
        by_length: dict[int, list[int]] = {}
        for number, (ids, count) in enumerate(texts):
            assert 0 < count < len(ids)
            by_length.setdefault(self._length(len(ids) - 1), []).append(number)
        found: list[Any] = [None] * len(texts)
        for length, numbers in sorted(by_length.items(), reverse=True):  # the largest first: memory errors come at once
            rows = max(1, self._batch_tokens // length)
            rows = self._shards * min(rows, math.ceil(len(numbers) / self._shards))
            for start in range(0, len(numbers), rows):
                batch = numbers[start : start + rows]
                tokens = np.zeros((2, rows, length), np.int32)
                for row, number in enumerate(batch):
                    ids = texts[number][0]
                    tokens[0, row, : len(ids) - 1], tokens[1, row, : len(ids) - 1] = ids[:-1], ids[1:]
                logprobs, likeliest = self._run(weights, *tokens)
                for row, number in enumerate(batch):
                    ids, count = texts[number]
                    scored = slice(len(ids) - 1 - count, len(ids) - 1)
                    total = float(np.sum(logprobs[row, scored], dtype=np.float64))
                    found[number] = total, bool(np.all(likeliest[row, scored]))
        return found

    def _length(self, tokens: int) -> int:
        """The length of the batch for a text: a power of two times the smallest one."""
        length = self._multiple * 2 ** math.ceil(math.log2(max(1.0, tokens / self._multiple)))
        most = self._model.max_length
        if most is None:
            return length
        # A module may read one length only; a decoder with learned positions has no more of them.
        return min(length, most) if isinstance(self._model, Transformer) and most % self._multiple == 0 else most

    def _run(self, weights: Any, tokens: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with jax.set_mesh(self._mesh):
            sharding = make_shardings(i32['B/r/d/e L'])
            placed = [
                jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index]) for x in (tokens, targets)
            ]
            return jax.tree.map(np.asarray, self._program(weights, *placed))


def _alone(model: Transformer, longest: int) -> Transformer:
    """The decoder as it reads a text without company, of any length."""
    alone = copy.copy(model)
    scaling = model.arch.rope_scaling
    alone.arch = dataclasses.replace(
        model.arch, capacity=None, rope_scaling=None if scaling is None else scaling.for_length(longest)
    )
    numerics = Numerics('compute', ({},) * model.arch.n_layers, 'compute')
    alone.plan = ExecutionPlan(grouped=model.plan.grouped, numerics=numerics)
    return alone


def _make(model: Model) -> Any:
    """weights, tokens i32[B, L], targets i32[B, L] -> log probabilities f32[B, L], whether they are the greatest."""
    logits_of: Any = model.logits if isinstance(model, AutomaticModel) else _per_device(model)

    def run(weights: Any, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(weights, tokens).astype(jnp.float32)
        if model.vocab_size is not None:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < model.vocab_size, logits, -jnp.inf)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == targets

    return run


def _per_device(model: Model) -> Any:
    weights_type = model.Weights

    @typed_shard_map
    def logits(weights: weights_type, tokens: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        return model.logits(weights, tokens)

    return logits
