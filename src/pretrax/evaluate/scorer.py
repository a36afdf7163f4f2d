"""Log probabilities of tokens, from forward passes over batches of texts of about the same length.

Letters: B texts, L length, V vocabulary.
"""

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.errors import UserError
from pretrax.infer.programs import serving_mesh
from pretrax.infer.recompute import logits_per_device
from pretrax.model.axes import ROWS, along
from pretrax.model.base import AutomaticModel, Model
from pretrax.model.loss import TokenScores, chunks_of, join_tokens, over_chunks, token_scores
from pretrax.model.numerics import Numerics
from pretrax.model.plan import ExecutionPlan
from pretrax.model.transformer import Transformer
from pretrax.model.weights import Weights
from pretrax.shardlib import i32, make_shardings, num, typed_shard_map

_SHORTEST = 32  # tokens: few different lengths, few compilations
_AT_ONCE = 256  # tokens of a device whose logits exist at a time; with fewer, reading the unembedding takes longer


class Scorer:
    """Scores texts with a model.

    The decoder runs on the axes r, d, e and t, as in `infer`: without the capacity of experts, so that a score does not
    depend on the texts beside it, with products in the compute dtype, and with plain attention. Its logits exist for
    256 tokens of each device at a time; those of other models for a whole batch.

    Args:
        batch_tokens: tokens in a batch, on each device that has texts of its own.

    Attributes:
        program: weights from `prepare`, tokens i32[B, L], targets i32[B, L] -> `TokenScores`, under `jit`.
    """

    def __init__(self, model: Model, mesh: Any, longest: int, batch_tokens: int = 4096):
        self._batch_tokens, self.longest = batch_tokens, longest
        self._model, self._mesh = model, mesh
        # For texts to which other frequencies apply, as transformers decides for each.
        self._short: Scorer | None = None
        if isinstance(model, Transformer):
            self._mesh = serving_mesh(mesh, model.arch.d_model)
            self._model = _alone(model, longest)
            scaling = model.arch.rope.scaling
            if scaling is not None and scaling.kind == 'longrope' and longest > scaling.original_length:
                self._short = Scorer(model, mesh, scaling.original_length, batch_tokens)
        self._shards = along(ROWS, self._mesh.shape)
        self._multiple = math.lcm(_SHORTEST, along('c t', self._mesh.shape))
        scored = self._model
        scores = _whole_arrays(scored) if isinstance(scored, AutomaticModel) else _per_device(scored)
        self.program = jax.jit(scores, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def prepare(self, weights: Any) -> Any:
        """The weights on the mesh of the scorer."""
        with jax.set_mesh(self._mesh):
            if not isinstance(self._model, Transformer):
                return weights
            return jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, self._model.abstract())

    def logits(self, weights: Any, tokens: np.ndarray) -> jax.Array:
        """The logits of whole texts, f32 [B, L, V], the same whole array on each device.

        Args:
            tokens: i32[B, L].

        Raises:
            UserError: there is a token that the model lacks.
        """
        if self._short is not None and tokens.shape[1] <= self._short.longest:
            return self._short.logits(weights, tokens)
        n_tokens = self._model.vocab_size
        strange = tokens[(tokens < 0) | (False if n_tokens is None else tokens >= n_tokens)]
        if strange.size:
            last = '' if n_tokens is None else f' to {n_tokens - 1:,}'
            raise UserError(f'tokens has the token {strange[0]:,}\nthe vocabulary has the tokens 0{last}')
        rows, length = tokens.shape
        whole = np.zeros((self._shards * math.ceil(rows / self._shards), self._length(length)), np.int32)
        whole[:rows, :length] = tokens
        with jax.set_mesh(self._mesh):
            return self._logits(weights, self._placed(whole))[:rows, :length, :n_tokens]

    @functools.cached_property
    def _logits(self) -> Any:
        """Weights, tokens i32[B, L] -> logits f32[B, L, columns], under `jit`."""
        model = self._model
        logits = model.logits if isinstance(model, AutomaticModel) else logits_per_device(model)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        return jax.jit(lambda weights, tokens: logits(weights, tokens).astype(jnp.float32), out_shardings=replicated)

    def _placed(self, rows: np.ndarray) -> jax.Array:
        """An array i32[B, L] on the devices."""
        return jax.make_array_from_callback(rows.shape, make_shardings(i32['B/r/d/e L']), lambda index: rows[index])

    def score(self, weights: Any, texts: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """The log probability of the last tokens of each text, and whether each of them was the likeliest.

        Args:
            texts: token ids, and how many at the end are scored; at least one token comes before them.

        Raises:
            UserError: a text has a token that the model lacks.
        """
        n_tokens, largest = self._model.vocab_size, max((max(ids) for ids, _ in texts), default=0)
        if n_tokens is not None and largest >= n_tokens:
            raise UserError(
                f'a text has token {largest:,}, but the model has the tokens 0 to {n_tokens - 1:,}\nleave this text out'
            )
        if self._short is not None:
            limit = self._short.longest
            short = [number for number, (ids, _) in enumerate(texts) if len(ids) - 1 <= limit]
            long = [number for number, (ids, _) in enumerate(texts) if len(ids) - 1 > limit]
            scores = dict(zip(short, self._short.score(weights, [texts[n] for n in short]), strict=True))
            scores |= zip(long, self._score(weights, [texts[n] for n in long]), strict=True)
            return [scores[number] for number in range(len(texts))]
        return self._score(weights, texts)

    def _score(self, weights: Any, texts: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
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
                scores = self._run(weights, *tokens)
                for row, number in enumerate(batch):
                    ids, count = texts[number]
                    scored = slice(len(ids) - 1 - count, len(ids) - 1)
                    total = float(np.sum(scores.log_probs[row, scored], dtype=np.float64))
                    found[number] = total, bool(np.all(scores.are_likeliest[row, scored]))
        return found

    def _length(self, tokens: int) -> int:
        """The length of the batch for a text: a power of two times the smallest one."""
        length = self._multiple * 2 ** math.ceil(math.log2(max(1.0, tokens / self._multiple)))
        most = self._model.max_length
        if most is None:
            return length
        # A module may read one length only; a decoder with learned positions has no more of them.
        return min(length, most) if isinstance(self._model, Transformer) and most % self._multiple == 0 else most

    def _run(self, weights: Any, tokens: np.ndarray, targets: np.ndarray) -> TokenScores:
        """The scores of the targets, as host arrays."""
        with jax.set_mesh(self._mesh):
            return jax.tree.map(np.asarray, self.program(weights, self._placed(tokens), self._placed(targets)))


def _alone(model: Transformer, longest: int) -> Transformer:
    """The decoder as it reads one text of any length, with no other texts in the batch."""
    own = copy.copy(model)
    scaling = model.arch.rope.scaling
    scaling = None if scaling is None else scaling.for_length(longest)
    own.arch = model.arch.replace({'experts.capacity': None, 'rope.scaling': scaling})
    numerics = Numerics('compute', ({},) * model.arch.n_layers, 'compute')
    own.plan = ExecutionPlan(grouped=model.plan.grouped, numerics=numerics)
    return own


def _per_device(model: Model) -> Any:
    weights_type = model.Weights

    @typed_shard_map
    def scores(weights: weights_type, tokens: i32['B/r/d/e L/c'], targets: i32['B/r/d/e L/c']) -> TokenScores:
        if isinstance(model, Transformer):
            return _decoder_scores(model, weights, tokens, targets)
        return token_scores(model.logits(weights, tokens), targets, model.vocab_size)

    return scores


def _decoder_scores(
    model: Transformer, weights: Weights, tokens: i32['B/r/d/e L/c'], targets: i32['B/r/d/e L/c']
) -> TokenScores:
    """The scores in chunks of each sequence, so that the logits of one chunk exist at a time. Runs per device."""
    ends, x = model.read(weights, tokens)

    def chunk_scores(x: num['B/r/d/e L/c/t M'], targets: i32['B/r/d/e L/c']) -> TokenScores:
        return token_scores(model.unembed(ends, x), targets, model.vocab_size)

    chunks = chunks_of(x.shape[1], math.ceil(tokens.size / _AT_ONCE))
    parts = over_chunks(chunk_scores, x, targets, chunks)
    return jax.tree.map(lambda part: join_tokens(part, x.shape[1] // chunks), parts)


def _whole_arrays(model: AutomaticModel) -> Any:
    def scores(weights: Any, tokens: Any, targets: jax.Array) -> TokenScores:
        logits = model.logits(weights, tokens).astype(jnp.float32)
        if model.vocab_size is not None:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < model.vocab_size, logits, -jnp.inf)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        log_probs: Any = chosen - jax.nn.logsumexp(logits, axis=-1)
        likeliest: Any = jnp.argmax(logits, axis=-1)
        return TokenScores(log_probs, likeliest == targets)

    return scores
