"""Statistics of a decoder's layers: a forward pass that keeps sums and maxima over the tokens of a step.

It calls the parts of `block.block`, and reads their results. Training does not: its program is the same with and
without statistics.

Letters: B batch, L length, M d_model, H query heads, K key/value heads, G query heads per key/value head, D head, S
keys, F feed-forward, E experts, N micro-batches.

A token counts if a target at or after it in its row counts (`routing.counted`), so padding does not.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pretrax.model.axes import TOKENS
from pretrax.model.block import block, mixer, mlp
from pretrax.model.context import local_columns
from pretrax.model.ends import gather_ends
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.layers import scan_layers
from pretrax.model.loss import Batch, cross_entropy, over_chunks
from pretrax.model.matmul import add_bias, gather, product
from pretrax.model.mlp import FeedForwardWeights
from pretrax.model.pipeline import own_share
from pretrax.model.pipeline_forward import pipeline
from pretrax.model.routing import Routed, counted, own_part
from pretrax.model.scores import Scores
from pretrax.model.transformer import Transformer
from pretrax.model.weights import Layer, Weights, layers_with
from pretrax.shardlib import (
    all_gather,
    axis_index,
    axis_size,
    bool_,
    drop_axes,
    f32,
    i32,
    independent,
    num,
    pmax,
    psum,
    pytree_dataclass,
    scope,
    typechecked,
    typed_shard_map,
)

QUERIES = 32  # of each sequence whose attention is computed again
BINS = 16  # of the position in a document, for the loss by position


@pytree_dataclass
class LayerStatistics:
    """Statistics of every layer, over the tokens of a step that count."""

    residual_rms: f32['layers']
    residual_max: f32['layers']
    attention_rms: f32['layers']
    attention_max: f32['layers']
    feed_forward_rms: f32['layers'] | None  # None: layers have no feed-forward
    feed_forward_max: f32['layers'] | None
    attention_entropy: f32['layers H'] | None  # None: no layer has attention
    attention_logit_max: f32['layers H'] | None
    dead_units: f32['layers'] | None  # None: all layers have experts
    expert_load: f32['layers E'] | None  # relative to an even share; None: no experts
    expert_entropy: f32['layers'] | None
    dropped_fraction: f32['layers'] | None


@pytree_dataclass
class HeadStatistics:
    """Statistics of the logits and of the loss. A bin or a source without a target is NaN."""

    logit_max: f32['']
    log_partition: f32['']
    loss_by_position: f32['bins']
    loss_by_source: f32['sources']


class _Sums(NamedTuple):
    """Sums over the tokens of one layer."""

    residual: f32['']  # squares; these three are partial over TOKENS and t
    attention: f32['']
    feed_forward: f32[''] | None
    tokens: f32['']
    entropy: f32['H/t'] | None  # partial over TOKENS, as all below
    queries: f32[''] | None
    active: f32['F/t'] | None  # tokens for which a unit is active
    experts: f32['E'] | None  # tokens of each expert
    dropped: f32[''] | None


class _Maxima(NamedTuple):
    """Maxima over the tokens of one layer."""

    residual: f32['']  # these three over this device's part of TOKENS and t
    attention: f32['']
    feed_forward: f32[''] | None
    logit: f32['H/t'] | None  # over this device's part of TOKENS


class _HeadSums(NamedTuple):
    """Sums over targets, weighted by their mask: partial over TOKENS."""

    log_partition: f32['']
    nll: f32['bins']
    weight: f32['bins']
    source_nll: f32['sources']
    source_weight: f32['sources']


class _Rows(NamedTuple):
    """The rows of a step, and where they come from."""

    batch: Batch
    sources: i32['B/r/d/e']  # the number of each row's source


@typechecked
def _observed_block(
    x: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, columns: i32['L/c'], layer: LayerSpec
) -> tuple[num['B/r/d/e L/c/t M'], tuple[_Sums, _Maxima]]:
    """`block.block`, and the statistics of its parts."""
    arch, counts = layer.arch, tokens.counted
    assert counts is not None
    own = own_part(counts)
    seen: dict[str, Any] = dict.fromkeys(('entropy', 'queries', 'logit'))

    def observe(q: jax.Array, k: jax.Array, segments: jax.Array, scores: Scores) -> None:
        assert w.attention is not None
        found = attention_of_sample(q, k, segments, counts, columns, scores, w.attention.sinks)
        seen.update(zip(('entropy', 'queries', 'logit'), found, strict=True))

    def observed_mixer(h: jax.Array, w: Layer, tokens: Tokens, layer: LayerSpec) -> jax.Array:
        out = mixer(h, w, tokens, layer, observe)
        seen.update(mixed=arch.block.residual_multiplier * out)
        return out

    def observed_mlp(h: jax.Array, w: Layer, tokens: Tokens, layer: LayerSpec) -> tuple[jax.Array, Routed | None]:
        out, routed = mlp(h, w, tokens, layer)
        seen.update(normed=h, out=arch.block.residual_multiplier * out)
        return out, routed

    x, routed = block(x, w, tokens, layer, observed_mixer, observed_mlp)
    mixed: num['B/r/d/e L/c/t M'] = seen['mixed']
    out: num['B/r/d/e L/c/t M'] = seen['out']
    has_out = layer.kind.feed_forward
    sums = _Sums(
        residual=_squares(x, own),
        attention=_squares(mixed, own),
        feed_forward=_squares(out, own) if has_out else None,
        tokens=jnp.sum(own, dtype=jnp.float32),
        entropy=seen['entropy'],
        queries=seen['queries'],
        active=None if w.feed_forward is None else active_units(seen['normed'], w.feed_forward, counts, layer),
        experts=None if routed is None else routed.tokens,
        dropped=None if routed is None else routed.dropped,
    )
    largest = _largest(out, own) if has_out else None
    return x, (sums, _Maxima(_largest(x, own), _largest(mixed, own), largest, seen['logit']))


def _squares(x: num['B/r/d/e L/c/t M'], own: bool_['B/r/d/e L/c/t']) -> f32['']:
    return jnp.sum(jnp.where(own[..., None], jnp.square(x.astype(jnp.float32)), 0.0))


def _largest(x: num['B/r/d/e L/c/t M'], own: bool_['B/r/d/e L/c/t']) -> f32['']:
    return jnp.max(jnp.where(own[..., None], jnp.abs(x.astype(jnp.float32)), 0.0))


def attention_of_sample(
    q: num['B/r/d/e L/c H/t D_qk'],
    k: num['B/r/d/e L/c K/t D_qk'],
    segments: i32['B/r/d/e L/c'],
    counts: bool_['B/r/d/e L/c'],
    columns: i32['L/c'],
    scores: Scores,
    sinks: f32['H/t'] | None = None,
) -> tuple[f32['H/t'], f32[''], f32['H/t']]:
    """The entropy of attention summed over sampled queries, their number, and the largest score, before any soft cap.

    Kernels keep no probabilities, so they are computed again, in plain XLA, for the last query of each of about
    `QUERIES` equal parts of a sequence. Entropy in nats: Zhai et al. 2023, arXiv:2303.06296, section 3. The largest
    score: Dehghani et al. 2023, arXiv:2302.05442, section 2.1. A sink counts as a key in the entropy, but not in the
    largest score.
    """
    stride = _stride(q.shape[1], axis_size('c'))
    sample = slice(stride - 1, None, stride)
    keys, key_columns = all_gather('B/r/d/e L/c K/t D_qk -> B/r/d/e L K/t D_qk', k), all_gather('L/c -> L', columns)
    key_segments = all_gather('B/r/d/e L/c -> B/r/d/e L', segments)
    near = scores.sees(columns[sample][:, None] - key_columns[None, :])
    visible = near & (segments[:, sample, None] == key_segments[:, None, :])
    queries = q[:, sample]
    B, n, H, D = queries.shape
    grouped = queries.reshape(B, n, keys.shape[2], -1, D)
    score = jnp.einsum('bnkgd,bskd->bkgns', grouped, keys, preferred_element_type=jnp.float32) / scores.divisor
    counts_here = counts[:, sample]
    seen = (visible & counts_here[:, :, None])[:, None, None]  # [B, 1, 1, n, S]
    largest = jnp.max(jnp.where(seen, score, -jnp.inf), axis=(0, 3, 4)).reshape(H)
    score = jnp.where(visible[:, None, None], scores.cap(score), -jnp.inf)
    if sinks is not None:
        score = jnp.concatenate(
            [score, jnp.broadcast_to(sinks.reshape(*score.shape[1:3], 1, 1), (*score.shape[:-1], 1))], axis=-1
        )
        seen = jnp.concatenate([seen, jnp.any(seen, axis=-1, keepdims=True)], axis=-1)
    log_p = jax.nn.log_softmax(score, axis=-1)
    entropy = -jnp.sum(jnp.where(seen, jnp.exp(log_p) * log_p, 0.0), axis=(0, 3, 4)).reshape(H)
    return entropy, jnp.sum(counts_here, dtype=jnp.float32), largest


def _stride(length: int, c: int) -> int:
    """The distance of sampled queries, which is that of other meshes if the length is a power of two."""
    wanted = max(1, length * c // QUERIES)
    run = length // (2 if c > 1 else 1)  # columns that are adjacent on this device
    return wanted if c == 1 else max(n for n in range(1, wanted + 1) if run % n == 0)


def active_units(
    h: num['B/r/d/e L/c/t M'], w: FeedForwardWeights, counts: bool_['B/r/d/e L/c'], layer: LayerSpec
) -> f32['F/t']:
    """For how many tokens the input of a unit's activation function is above zero.

    A unit that is never active is dead: a ReLU would give zero for every token (Lu et al. 2019, arXiv:1903.06733; Voita
    et al. 2023, arXiv:2309.04827, section 3), and GELU and SiLU only small negative values. The product is the one that
    `mlp.feed_forward` computes: XLA computes it once.
    """
    name = 'gate' if layer.arch.feed_forward.gated else 'up'
    x = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    matrix = gather('M/d F/t -> M F/t', getattr(w, name), x)
    inputs = product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', x, matrix, layer.formats[name])
    inputs = add_bias(inputs, w.gate_bias if layer.arch.feed_forward.gated else w.up_bias)
    return jnp.sum((inputs > 0) & counts[..., None], axis=(0, 1), dtype=jnp.float32)


def forward_statistics(
    model: Transformer,
    accumulation: int,
    n_sources: int,
    weights: Weights,
    batch: Batch,
    sources: i32['B'],
) -> dict[str, jax.Array]:
    """The statistics of a step by name, the fields of `LayerStatistics` and `HeadStatistics`, on every device.

    Args:
        model: the decoder.
        accumulation: micro-batches of a step without pipeline stages.
        n_sources: how many sources the rows have; 0: they have none.
        weights: of the model.
        batch: of the step.
        sources: the number of each row's source.
    """

    @typed_shard_map
    def forward(weights: Weights, batch: Batch, sources: i32['B/r/d/e']) -> tuple[LayerStatistics, HeadStatistics]:
        return _Forward(model, weights, n_sources).statistics(_Rows(batch, sources), accumulation)

    found = {}
    for part in forward(weights, batch, sources):
        found |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in found.items() if value is not None and value.size}


class _Forward:
    """The forward pass of a model with its weights."""

    def __init__(self, model: Transformer, weights: Weights, n_sources: int):
        self.model, self.arch, self.plan = model, model.arch, model.plan
        self.weights, self.n_sources = weights, n_sources
        self.ends = gather_ends(weights, model.dtype)

    def statistics(self, rows: _Rows, accumulation: int) -> tuple[LayerStatistics, HeadStatistics]:
        schedule = self.plan.pipeline
        count = accumulation if schedule is None else schedule.micro_batches
        micros = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
        results = jax.lax.map(self._micro_batch, micros) if schedule is None else self._in_stages(micros)
        (sums, maxima), (head_sums, logit) = results
        sums, head_sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), (sums, head_sums))
        maxima, logit = jax.tree.map(lambda x: jnp.max(x, axis=0), (maxima, logit))
        return self._layer_statistics(sums, maxima), _head_statistics(head_sums, logit)

    def _micro_batch(self, rows: _Rows) -> tuple[tuple[_Sums, _Maxima], tuple[_HeadSums, f32['']]]:
        with scope():  # B is a micro-batch here
            x, of_layers = self._layers(self._embed(rows), drop_axes('p', self.weights.layers), rows)
            return of_layers, self._head(x, rows)

    def _embed(self, rows: _Rows) -> num['B/r/d/e L/c/t M']:
        return self.model.embed(self.ends, rows.batch)

    def _layers(
        self, x: num['B/r/d/e L/c/t M'], layers: Layer, rows: _Rows
    ) -> tuple[num['B/r/d/e L/c/t M'], tuple[_Sums, _Maxima]]:
        batch = rows.batch
        columns = local_columns(batch.tokens, self.plan.context)
        tokens = Tokens(batch.positions, batch.segments, counted(batch, columns))

        def one_layer(x: num['B/r/d/e L/c/t M'], w: Layer, layer: LayerSpec):
            return _observed_block(x, w, tokens, columns, layer)

        return scan_layers(one_layer, x, layers, self.arch, self.plan)[:2]

    def _head(self, x: num['B/r/d/e L/c/t M'], rows: _Rows) -> tuple[_HeadSums, f32['']]:
        arch, length = self.arch, rows.batch.tokens.shape[1] * axis_size('c')

        def chunk_sums(x: num['B/r/d/e L/c/t M'], part: Batch) -> tuple[_HeadSums, f32['']]:
            logits = self.model.unembed(self.ends, x)
            nll, log_z = cross_entropy(logits, part.targets, arch.vocab_size)
            held = logits.shape[-1]
            is_real = axis_index('t') * held + jnp.arange(held) < arch.vocab_size
            counts = is_real & (part.mask > 0)[..., None]
            largest = pmax('t', jnp.max(jnp.where(counts, logits.astype(jnp.float32), -jnp.inf)))
            bins = min(BINS, length)
            in_bin = (part.positions * bins // length)[..., None] == jnp.arange(bins)
            in_source = rows.sources[:, None, None] == jnp.arange(self.n_sources)
            sums = _HeadSums(
                jnp.sum(log_z * part.mask),
                *(jnp.sum(jnp.where(in_bin, y[..., None], 0.0), axis=(0, 1)) for y in (nll * part.mask, part.mask)),
                *(jnp.sum(jnp.where(in_source, y[..., None], 0.0), axis=(0, 1)) for y in (nll * part.mask, part.mask)),
            )
            return sums, largest

        sums, largest = over_chunks(chunk_sums, x, rows.batch, self.plan.loss_chunks)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), jnp.max(largest)

    def _in_stages(self, micros: _Rows) -> tuple[tuple[_Sums, _Maxima], tuple[_HeadSums, f32['']]]:
        """The statistics of the micro-batches, on pipeline stages; see `pipeline.in_stages`."""
        schedule = self.plan.pipeline
        assert schedule is not None
        numbers = jnp.arange(schedule.micro_batches)

        def stage(x: num['B/r/d/e L/c/t M'], layers: Layer, micro: tuple[_Rows, i32['']], chunk: i32['']):
            del chunk
            rows, number = micro
            x, (sums, maxima) = self._layers(x, layers, rows)

            def one_of_many(value: jax.Array) -> jax.Array:  # the pipeline adds what the micro-batches give
                here = (numbers == number).reshape(-1, *[1] * (value.ndim - 1))
                return jnp.where(here, value[:, None], jnp.zeros((), value.dtype))

            return x, (sums, jax.tree.map(one_of_many, maxima))

        with independent('p'):
            embedded = jax.lax.map(self._embed, micros)
            given = (micros, numbers)
            x, (sums, maxima) = pipeline(stage, embedded, self.weights.layers, given, schedule, None)  # type: ignore[arg-type]
            head_sums, logit = jax.lax.map(lambda one: self._head(*one), own_share(x, micros, schedule))
            head_sums = psum('p', jax.tree.map(lambda x: jnp.sum(x, axis=0), head_sums))
            logit = pmax('p', jnp.max(logit))
        one = jax.tree.map(lambda x: x[None], (sums, head_sums, logit))
        maxima = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), maxima)
        return (one[0], maxima), (one[1], one[2])

    def _layer_statistics(self, sums: _Sums, maxima: _Maxima) -> LayerStatistics:
        tokens, d_model = psum(f'{TOKENS} t', sums.tokens), self.arch.d_model

        def rms(squares: f32['layers'] | None) -> f32['layers'] | None:
            return None if squares is None else jnp.sqrt(psum(f'{TOKENS} t', squares) / (tokens * d_model))

        def largest(values: f32['layers'] | None) -> f32['layers'] | None:
            return None if values is None else pmax(f'{TOKENS} t', values)

        entropy = logit = None
        if sums.entropy is not None:
            queries = psum(TOKENS, sums.queries)[:, None]
            entropy = all_gather(
                'layers_with_attention H/t -> layers_with_attention H', psum(TOKENS, sums.entropy) / queries
            )
            logit = all_gather('layers_with_attention H/t -> layers_with_attention H', pmax(TOKENS, maxima.logit))
        dead = None
        if sums.active is not None:
            dead = psum('t', jnp.sum(psum(TOKENS, sums.active) == 0, axis=1, dtype=jnp.float32)) / self.arch.sizes['F']
        load = expert_entropy = dropped = None
        if sums.experts is not None:
            experts = psum(TOKENS, sums.experts)
            choices = jnp.sum(experts, axis=1)
            share = experts / choices[:, None]
            load = share * self.arch.experts.n_experts
            expert_entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=1) / math.log(
                self.arch.experts.n_experts
            )
            dropped = psum(TOKENS, sums.dropped) / choices if self.arch.experts.capacity is not None else None
        with_attention = tuple(i for i, kind in enumerate(self.arch.kinds) if kind.mixer == 'attention')
        with_experts = layers_with(self.arch, 'experts')
        return LayerStatistics(
            residual_rms=rms(sums.residual),
            residual_max=largest(maxima.residual),
            attention_rms=rms(sums.attention),
            attention_max=largest(maxima.attention),
            feed_forward_rms=rms(sums.feed_forward),
            feed_forward_max=largest(maxima.feed_forward),
            attention_entropy=self._expand_to_all_layers(entropy, with_attention),
            attention_logit_max=self._expand_to_all_layers(logit, with_attention),
            dead_units=self._expand_to_all_layers(dead, layers_with(self.arch, 'feed_forward')),
            expert_load=self._expand_to_all_layers(load, with_experts),
            expert_entropy=self._expand_to_all_layers(expert_entropy, with_experts),
            dropped_fraction=self._expand_to_all_layers(dropped, with_experts),
        )

    def _expand_to_all_layers(self, values: jax.Array | None, layers: tuple[int, ...]) -> jax.Array | None:
        """Statistics of some layers, with NaN for the others."""
        if values is None or len(layers) == self.arch.n_layers:
            return values
        return jnp.full((self.arch.n_layers, *values.shape[1:]), jnp.nan).at[jnp.asarray(layers)].set(values)


def _head_statistics(sums: _HeadSums, logit: f32['']) -> HeadStatistics:
    total = psum(TOKENS, sums)
    return HeadStatistics(
        logit_max=pmax(TOKENS, logit),
        log_partition=total.log_partition / jnp.sum(total.weight),
        loss_by_position=total.nll / total.weight,
        loss_by_source=total.source_nll / total.source_weight,
    )
