"""One decoder for every family: mathematics, memory, sharding and communication of the forward pass.

Letters: B batch, L length, M d_model, H query heads, K key/value heads, D head, F feed-forward, V vocabulary.
Mesh axes: axes.py; r, d, e share out the batch, c the sequence, t the heads and so on, d also every matrix at rest.
Between blocks the sequence is sharded over `t` too (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

A weight is gathered over `d` where it is used and travels in the compute dtype; its gradient is added up in f32 by the
transpose of the gather.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.base import Model
from pretrax.model.context import attend_across, column_order, places
from pretrax.model.families import TransformerOptions, resolve
from pretrax.model.loss import Batch, LossTerms, denominators, loss_terms
from pretrax.model.loss_chunks import in_chunks
from pretrax.model.matmul import gather, plus, product
from pretrax.model.mlp import feed_forward
from pretrax.model.moe import mixture
from pretrax.model.norm import norm, qk_norm
from pretrax.model.numerics import Format, Formats
from pretrax.model.pipeline import Schedule, in_stages
from pretrax.model.plan import choose_plan
from pretrax.model.remat import ALL_NAMED
from pretrax.model.request import ModelRequest
from pretrax.model.rope import rotate
from pretrax.model.routing import counted, load, routing_denominators, routing_metrics, routing_terms
from pretrax.model.softcap import softcap
from pretrax.model.weights import Layer, Weights, abstract_weights, init_weights
from pretrax.shardlib import all_gather, f32, i32, num, psum_scatter, save, scan, take, typechecked, unroll, whole

Attend = Callable[[Any, Any, Any], tuple[Any, Any]]  # q, k, v -> output, and what a cache keeps
FeedForward = Callable[[Any, Layer], tuple[Any, Any]]  # normed stream, weights -> output, and what a router did


@typechecked
def block(
    x: num['B/r/d/e L/c/t M'],
    w: Layer,
    positions: i32['B/r/d/e L/c'],
    arch: Architecture,
    kind: LayerKind,
    attention: Attend,
    mlp: FeedForward,
    formats: Formats,
) -> tuple[num['B/r/d/e L/c/t M'], Any, Any]:
    """x + attention(x), then x + mlp(x), with norms before (Xiong et al. 2020, arXiv:2002.04745), after, or both."""
    out, kept = self_attention(norm(x, w.norm1, w.norm1_bias, arch), w, positions, arch, kind, attention, formats)
    y: Any = x + norm(out, w.norm1_after, None, arch)
    out, routed = mlp(norm(y, w.norm2, w.norm2_bias, arch), w)
    return y + norm(out, w.norm2_after, None, arch), kept, routed


@typechecked
def self_attention(
    h: num['B/r/d/e L/c/t M'],
    w: Layer,
    positions: i32['B/r/d/e L/c'],
    arch: Architecture,
    kind: LayerKind,
    attention: Attend,
    formats: Formats,
) -> tuple[num['B/r/d/e L/c/t M'], Any]:
    """Queries, keys and values of h, normed and turned by their positions as the family does; attention; projection."""
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    w_q = gather('M/d H/t D -> M H/t D', w.q, h)
    q = plus(product('B/r/d/e L/c M, M H/t D -> B/r/d/e L/c H/t D', h, w_q, formats['q']), w.q_bias)
    w_k = gather('M/d K/t D -> M K/t D', w.k, h)
    k = plus(product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', h, w_k, formats['k']), w.k_bias)
    w_v = gather('M/d K/t D -> M K/t D', w.v, h)
    v = plus(product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', h, w_v, formats['v']), w.v_bias)
    if arch.qk_norm == 'none':
        q, k = save(rotate(q, positions, kind), 'q'), save(rotate(k, positions, kind), 'k')
    else:  # kept as they were before the norm, whose backward pass needs them so
        q = rotate(qk_norm(save(q, 'q'), w.q_norm, w.q_full_norm, arch), positions, kind)
        k = rotate(qk_norm(save(k, 'k'), w.k_norm, w.k_full_norm, arch), positions, kind)
    y, kept = attention(q, k, save(v, 'v'))
    w_o = gather('H/t D M/d -> H/t D M', w.o, h)
    out = product('B/r/d/e L/c H/t D, H/t D M -> B/r/d/e L/c M', y, w_o, formats['o'])  # partial over t
    return plus(save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'attention_out'), w.o_bias), kept


@typechecked
def stream(
    w: Weights,
    tokens: i32['B/r/d/e L/c'],
    positions: i32['B/r/d/e L/c'],
    arch: Architecture,
    dtype: Any,
    blocks: Callable[[Any, Layer], tuple[Any, Any]],
) -> tuple[num['B/r/d/e L/c/t M'], Any, Any]:
    """What comes out of the last block, the table for `leave`, and what `blocks(x, stacked layers)` gives besides x."""
    embed, unembed = vocabulary(w, dtype)
    x, kept = blocks(enter(w, embed, tokens, positions, arch, dtype), whole('p', w.layers))
    return x, unembed, kept


def vocabulary(w: Weights, dtype: Any) -> tuple[Any, Any]:
    """The tables of the embedding and the unembedding, [V/t M] each, which may be one."""
    embed = all_gather('V/t M/d -> V/t M', w.embed, wire=dtype)
    return embed, embed if w.unembed is None else all_gather('V/t M/d -> V/t M', w.unembed, wire=dtype)


@typechecked
def enter(
    w: Weights,
    table: f32['V/t M'],
    tokens: i32['B/r/d/e L/c'],
    positions: i32['B/r/d/e L/c'],
    arch: Architecture,
    dtype: Any,
) -> num['B/r/d/e L/c/t M']:
    """What goes into the first block: each token's embedding, and that of its position where positions are learned."""
    x = take('V/t M, B/r/d/e L/c -> B/r/d/e L/c M', table, tokens).astype(dtype)  # partial over t
    if arch.scale_embedding:
        x = x * jnp.asarray(math.sqrt(arch.d_model), dtype)  # rounded to it, as the released models were trained
    if w.positions is not None:
        places = all_gather('P/t M/d -> P/t M', w.positions, wire=dtype)
        x = x + take('P/t M, B/r/d/e L/c -> B/r/d/e L/c M', places, positions).astype(dtype)
    return psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', x)


@typechecked
def leave(
    w: Weights, table: f32['V/t M'], x: num['B/r/d/e L/c/t M'], arch: Architecture, head: Format
) -> num['B/r/d/e L/c V/t']:
    """Logits, from what comes out of the last block."""
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', norm(x, w.norm, w.norm_bias, arch))
    return softcap(product('B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t', h, table, head), arch.final_softcap)


def mlp_of(arch: Architecture, method: str, counts: Any, formats: Formats) -> FeedForward:
    """A block's feed-forward: one, or a mixture of experts. `method` of its products, `counts` of tokens: `mixture`."""
    if not arch.n_experts:
        return lambda h, w: (feed_forward(h, w, arch, formats), None)
    return lambda h, w: mixture(h, w, counts, arch, method, formats)


class Transformer(Model):
    """The decoder as a model: weights, their initial values and the loss. Methods with arrays run per device."""

    Weights = Weights
    arch: Architecture  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, request: ModelRequest, *, options: TransformerOptions):
        self.arch = resolve(options, request.vocab_size, request.sequence_length)
        self.arch.check_mesh(request.mesh, request.sequence_length)
        self.plan = choose_plan(options, request, self.arch)
        self.dtype = request.dtype
        self.choices = {'architecture': self.arch.describe(), **self.plan.reasons}
        self.max_length = self.arch.max_sequence_length if self.arch.positions == 'learned' else None
        self.vocab_size = self.arch.vocab_size
        self.column_order = column_order(self.plan.context, request.sequence_length, request.mesh['c'])
        assert self.plan.numerics is not None
        self.numerics = self.plan.numerics
        self.draws = self.numerics.draws
        self.survey = self._survey if self.arch.balance_loss and self.arch.balance_over == 'batch' else None

    def init(self, key: jax.Array) -> Weights:
        """Initial weights (under jit, outside the manual region)."""
        return init_weights(self.arch, key)

    def abstract(self) -> Weights:
        """Shapes and shardings of the weights on the mesh in force."""
        return abstract_weights(self.arch)

    def loss(self, weights: Weights, batch: Batch, known: Any = None, key: Any = None) -> LossTerms:
        """This device's terms of the loss. `known` is the `survey` of the whole step, where this is a part of it."""
        if self.plan.pipeline is None:
            seeds, of_head = self.numerics.seeds(key)
            x, unembed, routed = self._stream(weights, batch, seeds)
            head = Formats({'head': self.numerics.head}, of_head)['head']
            terms = self._terms(weights, unembed, x, batch, head)
        else:
            terms, routed = self._terms_in_stages(weights, batch, self.plan.pipeline)
        if not self.arch.n_experts:
            return terms
        return terms | routing_terms(routed, batch, places(batch, self.plan.context), self.arch, known)

    def _terms(self, weights: Weights, unembed: Any, x: Any, batch: Batch, head: Format) -> LossTerms:
        """The terms that judge the text, of what comes out of the last block."""

        def judge(x: Any, part: Batch) -> LossTerms:
            return loss_terms(leave(weights, unembed, x, self.arch, head), part, self.arch.vocab_size, self.arch.z_loss)

        return in_chunks(judge, x, batch, self.plan.loss_chunks)

    def _terms_in_stages(self, weights: Weights, batch: Batch, schedule: Schedule) -> tuple[LossTerms, Any]:
        """`_terms`, and what routers did, where p shares out the layers: `pipeline.py` says how."""
        arch, (embed, unembed), head = self.arch, vocabulary(weights, self.dtype), Format(self.numerics.head)

        def judge(x: Any, part: Batch) -> dict[str, Any]:
            terms = self._terms(weights, unembed, x, part, head)
            return {name: numerator for name, (numerator, _) in terms.items()}

        sums, routed = in_stages(
            lambda part: enter(weights, embed, part.tokens, part.positions, arch, self.dtype),
            lambda x, layers, part: self._blocks(part)(x, layers),
            judge, weights.layers, batch, schedule, self.plan.saved,
        )  # fmt: skip
        counts = denominators(batch, arch.z_loss)
        return {name: (total, counts[name]) for name, total in sums.items()}, routed

    def _survey(self, weights: Weights, batch: Batch) -> Any:
        """How many tokens chose each expert, which the gradient of a loss on the load of the whole batch depends on."""
        return load(self._stream(weights, batch)[2], batch, places(batch, self.plan.context), self.arch)

    def _stream(self, weights: Weights, batch: Batch, seeds: Any = None) -> tuple[Any, Any, Any]:
        return stream(weights, batch.tokens, batch.positions, self.arch, self.dtype, self._blocks(batch, seeds))

    def _blocks(self, batch: Batch, seeds: Any = None) -> Callable[[Any, Layer], tuple[Any, Any]]:
        """What takes the stream of a batch through stacked layers, and tells what their routers did."""
        counts = counted(batch, places(batch, self.plan.context))

        def one(kind: LayerKind, numbers: Any, x: Any, of_layer: tuple[Layer, Any]) -> tuple[Any, Any]:
            layer, formats = of_layer[0], Formats(numbers, of_layer[1])
            mlp = mlp_of(self.arch, self.plan.grouped, counts, formats)

            def attention(q: Any, k: Any, v: Any) -> tuple[Any, None]:
                scores = self.arch.scores(kind)
                return attend_across(q, k, v, batch.segments, self.plan.kernel, scores, self.plan.context), None

            x, _, routed = block(save(x, 'input'), layer, batch.positions, self.arch, kind, attention, mlp, formats)
            return x, routed

        # A stage whose input alone is kept makes the rest again, all layers at a time; of that everything is kept.
        saved = ALL_NAMED if self.plan.pipeline and self.plan.saved == {} else self.plan.saved

        def blocks(x: Any, stacked: Layer) -> tuple[Any, Any]:
            every, kinds, run = [], self.arch.kinds, unroll if self.plan.unrolled else scan
            for part, numbers in self.numerics.runs(stacked.q.shape[0]):  # mostly one: all layers
                first = part.start or 0
                turns = [functools.partial(one, kinds[(first + i) % len(kinds)], numbers) for i in range(len(kinds))]
                here = jax.tree.map(lambda w, part=part: w[part] if part != slice(None) else w, (stacked, seeds))
                x, routed = run(turns, x, here, saved)
                every.append(routed)
            return x, jax.tree.map(lambda *runs: jnp.concatenate(runs), *every)

        return blocks

    def logits(self, weights: Weights, tokens: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        """The logits of whole sequences, one document per row."""
        ones = jnp.ones_like(tokens)
        batch = Batch(tokens, tokens, ones, ones, ones.astype(jnp.float32))
        columns = jnp.broadcast_to(places(batch, self.plan.context), tokens.shape)
        batch = dataclasses.replace(batch, positions=columns)
        x, unembed, _ = self._stream(weights, batch)
        return leave(weights, unembed, x, self.arch, Format(self.numerics.head))

    def denominators(self, batch: Batch) -> dict[str, Any]:
        """The denominators of the terms of `loss`, which depend on the batch alone."""
        where = places(batch, self.plan.context)
        return denominators(batch, self.arch.z_loss) | routing_denominators(batch, where, self.arch)

    def summarize(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Metrics of the tables among the terms of `loss`, added up over a step."""
        return routing_metrics(tables['routing'], self.arch)
