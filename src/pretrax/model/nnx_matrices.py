"""Which parameters of a Flax NNX module are matrices: the type of the module that owns a parameter decides."""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from pretrax.model.base import MatrixAxes


class Matrix(NamedTuple):
    """A parameter that holds matrices."""

    dims: MatrixAxes
    is_table: bool  # an embedding, or the projection to the vocabulary


def find_matrices(
    nnx: ModuleType, module: Any, shapes: Mapping[tuple, tuple[int, ...]], columns: int
) -> dict[str, Matrix]:
    """The parameters that hold matrices, by dotted name.

    These are the kernels of `nnx.Linear`, `nnx.LinearGeneral` (which `nnx.MultiHeadAttention` consists of),
    `nnx.Einsum` and `nnx.Conv`, and the tables of `nnx.Embed`. Parameters of other modules are none.

    Args:
        nnx: `flax.nnx`.
        module: an `nnx.Module`, whose parameters may be abstract.
        shapes: of the parameters, by path.
        columns: of the logits. A kernel with as many outputs is the projection to the vocabulary.
    """
    found = {}
    for path, owner in nnx.iter_modules(module):
        name = 'embedding' if isinstance(owner, nnx.Embed) else 'kernel'
        roles, shape = _roles(nnx, owner), shapes.get((*path, name), ())
        roles = 'b' * (len(shape) - len(roles)) + roles  # nnx.vmap stacks modules in front
        inputs, outputs = (tuple(i for i, role in enumerate(roles) if role == end) for end in 'io')
        if len(roles) == len(shape) and inputs and outputs:
            is_table = name == 'embedding' or math.prod(shape[i] for i in outputs) == columns
            found['.'.join(map(str, (*path, name)))] = Matrix((inputs, outputs), is_table)
    return found


def _roles(nnx: ModuleType, owner: Any) -> str:
    """The role of each dimension of a kernel: i of the inputs, o of the outputs, b counts matrices; '': unknown."""
    if isinstance(owner, nnx.LinearGeneral):
        return 'b' * len(owner.batch_axis) + 'i' * len(owner.in_features) + 'o' * len(owner.out_features)
    if isinstance(owner, nnx.Linear | nnx.Embed):
        return 'io'
    if (
        isinstance(owner, nnx.Conv) and owner.feature_group_count == 1
    ):  # as one matrix: kellerjordan.github.io/posts/muon
        return 'i' * len(owner.kernel_size) + 'io'
    if isinstance(owner, nnx.Einsum) and owner.einsum_str and '...' not in owner.einsum_str.split(',')[1]:
        operands, result = owner.einsum_str.split('->')
        x, kernel = operands.split(',')
        return ''.join(
            'b' if letter in x and letter in result else 'o' if letter in result else 'i' for letter in kernel
        )
    return ''
