"""The loss of a decoder in pipeline stages, and its gradient in the schedule 1f1b (pipeline_schedule.py).

Every stage has the embedding and the unembedding. All stages embed all micro-batches: a lookup costs less than sending
the result. The large products with the vocabulary are sharded over p.

Letters: N micro-batches, B batch, L length, M d_model.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.model.ends import gather_ends
from pretrax.model.loss import Batch, LossTerms, split_tokens
from pretrax.model.pipeline_forward import PyTree, Stage, add_round, chunks_of_stage, in_layer_order, part, pipeline
from pretrax.model.pipeline_schedule import PipelineSchedule, Work, slots
from pretrax.model.routing import Routed
from pretrax.model.weights import Ends, Layer, Weights, round_matrices
from pretrax.shardlib import (
    Choice,
    axis_index,
    bool_,
    f32,
    i32,
    independent,
    num,
    ppermute,
    psum,
    psum_scatter,
    scope,
    zero_gradient,
)
from pretrax.shardlib.ops import vary
from pretrax.shardlib.replication import varying_axes

if TYPE_CHECKING:
    from pretrax.model.transformer import Transformer


def stages(model: 'Transformer', ends: Ends, layers: Layer, batch: Batch) -> 'Stages':
    """The decoder in stages, through which each micro-batch of the batch passes."""
    schedule = model.plan.pipeline
    assert schedule is not None

    def chunk(x: jax.Array, layers: Layer, micro: Batch, number: i32['']) -> tuple[jax.Array, PyTree]:
        return model.layers(x, layers, model.tokens(micro), chunk=number)[:2]

    def numerators(ends: Ends, x: jax.Array, micro: Batch) -> dict[str, f32['']]:
        return {name: n for name, (n, _) in model.loss_terms(ends, x, micro).items()}

    return Stages(model.embed, chunk, numerators, ends, layers, batch, schedule, model.dtype)


def gradient_1f1b(
    model: 'Transformer', weights: Weights, batch: Batch, counts: dict[str, f32['']]
) -> tuple[Weights, LossTerms]:
    """The gradient of the loss, and its terms, in the schedule 1f1b. `counts` are the denominators of the step."""

    def loss_of(sums: dict[str, f32['']], routed: Routed | None) -> f32['']:
        routed = routed if routed is None else routed._replace(logit_max=None)  # which has no gradient
        terms = model.staged_terms(batch, sums, routed).items()
        return sum((n / counts[name] for name, (n, _) in terms if name in counts), jnp.zeros(()))

    ends, back = jax.vjp(
        lambda w: gather_ends(w, model.dtype, model.plan.sums), dataclasses.replace(weights, layers=None)
    )
    (d_ends, d_layers), sums, routed = stages(model, ends, weights.layers, batch).gradient(loss_of)
    return dataclasses.replace(back(d_ends)[0], layers=d_layers), model.staged_terms(batch, sums, routed)


def own_share[T](
    x: num['N B/r/d/e L/c/t M'], micros: T, schedule: PipelineSchedule
) -> tuple[num['N/p B/r/d/e L/c/t M'], T]:
    """The micro-batches whose loss this stage computes, from the result of `pipeline`: x after the last layer, which
    is zeros except on the last stage, and the micro-batches.
    """
    share = schedule.micro_batches // schedule.stages
    first = axis_index('p') * share
    own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, share), micros)
    with scope():
        return psum_scatter('N B/r/d/e L/c/t M -> N/p B/r/d/e L/c/t M', x), own


class Stages(NamedTuple):
    """A decoder in pipeline stages: what they run, with which weights, and on which batch."""

    embed: Callable[[Ends, Batch], jax.Array]  # micro-batch -> x, the input of the first layer
    chunk: Stage
    numerators: Callable[[Ends, jax.Array, Batch], dict[str, jax.Array]]  # of the loss, from x after the last layer
    ends: Ends
    layers: Layer  # this stage's part of the stacked weights, of 'layers/p'
    batch: Batch  # this device's rows
    schedule: PipelineSchedule
    dtype: DTypeLike  # of the products

    def sums(self, kept: Mapping[str, Choice] | None) -> tuple[dict[str, f32['']], PyTree]:
        """The numerators of the batch, and the sums of every layer; the same on all stages.

        Each stage computes the loss of its share of the micro-batches. They run one micro-batch at a time, and again in
        the backward pass, so the logits of one exist at a time. `kept` is what the backward pass keeps of each stage
        and micro-batch besides the input; None: everything.
        """
        batches, schedule = self.micro_batches(), self.schedule
        with independent('p'):
            x = jax.lax.map(lambda micro: self.embed(self.ends, micro), batches)
            x, layer_sums = pipeline(self.chunk, x, self.layers, batches, schedule, kept)
            own = own_share(x, batches, schedule)
            sums = jax.lax.map(jax.checkpoint(lambda one: self.numerators(self.ends, *one)), own)
            return psum('p', jax.tree.map(lambda sums: jnp.sum(sums, axis=0), sums)), layer_sums

    def gradient(
        self, loss_of: Callable[[dict[str, jax.Array], PyTree], f32['']]
    ) -> tuple[tuple[Ends, Layer], dict[str, f32['']], PyTree]:
        """The gradient of the loss in the schedule 1f1b, and the results of `sums`.

        A chunk keeps its input, and runs forward again in its backward pass. Each stage computes the loss of its share
        of the tokens of the micro-batch that leaves the last layer. Gradients are summed in f32, as accumulation does.
        With several rounds a stage needs a copy of the weights of its chunks, whose matrices have the compute dtype.

        Args:
            loss_of: this device's part of the loss, from the numerators and the sums of some layers. It is linear, so
                its gradient is known before their values.
        """
        with independent('p'):
            rounds = self.schedule.rounds
            chunks, back = jax.vjp(lambda layers: chunks_of_stage(layers, rounds), self.layers)
            copies = chunks if rounds == 1 else chunks_of_stage(round_matrices(self.layers, self.dtype), rounds)
            tick = _OneForwardOneBackward(self, copies, zero_gradient(chunks), loss_of)
            (d_ends, d_chunks), sums, layer_sums = tick.run()
            (d_layers,) = back(d_chunks)
            return (d_ends, d_layers), psum('p', sums), jax.tree.map(in_layer_order, layer_sums)

    def micro_batches(self) -> Batch:
        """The micro-batches, stacked."""
        rows, n = jax.tree.leaves(self.batch)[0].shape[0], self.schedule.micro_batches
        assert rows % n == 0, f'{rows} rows in {n} micro-batches'
        return jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), self.batch)


class _Carry(NamedTuple):
    """What a stage keeps from tick to tick. The gradients and sums are those of the ticks so far."""

    arriving: num['B/r/d/e L/c/t M']  # x, from the stage before
    returning: num['B/r/d/e L/c/t M']  # the gradient of x, from the stage after
    inputs: num['slots B/r/d/e L/c/t M']  # of the chunks whose backward pass is to come
    d_ends: Ends
    d_chunks: Layer  # [rounds, layers of a chunk ...], as the layer sums
    sums: dict[str, f32['']]
    layer_sums: PyTree


class _OneForwardOneBackward:
    """The ticks of 1f1b on a stage.

    At the end of every tick, each stage sends its result to the next one, and the gradient of its input to the one
    before. All stages run the same program; an idle stage computes too, and its results do not count.
    """

    def __init__(self, stages: Stages, chunks: Layer, zeros: Layer, loss_of: Callable[..., f32['']]):
        self.d_chunks = zeros
        self.stages, self.ends, self.schedule = stages, stages.ends, stages.schedule
        self.chunks, self.batches = chunks, stages.micro_batches()
        self.here, self.last = axis_index('p'), self.schedule.stages - 1
        self.x, self.layer_sums, self.sums = self._zeros(part(self.batches, 0))
        self.d_sums, self.d_layer_sums = jax.grad(loss_of, argnums=(0, 1))(self.sums, self.layer_sums)

    def run(self) -> tuple[tuple[Ends, Layer], dict[str, f32['']], PyTree]:
        """The gradients and sums of all micro-batches on this stage."""
        schedule = self.schedule
        rounds, start, ticks = schedule.rounds, schedule.backward_starts, schedule.ticks
        carry = _Carry(
            arriving=self.x,
            returning=self.x,
            inputs=jnp.zeros((schedule.kept, *self.x.shape), self.x.dtype),
            d_ends=zero_gradient(self.ends),
            d_chunks=self.d_chunks,
            sums=self.sums,
            layer_sums=jax.tree.map(lambda one: jnp.zeros((rounds, *one.shape), one.dtype), self.layer_sums),
        )
        carry = _everywhere(carry)
        for first, end, directions in (
            (0, start, ('forward',)),
            (start, ticks, ('forward', 'backward')),
            (ticks, ticks + start, ('backward',)),
        ):
            tick = functools.partial(self._tick, directions=directions)
            carry, _ = jax.lax.scan(tick, carry, jnp.arange(first, end))
        return (carry.d_ends, carry.d_chunks), carry.sums, carry.layer_sums

    @jax.named_scope('tick')
    def _tick(self, carry: _Carry, now: i32[''], directions: tuple[str, ...]) -> tuple[_Carry, None]:
        out = None
        if 'forward' in directions:
            out, carry = self._forward(carry, now)
            carry = carry._replace(arriving=ppermute('p', out))
        if 'backward' in directions:
            if out is not None:
                carry = self._loss(carry, out, now)
            d_x, carry = self._backward(carry, now)
            carry = carry._replace(returning=ppermute('p', d_x, shift=-1))
        return _everywhere(carry), None

    def _forward(self, carry: _Carry, now: i32['']) -> tuple[num['B/r/d/e L/c/t M'], _Carry]:
        """Computes a chunk, and keeps its input."""
        busy, round_, number = self._work(self.schedule.forward, now, self.here)
        enters, first_round, entering = self._work(self.schedule.forward, now, 0)

        def embedded() -> num['B/r/d/e L/c/t M']:
            x = self._embed(self.ends, part(self.batches, entering))
            return _everywhere(jnp.where(self.here == 0, x, carry.arriving))

        # The condition is the same on all stages. That of a collective has to be.
        x = jax.lax.cond(enters & (first_round == 0), embedded, lambda: carry.arriving)
        slot = self._slot(round_, number)
        inputs = carry.inputs.at[slot].set(jnp.where(busy, x, part(carry.inputs, slot)))
        out, new = self._layers(busy, part(self.batches, number), round_)(x, self._chunk(round_))
        sums = add_round(carry.layer_sums, new, round_)
        return out, carry._replace(inputs=inputs, layer_sums=sums)

    def _loss(self, carry: _Carry, out: num['B/r/d/e L/c/t M'], now: i32['']) -> _Carry:
        """Adds the loss of a micro-batch that leaves the last layer; its gradient returns to the last stage."""
        leaves, round_, number = self._work(self.schedule.forward, now, self.last)

        def add() -> _Carry:
            numerators = functools.partial(self._numerators, micro=part(self.batches, number))
            new, back = jax.vjp(numerators, self.ends, out)
            d_ends, d_out = back(_as_varying(self.d_sums, new))
            return _everywhere(
                carry._replace(
                    returning=jnp.where(self.here == self.last, d_out, carry.returning),
                    d_ends=_sum(carry.d_ends, d_ends),
                    sums=_sum(carry.sums, new),
                )
            )

        return jax.lax.cond(leaves & (round_ == self.schedule.rounds - 1), add, lambda: carry)

    def _backward(self, carry: _Carry, now: i32['']) -> tuple[num['B/r/d/e L/c/t M'], _Carry]:
        """Computes a chunk again, and adds its gradients; that of the embedding too, if the chunk is the first one."""
        busy, round_, number = self._work(self.schedule.backward, now, self.here)
        leaves, first_round, leaving = self._work(self.schedule.backward, now, 0)
        x, chunk = part(carry.inputs, self._slot(round_, number)), self._chunk(round_)
        results, back = jax.vjp(self._layers(busy, part(self.batches, number), round_), x, chunk)
        d_x, d_chunk = back(_as_varying((carry.returning, self.d_layer_sums), results))
        d_chunks = jax.tree.map(lambda total, new: total.at[round_].add(new), carry.d_chunks, d_chunk)

        def with_embedding() -> Ends:
            _, back = jax.vjp(lambda ends: self._embed(ends, part(self.batches, leaving)), self.ends)
            (d_ends,) = back(jnp.where(self.here == 0, d_x, jnp.zeros_like(d_x)))
            return _everywhere(_sum(carry.d_ends, d_ends))

        d_ends = jax.lax.cond(leaves & (first_round == 0), with_embedding, lambda: carry.d_ends)
        return d_x, carry._replace(d_chunks=d_chunks, d_ends=d_ends)

    def _embed(self, ends: Ends, micro: Batch) -> num['B/r/d/e L/c/t M']:
        with scope():  # B is a micro-batch here
            return self.stages.embed(ends, micro)

    def _chunk(self, round_: i32['']) -> Layer:
        return jax.tree.map(lambda w: w.astype(jnp.float32), part(self.chunks, round_))  # so that gradients are f32

    def _layers(
        self, busy: bool_[''], micro: Batch, round_: i32['']
    ) -> Callable[[jax.Array, Layer], tuple[jax.Array, PyTree]]:
        """Computes a chunk. The results of an idle stage are zero, and so are their gradients."""

        def layers(x: num['B/r/d/e L/c/t M'], chunk: Layer) -> tuple[num['B/r/d/e L/c/t M'], PyTree]:
            with scope():
                results = self.stages.chunk(x, chunk, micro, round_ * self.schedule.stages + self.here)
            return jax.tree.map(lambda y: jnp.where(busy, y, jnp.zeros_like(y)), results)

        return layers

    def _numerators(self, ends: Ends, out: num['B/r/d/e L/c/t M'], micro: Batch) -> dict[str, f32['']]:
        """The numerators of this stage's share of the tokens; `out` counts on the last stage."""
        finished = jnp.where(self.here == self.last, out, jnp.zeros_like(out))
        with scope():
            x = psum_scatter('B/r/d/e L/c/t M -> B/r/d/e L/c/t/p M', finished)
        shares = jax.tree.map(lambda a: split_tokens(a, self.schedule.stages, x.shape[1]), micro)
        with scope():  # L is the length of a share here
            return self.stages.numerators(ends, x, part(shares, self.here))

    def _zeros(self, micro: Batch) -> tuple[Any, PyTree, dict[str, Any]]:
        """Zeros like x, the sums of a chunk and the numerators of a micro-batch."""
        x = jax.eval_shape(self._embed, self.ends, micro)
        here, first = jnp.bool_(True), jnp.int32(0)
        _, layer_sums = jax.eval_shape(self._layers(here, micro, first), x, self._chunk(first))
        sums = jax.eval_shape(self._numerators, self.ends, x, micro)
        return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), (x, layer_sums, sums))

    def _slot(self, round_: i32[''], number: i32['']) -> i32['']:
        """Where the input of a chunk is kept."""
        return jnp.asarray(slots(self.schedule))[round_, number]

    def _work(self, direction: Callable[..., Work], now: i32[''], stage: Any) -> Work:
        busy, round_, number = direction(now, stage)
        return busy, round_, jnp.clip(number, 0, self.schedule.micro_batches - 1)


def _sum(total: PyTree, new: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, new)


def _everywhere[T](values: T) -> T:
    """The values, typed as varying over all axes, so that all ticks and conditions give the same types."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.tree.map(lambda x: vary(x, axes), values)


def _as_varying(gradients: PyTree, values: PyTree) -> PyTree:
    """Gradients of values, typed as varying over the axes over which the values vary."""
    return jax.tree.map(lambda g, x: vary(g, varying_axes(x)), gradients, values)
