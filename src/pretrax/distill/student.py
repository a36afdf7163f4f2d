"""Distillation: a decoder, the student, also learns from the probabilities of another one, the teacher.

Letters: B batch, L length, M d_model, V vocabulary.

The loss of a token is (1 - weight) * cross-entropy + weight * T^2 * KL, where both models divide their logits by the
temperature T (Hinton et al. 2015, arXiv:1503.02531, section 2; T^2 keeps the size of the gradient). KL is forward,
KL(teacher || student), or reverse, KL(student || teacher) (Gu et al. 2023, arXiv:2306.08543, section 2.1). The teacher
runs forward only. The logits of both models exist for one chunk of the sequences at a time, each device has its part of
the vocabulary, and the backward pass computes them again.

Offline, the batch has the k most likely tokens of the teacher and the probability of all others together (`TopK`),
which were computed before. KL is then over k + 1 outcomes.

A student may also learn the hidden states of its teacher after some layers (hidden_states.py).
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pretrax.distill.hidden_states import (
    PROJECTION,
    HiddenMatch,
    abstract_projection,
    hidden_metrics,
    hidden_terms,
    init_projection,
)
from pretrax.distill.top_k import TopK, as_logits, divergence, top_k_of
from pretrax.errors import UserError
from pretrax.model.axes import along
from pretrax.model.choices import DROPOUT, EXECUTION, TransformerOptions
from pretrax.model.ends import gather_ends
from pretrax.model.loss import Batch, LossTerms, chunks_of, in_chunks, join_tokens, loss_terms, over_chunks
from pretrax.model.multi_token import predict_ahead
from pretrax.model.option_names import nest
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.model.weights import Ends, Weights, abstract_weights, round_matrices
from pretrax.shardlib import f32, key, num, pytree_dataclass, scope

Direction = Literal['forward', 'reverse']
LogitsOf = Callable[[jax.Array], jax.Array]  # hidden states after the last layer -> logits
# Options of a decoder that a teacher does not take from its checkpoint: they say how it was trained, not what it
# computes
OF_TRAINING = {
    *EXECUTION,
    *DROPOUT,
    'dropout',
    'multi_token.n_layers',
    'multi_token.loss',
    'experts.router.balance_over',
}


@pytree_dataclass
class Teacher:
    """The weights of a teacher, with sizes of its own; matrices and tables in the compute dtype."""

    own_sizes: ClassVar[bool] = True
    weights: Weights


@dataclasses.dataclass(frozen=True)
class Distillation:
    """How a student learns from its teacher."""

    weight: float  # of the distillation loss, 0 to 1; the usual cross-entropy has the rest
    temperature: float  # what both models divide their logits by
    direction: Direction  # of the Kullback-Leibler divergence
    chunks: int  # of a sequence, whose logits exist one at a time; at least this number, if the sequence is as long
    hidden: HiddenMatch | None = None  # the hidden states that the student learns too; None: none


class DistilledTransformer(Transformer):
    """A decoder that learns from a teacher. Everything but its loss in training is that of the decoder.

    Without a `teacher`, it learns from what the batches have of one.
    """

    Constants = Teacher | None

    def __init__(
        self,
        request: ModelRequest,
        *,
        options: TransformerOptions,
        teacher: TransformerOptions | None,
        how: Distillation,
    ):
        if request.mesh['p'] > 1:
            raise UserError(
                f'mesh.p = {request.mesh["p"]}: distill does not support pipeline parallelism\n'
                'use mesh.p=1, and d, t or c instead'
            )
        super().__init__(request, options=options)
        context = self.plan.context if request.mesh['c'] > 1 else 'auto'
        self.teacher = None if teacher is None else build_teacher(request, teacher, context)
        self.teacher_arch = None if self.teacher is None else self.teacher.arch
        self.kept_states = 0 if how.hidden is None else len(how.hidden.teacher_layers)
        self.how = how
        here = request.sequence_length // along('c t', request.mesh)
        chunks = chunks_of(here, max(how.chunks, self.plan.loss_chunks))
        self.plan = dataclasses.replace(self.plan, loss_chunks=chunks)
        said = f'{how.direction} KL at temperature {how.temperature:g}, {how.weight:g} of the loss'
        self.choices = {**self.choices, 'distillation': said}
        if self.teacher is not None:
            self.choices['teacher'] = self.teacher.arch.describe()
        if how.hidden is not None:
            assert self.teacher is not None, 'hidden states come from a teacher that runs'
            how.hidden.check(self.arch.n_layers, self.teacher.arch.n_layers)
            width = self.teacher.arch.d_model
            pairs = ', '.join(f'layer {ours} learns {theirs}' for ours, theirs in how.hidden.layers)
            through = '' if self.arch.d_model == width else f', projected from {self.arch.d_model} to {width}'
            self.choices['hidden states'] = f'{pairs} of the teacher{through}; weight {how.hidden.weight:g}'

    @property
    def uninherited(self) -> tuple[str, ...]:  # type: ignore[override]
        """The projection of hidden states: no checkpoint has that of another run."""
        return () if self._abstract_projection() is None else (PROJECTION,)

    def init(self, key: jax.Array) -> Weights:
        """Initial weights (under jit, outside the manual region)."""
        weights, like = super().init(key), self._abstract_projection()
        return weights if like is None else dataclasses.replace(weights, hidden_projection=init_projection(key, like))

    def abstract(self) -> Weights:
        """Shapes and shardings of the weights on the current mesh."""
        return dataclasses.replace(super().abstract(), hidden_projection=self._abstract_projection())

    def abstract_constants(self) -> Teacher | None:
        """Shapes, dtypes and shardings of the teacher's weights on the mesh; None: batches have what it computes."""
        if self.teacher is None:
            return None
        like = abstract_weights(self.teacher.arch)
        dtypes = jax.eval_shape(lambda w: in_compute_dtype(w, self.dtype), like)
        rounded = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, to.dtype, sharding=x.sharding), like, dtypes)
        return Teacher(rounded)

    def loss(
        self,
        weights: Weights,
        batch: Batch,
        surveyed: tuple[f32['E'], f32['']] | None = None,
        key: key[''] | None = None,
        constants: Teacher | None = None,
    ) -> LossTerms:
        """This device's terms of the loss; without a teacher, as in an evaluation, the decoder's own terms."""
        if constants is None and batch.top_ids is None:
            return super().loss(weights, batch, surveyed, key)
        ends = gather_ends(weights, self.dtype, self.plan.sums)
        layer_seeds, head_seed = self.plan.numerics.seeds(key)
        kept = () if self.how.hidden is None else self.how.hidden.student_layers
        x, routed, states = self.hidden_states(ends, weights.layers, batch, layer_seeds, kept)
        terms, of_teacher = self._distilled_terms(lambda x: self.unembed(ends, x, head_seed), x, constants, batch)
        if self.how.hidden is not None:
            terms |= hidden_terms(self.how.hidden, states, of_teacher, weights.hidden_projection, batch.mask)
        ahead = predict_ahead(self, weights.multi_token, ends, x, routed, batch=batch, tokens=self.tokens(batch))
        return self._with_routing(terms | ahead[0], ahead[1], batch, surveyed)

    def denominators(self, batch: Batch) -> dict[str, f32['']]:
        """The denominators of the terms of `loss`: the same count of target tokens for all."""
        return super().denominators(batch) | dict.fromkeys(('distillation', 'hidden_mse'), jnp.sum(batch.mask))

    def summarize(self, tables: dict[str, f32['rows columns']]) -> dict[str, f32['']]:
        """`nll`, `distillation`, `hidden_mse`: losses per target token without weights, and the decoder's metrics."""
        found = super().summarize(tables)
        if 'distilled' not in tables:
            return found
        nll, divergence, count = tables['distilled'][0]
        return found | {'nll': nll / count, 'distillation': divergence / count} | hidden_metrics(tables)

    def top_k(self, teacher: Teacher, batch: Batch, k: int) -> TopK:
        """The teacher's k most likely next tokens of each token, at the distillation's temperature. Runs per device."""
        ends, x, _ = self._run_teacher(teacher, batch)

        def find(x: jax.Array, part: Batch) -> TopK:
            del part
            return top_k_of(self._teacher_logits(ends, x), k, self.arch.vocab_size, self.how.temperature)

        chunks = self.plan.loss_chunks
        n = x.shape[1] // chunks
        return jax.tree.map(lambda parts: join_tokens(parts, n), over_chunks(find, x, batch, chunks))

    def _run_teacher(
        self, teacher: Teacher, batch: Batch, kept: Sequence[int] = ()
    ) -> tuple[Ends, num['B/r/d/e L/c/t M'], num['kept B/r/d/e L/c/t M'] | None]:
        """The teacher's ends, and its hidden states after the last layer and the layers `kept`, without dropout."""
        assert self.teacher is not None
        without_dropout = dataclasses.replace(batch, seeds=None)
        with scope(), jax.named_scope('teacher'):  # M is the width of the teacher here
            ends = gather_ends(teacher.weights, self.dtype)
            x, _, states = self.teacher.hidden_states(ends, teacher.weights.layers, without_dropout, kept=kept)
            return ends, x, states

    def _teacher_logits(self, ends: Ends, x: num['B/r/d/e L/c/t M']) -> num['B/r/d/e L/c V/t']:
        assert self.teacher is not None
        with scope(), jax.named_scope('teacher'):
            return self.teacher.unembed(ends, x)

    def _distilled_terms(
        self, logits_of: LogitsOf, x: num['B/r/d/e L/c/t M'], teacher: Teacher | None, batch: Batch
    ) -> tuple[LossTerms, jax.Array | None]:
        """The terms of both losses, from the hidden states of the student; and those of the teacher that it learns."""
        how, vocab_size = self.how, self.arch.vocab_size
        ends, teacher_x, states = None, (), None
        if teacher is not None:
            ends, last, states = self._run_teacher(teacher, batch, how.hidden.teacher_layers if how.hidden else ())
            teacher_x = (last,)

        def terms_of(hidden: tuple[jax.Array, ...], part: Batch) -> LossTerms:
            logits = logits_of(hidden[0])
            if ends is not None:
                of_teacher = self._teacher_logits(ends, hidden[1])
            else:
                top = TopK(part.top_ids, part.top_log_probs, part.log_tail)
                of_teacher = as_logits(top, logits, vocab_size, how.temperature)
            usual = loss_terms(logits, part, vocab_size, self.arch.z_loss)
            each = divergence(logits, of_teacher, vocab_size, how.temperature, how.direction)
            (nll, count), total = usual['nll'], how.temperature**2 * jnp.sum(each * part.mask)
            return usual | {
                'nll': ((1 - how.weight) * nll, count),
                'distillation': (how.weight * total, count),
                'distilled': (jnp.stack([nll, total, count])[None], None),
            }

        return in_chunks(terms_of, (x, *teacher_x), batch, self.plan.loss_chunks), states

    def _abstract_projection(self) -> jax.ShapeDtypeStruct | None:
        """Shape and sharding of the projections of hidden states on the current mesh; None: there are none."""
        hidden, width = self.how.hidden, self.arch.d_model
        if hidden is None or self.teacher is None or self.teacher.arch.d_model == width:
            return None
        return abstract_projection(len(hidden.layers), width, self.teacher.arch.d_model)


def build_teacher(request: ModelRequest, options: TransformerOptions, context: str) -> Transformer:
    """The teacher's decoder on the mesh of the student; `context`: how attention treats sequences sharded over c.

    Raises UserError if its sizes do not divide over the mesh.
    """
    own = {name: value for name, value in options.dotted().items() if name not in OF_TRAINING}
    plain = dataclasses.replace(request, matmul='compute', micro_batches=1, qk_clip=None)
    try:
        return Transformer(plain, options=TransformerOptions(**nest(own | {'attention.context': context})))
    except UserError as error:
        raise UserError(f'distill.teacher: {error}') from error


def in_compute_dtype(weights: Weights, dtype: DTypeLike) -> Weights:
    """The matrices and tables in the dtype in which products use them; vectors stay f32."""

    def rounded(table: jax.Array | None) -> jax.Array | None:
        return None if table is None else table.astype(dtype)

    tables = {name: rounded(getattr(weights, name)) for name in ('embed', 'positions', 'unembed')}
    return dataclasses.replace(weights, layers=round_matrices(weights.layers, dtype), **tables)


def fingerprint(teacher: Teacher | None) -> str | None:
    """Identifies the weights of a teacher, whatever their sharding; None: there is none."""
    if teacher is None:
        return None
    sums = jax.device_get(_sums(teacher.weights))
    digest = hashlib.sha256()
    for path, number in jax.tree_util.tree_leaves_with_path(sums):
        digest.update(f'{jax.tree_util.keystr(path)}={int(number)};'.encode())
    return digest.hexdigest()


@jax.jit
def _sums(weights: Any) -> Any:
    """For each array, the sum of its bits times odd numbers that depend on the position, modulo 2^32."""

    def weighted_sum(array: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(array, {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize])
        position = jnp.zeros(array.shape, jnp.uint32)
        for axis, size in enumerate(array.shape):
            position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        mixed = (position ^ (position >> 15)) * np.uint32(0x9E3779B1)
        return jnp.sum(bits.astype(jnp.uint32) * (mixed | 1), dtype=jnp.uint32)

    return jax.tree.map(weighted_sum, weights)
