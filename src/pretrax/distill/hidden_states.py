"""Distillation of hidden states: after some layers, the residual stream of a student becomes that of its teacher.

Letters: B batch, L length, M d_model of the student, M_teacher d_model of the teacher.

For a pair of layers, s and t are the residual streams of the student and the teacher after a layer of each. The loss of
a token is |s W - t|^2 / |t|^2, and the loss is its mean over pairs and target tokens. Romero et al. 2015 (FitNets,
arXiv:1412.6550, eq. 3) introduced the squared error with a learned map W of the student's states; Jiao et al. 2020
(TinyBERT, arXiv:1909.10351, eq. 8) and Muralidharan et al. 2024 (Minitron, arXiv:2407.14679, section 3.2) use it for
Transformers. Divided by |t|^2 it does not depend on the width or on the size of the teacher's states, which grows over
its layers: 0 means equal, and 1 is the error of zeros.

W is a matrix for each pair, and there is none if both models are equally wide. It is trained with the student, and is
not part of the decoder that is exported or generates text.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.errors import UserError
from pretrax.model.loss import LossTerms
from pretrax.model.matmul import gather, product
from pretrax.model.numerics import COMPUTE
from pretrax.model.routing import own_part
from pretrax.shardlib import f32, make_abstract, num, psum, typechecked

PROJECTION = 'hidden_projection'  # the name of the weight


@dataclasses.dataclass(frozen=True)
class HiddenMatch:
    """Which hidden states a student learns."""

    layers: tuple[tuple[int, int], ...]  # pairs of a layer of the student and one of the teacher, from 0
    weight: float  # of this loss, which is added to the others

    @property
    def student_layers(self) -> list[int]:
        """The layers of the student, each once, in order."""
        return sorted({ours for ours, _ in self.layers})

    @property
    def teacher_layers(self) -> list[int]:
        """The layers of the teacher, each once, in order."""
        return sorted({theirs for _, theirs in self.layers})

    def check(self, n_layers: int, of_teacher: int) -> None:
        """Raises UserError if one of the models has no such layer."""
        for who, layers, n in (
            ('student', self.student_layers, n_layers),
            ('teacher', self.teacher_layers, of_teacher),
        ):
            if layers[-1] >= n:
                raise UserError(
                    f'distill.hidden.layers: the {who} has no layer {layers[-1]}; its layers are 0 to {n - 1}\n'
                    'each pair is a layer of the student and one of the teacher: [[0, 1], [1, 3]]'
                )


def abstract_projection(n_pairs: int, d_model: int, of_teacher: int) -> jax.ShapeDtypeStruct:
    """Shape and sharding of the projections on the current mesh."""
    sizes = {'pairs': n_pairs, 'M': d_model, 'M_teacher': of_teacher}
    return make_abstract(num['pairs M/d M_teacher'], sizes, num=jnp.float32)


def init_projection(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Initial projections, which keep the size of what they project: normal, with a variance of 1 / d_model."""
    own_key = jax.random.fold_in(key, zlib.crc32(PROJECTION.encode()))
    return like.shape[1] ** -0.5 * jax.random.normal(own_key, like.shape, like.dtype)


@jax.named_scope('hidden_states')
def hidden_terms(
    how: HiddenMatch, ours: jax.Array, theirs: jax.Array, projection: jax.Array | None, mask: f32['B/r/d/e L/c']
) -> LossTerms:
    """The term 'hidden_mse' of the loss, with its weight, and a table for `hidden_metrics`.

    Args:
        ours: num[layers, B/r/d/e, L/c/t, M], of the student, as `Transformer.hidden_states` returns them.
        theirs: num[layers, B/r/d/e, L/c/t, M_teacher], of the teacher.
        projection: num[pairs, M/d, M_teacher]; None: the models are equally wide.
        mask: weights of the tokens, by their targets.
    """
    own, count, total = own_part(mask), jnp.sum(mask), jnp.zeros(())
    for i, (layer, of_teacher) in enumerate(how.layers):
        s, t = ours[how.student_layers.index(layer)], theirs[how.teacher_layers.index(of_teacher)]
        each = relative_error(s if projection is None else projected(s, projection[i]), t)
        total += jnp.sum(each * own) / len(how.layers)
    total = psum('t', total)
    return {'hidden_mse': (how.weight * total, count), 'hidden': (jnp.stack([total, count])[None], None)}


@typechecked
def projected(x: num['B/r/d/e L/c/t M'], matrix: num['M/d M_teacher']) -> num['B/r/d/e L/c/t M_teacher']:
    """The states of a student in the space of its teacher."""
    whole = gather('M/d M_teacher -> M M_teacher', matrix, x)
    return product('B/r/d/e L/c/t M, M M_teacher -> B/r/d/e L/c/t M_teacher', x, whole, COMPUTE[PROJECTION])


@typechecked
def relative_error(x: num['B/r/d/e L/c/t M_teacher'], teacher: num['B/r/d/e L/c/t M_teacher']) -> f32['B/r/d/e L/c/t']:
    """The squared error of each token, relative to the squared norm of the teacher's states."""
    teacher = teacher.astype(jnp.float32)
    size = jnp.sum(jnp.square(teacher), axis=-1)
    return jnp.sum(jnp.square(x.astype(jnp.float32) - teacher), axis=-1) / jnp.maximum(size, 1e-12)


def hidden_metrics(tables: dict[str, Any]) -> dict[str, f32['']]:
    """`hidden_mse`, the loss without its weight, from the table of `hidden_terms`."""
    if 'hidden' not in tables:
        return {}
    total, count = tables['hidden'][0]
    return {'hidden_mse': total / count}
