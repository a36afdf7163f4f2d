"""Distillation: a decoder, the student, also learns from the probabilities of another one, the teacher.

Letters: B batch, L length, M d_model, V vocabulary.

The loss of a token is (1 - weight) * cross-entropy + weight * T^2 * KL, where both models divide their logits by the temperature T
(Hinton et al. 2015, arXiv:1503.02531, section 2; T^2 keeps the size of the gradient). KL is forward, KL(teacher || student), or
reverse, KL(student || teacher) (Gu et al. 2023, arXiv:2306.08543, section 2.1). The teacher runs forward only. The logits of both
models exist for one chunk of the sequences at a time, each device has its part of the vocabulary, and the backward pass computes
them again.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.errors import UserError
from pretrax.model.ends import gather_ends, unembed
from pretrax.model.families import TransformerOptions
from pretrax.model.loss import Batch, LossTerms, loss_terms, vocabulary_columns
from pretrax.model.loss_chunks import in_chunks
from pretrax.model.multi_token import predict_ahead
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer, block
from pretrax.model.weights import Teacher, Weights, abstract_weights, round_matrices
from pretrax.shardlib import f32, key, num, pmax, psum, scope, typechecked

Direction = Literal['forward', 'reverse']
# Options of a decoder that a teacher does not take from its checkpoint: they say how it was trained, not what it computes
OF_TRAINING = (
    'layers', 'save', 'loss_chunks', 'batch_parts', 'attention', 'pipeline_rounds', 'pipeline_schedule', 'context',
    'mtp_layers', 'mtp_loss', 'balance_over', 'dropout', 'attention_dropout', 'residual_dropout', 'embedding_dropout',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Distillation:
    """How a student learns from its teacher.

    Attributes:
        weight: of the distillation loss, 0 to 1; the usual cross-entropy has the rest.
        temperature: what both models divide their logits by.
        direction: of the Kullback-Leibler divergence.
        chunks: of a sequence, whose logits exist one at a time; at least so many, if the sequence is as long.
    """

    weight: float
    temperature: float
    direction: Direction
    chunks: int


class DistilledTransformer(Transformer):
    """A decoder that learns from a teacher. Everything but its loss in training is that of the decoder."""

    def __init__(
        self, request: ModelRequest, *, options: TransformerOptions, teacher: TransformerOptions, how: Distillation
    ):
        if request.mesh['p'] > 1:
            raise UserError(
                f'mesh.p = {request.mesh["p"]}: distill does not support pipeline parallelism\n'
                'use mesh.p=1, and d, t or c instead'
            )
        super().__init__(request, options=options)
        context = self.plan.context if request.mesh['c'] > 1 else 'auto'
        self.teacher = build_teacher(request, teacher, context)
        self.how = how
        said = f'{how.direction} KL at temperature {how.temperature:g}, {how.weight:g} of the loss'
        self.choices = {**self.choices, 'distillation': said, 'teacher': self.teacher.arch.describe()}

    def abstract_teacher(self) -> Teacher:
        """Shapes, dtypes and shardings of the teacher's weights on the mesh in force."""
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
        teacher: Teacher | None = None,
    ) -> LossTerms:
        """This device's terms of the loss; without a teacher, as in an evaluation, those of the decoder alone."""
        if teacher is None:
            return super().loss(weights, batch, surveyed, key)
        ends = gather_ends(weights, self.dtype)
        layer_seeds, head_seed = self.plan.numerics.seeds(key)
        x, routed = self._hidden_states(ends, weights.layers, batch, layer_seeds)
        terms = self._distilled_terms(
            lambda x: unembed(ends, x, self.arch, self.plan.numerics.head_format(head_seed)), x, teacher.weights, batch
        )
        ahead = predict_ahead(self, block, weights.multi_token, ends, x, routed, batch, self._tokens(batch))
        return self._with_routing(terms | ahead[0], ahead[1], batch, surveyed)

    def denominators(self, batch: Batch) -> dict[str, f32['']]:
        """The denominators of the terms of `loss`: the same count of target tokens for both."""
        return super().denominators(batch) | {'distillation': jnp.sum(batch.mask)}

    def summarize(self, tables: dict[str, f32['rows columns']]) -> dict[str, f32['']]:
        """`nll` and `distillation`, the two losses per target token without their weights, and the metrics of the decoder."""
        found = super().summarize(tables)
        if 'distilled' not in tables:
            return found
        nll, divergence, count = tables['distilled'][0]
        return found | {'nll': nll / count, 'distillation': divergence / count}

    def _distilled_terms(self, logits_of, x: num['B/r/d/e L/c/t M'], teacher: Weights, batch: Batch) -> LossTerms:
        """The terms of both losses, from the hidden states of the student."""
        how, vocab_size = self.how, self.arch.vocab_size
        without_dropout = dataclasses.replace(batch, seeds=None)
        with scope(), jax.named_scope('teacher'):  # M is the width of the teacher here
            teacher_ends = gather_ends(teacher, self.dtype)
            teacher_x, _ = self.teacher._hidden_states(teacher_ends, teacher.layers, without_dropout)

        def terms_of(hidden: tuple[jax.Array, jax.Array], part: Batch) -> LossTerms:
            logits = logits_of(hidden[0])
            with scope(), jax.named_scope('teacher'):
                of_teacher = unembed(
                    teacher_ends, hidden[1], self.teacher.arch, self.teacher.plan.numerics.head_format()
                )
            usual = loss_terms(logits, part, vocab_size, self.arch.z_loss)
            each = divergence(logits, of_teacher, vocab_size, how.temperature, how.direction)
            (nll, count), total = usual['nll'], how.temperature**2 * jnp.sum(each * part.mask)
            return usual | {
                'nll': ((1 - how.weight) * nll, count),
                'distillation': (how.weight * total, count),
                'distilled': (jnp.stack([nll, total, count])[None], None),
            }

        return in_chunks(terms_of, (x, teacher_x), batch, chunks_of(x.shape[1], max(how.chunks, self.plan.loss_chunks)))


def build_teacher(request: ModelRequest, options: TransformerOptions, context: str) -> Transformer:
    """The teacher's decoder on the mesh of the student; `context`: how attention treats sequences sharded over c.

    Raises:
        UserError: its sizes do not divide over the mesh.
    """
    own = {name: value for name, value in options.model_dump(exclude_unset=True).items() if name not in OF_TRAINING}
    plain = dataclasses.replace(request, matmul='compute', micro_batches=1)
    try:
        return Transformer(plain, options=TransformerOptions(**own, context=context))
    except UserError as error:
        raise UserError(f'distill.teacher: {error}') from error


def in_compute_dtype(weights: Weights, dtype: DTypeLike) -> Weights:
    """The matrices and tables in the dtype in which products use them; vectors stay f32."""

    def rounded(table: jax.Array | None) -> jax.Array | None:
        return None if table is None else table.astype(dtype)

    tables = {name: rounded(getattr(weights, name)) for name in ('embed', 'positions', 'unembed')}
    return dataclasses.replace(weights, layers=round_matrices(weights.layers, dtype), **tables)


def chunks_of(length: int, wanted: int) -> int:
    """The smallest divisor of the length that is at least `wanted`; the length if there is none."""
    return next((n for n in range(min(wanted, length), length) if length % n == 0), length)


@typechecked
def divergence(
    logits: num['B/r/d/e L/c V/t'],
    teacher: num['B/r/d/e L/c V/t'],
    vocab_size: int,
    temperature: float,
    direction: str,
) -> f32['B/r/d/e L/c']:
    """The Kullback-Leibler divergence of each token, in nats: KL(p || q) if forward, KL(q || p) if reverse.

    q is softmax(logits / temperature) of the student, p that of the teacher; columns past vocab_size do not count. The
    teacher gets no gradient.
    """
    return _divergence(vocab_size, temperature, direction, logits, teacher)


Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _divergence(
    vocab_size: int, temperature: float, direction: str, logits: jax.Array, teacher: jax.Array
) -> jax.Array:
    return _forward(vocab_size, temperature, direction, logits, teacher)[0]


def _log_softmax(logits: jax.Array, log_z: jax.Array, temperature: float) -> jax.Array:
    return logits.astype(jnp.float32) / temperature - log_z[..., None]


def _log_z(vocab_size: int, temperature: float, logits: jax.Array) -> jax.Array:
    is_real = vocabulary_columns(logits) < vocab_size
    largest = pmax('t', jnp.max(jnp.where(is_real, logits, -jnp.inf), axis=-1).astype(jnp.float32))
    powers = jnp.exp((logits.astype(jnp.float32) - largest[..., None]) / temperature)
    return jnp.log(psum('t', jnp.sum(jnp.where(is_real, powers, 0.0), axis=-1))) + largest / temperature


def _forward(
    vocab_size: int, temperature: float, direction: str, logits: jax.Array, teacher: jax.Array
) -> tuple[jax.Array, Residuals]:
    log_zs = [_log_z(vocab_size, temperature, one) for one in (logits, teacher)]
    log_q, log_p = (_log_softmax(x, z, temperature) for x, z in zip((logits, teacher), log_zs, strict=True))
    each = jnp.exp(log_p) * (log_p - log_q) if direction == 'forward' else jnp.exp(log_q) * (log_q - log_p)
    is_real = vocabulary_columns(logits) < vocab_size
    total = psum('t', jnp.sum(jnp.where(is_real, each, 0.0), axis=-1))
    return total, (logits, teacher, *log_zs, total)


def _backward(
    vocab_size: int, temperature: float, direction: str, residuals: Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits, teacher, log_z, teacher_log_z, total = residuals
    log_q = _log_softmax(logits, log_z, temperature)
    log_p = _log_softmax(teacher, teacher_log_z, temperature)
    if direction == 'forward':
        d_logits = jnp.exp(log_q) - jnp.exp(log_p)
    else:
        d_logits = jnp.exp(log_q) * (log_q - log_p - total[..., None])
    is_real = vocabulary_columns(logits) < vocab_size
    d_logits = jnp.where(is_real, d_logits * (gradient / temperature)[..., None], 0.0)
    return d_logits.astype(logits.dtype), jnp.zeros_like(teacher)


_divergence.defvjp(_forward, _backward)
