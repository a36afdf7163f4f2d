"""What the update of each optimizer costs per device and step: state, memory traffic, products, exchanges.

An update of single values costs memory traffic: gradients and weights, the state, and what `_MORE_PASSES` lists. An
optimizer of whole matrices also costs products on the owners of the matrices, and exchanges with them (`owners.py`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from pretrax.cost.step_facts import Exchange, UpdateCost
from pretrax.train.groups import settings_of, without_frozen
from pretrax.train.owners import chunk_sizes, layout_of
from pretrax.train.state import TrainState
from pretrax.train.step import Recipe

# Bytes of each trained weight that an update reads and writes besides the optimizer's state, with clipping and the
# norms that are logged: as in compiled steps of AdamW, whose state takes 16 more.
_WEIGHT_AND_GRADIENT = 40
# Values of each weight that an optimizer reads and writes besides these.
_MORE_PASSES = {
    'adafactor': 3,  # the gradient for the means of rows, of columns, and for the root mean square of its update
    'schedule_free': 3,  # the point of the gradient: the average and z are read, and it is written
    'muon': 2,  # the momentum that goes to the owners is written, and the direction is read
    'soap': 1,  # the direction is read
}
_NORMUON_PASSES = 2  # the mean squares of outputs and of the matrix read the direction again


class _Products(NamedTuple):
    """Products on one matrix."""

    flops: float
    values: float  # of the matrices that they read and write


class _MatrixRule(NamedTuple):
    """What an optimizer does with whole matrices.

    Attributes:
        tables: whether the tables of the vocabulary are matrices too.
        precision: of the products: 'f32', 'bf16', or 'highest', f32 without a faster format.
        products: options, rows, columns -> the products on one matrix.
    """

    tables: bool
    precision: str
    products: Callable[[Any, int, int], _Products]


def update_cost(recipe: Recipe, like: TrainState) -> UpdateCost:
    """The cost of an update.

    Args:
        recipe: the step.
        like: shapes and dtypes of the state, with shardings.
    """
    weights = without_frozen(like.weights, settings_of(recipe, like.weights))
    state = sum(_local(x) * x.dtype.itemsize for x in jax.tree.leaves((like.optimizer, like.ema)))
    name, options = recipe.section.name, recipe.section.options
    passes = _MORE_PASSES.get(name, 0) + _NORMUON_PASSES * (getattr(options, 'neuron_b2', None) is not None)
    values = sum(map(_local, jax.tree.leaves(weights)))
    traffic = (_WEIGHT_AND_GRADIENT + 4 * passes) * values + 2 * state
    cost = UpdateCost(state, traffic)
    rule = _matrix_rule(name, options)
    if rule is None:
        return cost
    return _with_matrices(cost, rule, options, weights, recipe.model.matrix_dimensions(weights, rule.tables))


def _matrix_rule(name: str, options: Any) -> _MatrixRule | None:
    if name == 'muon':
        return _MatrixRule(False, options.precision, _newton_schulz)
    if name == 'soap':
        return _MatrixRule(True, 'highest', _eigenbasis)
    return None


def _newton_schulz(options: Any, rows: int, columns: int) -> _Products:
    """x x^T, its square, and the product of their sum and x, where x has fewer rows than columns."""
    m, n = sorted((rows, columns))
    flops, values = 4 * m * m * n + 2 * m**3, 4 * m * n + 6 * m * m
    return _Products(options.iterations * flops, options.iterations * values)


def _eigenbasis(options: Any, rows: int, columns: int) -> _Products:
    """Three rotations of a matrix, its product with its transpose, and a share of an improvement of the eigenvectors.

    An improvement multiplies two square matrices and makes a QR decomposition, of 8/3 n^3 FLOPs with Householder
    reflections.
    """
    flops = values = 0.0
    for n in (rows, columns):
        if n <= options.max_precond_dim:
            flops += 4 * 2 * n * rows * columns + (2 + 8 / 3) * n**3 / options.precondition_frequency
            values += 4 * (2 * rows * columns + n * n) + 6 * n * n / options.precondition_frequency
    return _Products(flops, values)


def _with_matrices(cost: UpdateCost, rule: _MatrixRule, options: Any, weights: Any, dims: Any) -> UpdateCost:
    width = 2 if rule.precision == 'bf16' else 4
    flops = traffic = 0.0
    exchanges = Counter[tuple[str, tuple[str, ...]]]()
    for (stack, slices, sizes), n in _stacks(weights, dims).items():
        rows, columns = (
            length * math.prod(dict(sizes)[axis] for axis in dim.split('/')[1:])
            for length, dim in zip(slices, stack[1:], strict=True)
        )
        moved, idle, matrices, gathered = _owned(stack, (n, rows, columns), dict(sizes))
        of_one = rule.products(options, rows, columns)
        own = width * matrices * rows * columns
        flops, traffic = flops + matrices * of_one.flops, traffic + width * matrices * of_one.values
        if moved:
            traffic += 4 * own  # both exchanges are read and written
            exchanges['all-to-all', moved] += 2 * own
        if idle:
            exchanges['all-gather', idle] += width * gathered * math.prod(slices)
    sent = tuple(Exchange(*key, n_bytes) for key, n_bytes in exchanges.items())
    return dataclasses.replace(cost, flops=flops, precision=rule.precision, matrices=traffic, exchanges=sent)


def _stacks(weights: Any, matrices: Any) -> Mapping[Any, int]:
    """{(dimensions of a stack, rows and columns of the slice on a device, sizes of the mesh axes): matrices there}."""
    leaves, tree = jax.tree.flatten(weights)
    stacks = Counter[Any]()
    for w, dims in zip(leaves, tree.flatten_up_to(matrices), strict=True):
        if dims is not None:
            layout, local = layout_of(w, dims, w.sharding), w.sharding.shard_shape(w.shape)
            count, *slices = (math.prod(local[i] for i in each) for each in layout[:3])
            stacks[layout.stack, tuple(slices), tuple(w.sharding.mesh.shape.items())] += count
    return stacks


def _owned(
    stack: tuple[str, ...], shape: tuple[int, int, int], sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
    """The mesh axes that shard rows or columns, those along which slices are the same, the matrices of an owner, and
    the slices that are gathered.

    `shape`: matrices on a device, rows, columns. If the owners do not divide the matrices, some are padding.
    """
    taken = {axis for dim in stack for axis in dim.split('/')[1:]}
    moved = tuple(axis for dim in stack[1:] for axis in dim.split('/')[1:] if sizes[axis] > 1)
    idle = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in taken)
    n, rows, columns = shape
    split, sharers = (math.prod(sizes[axis] for axis in axes) for axes in (moved, idle))
    shares = [-(-size // sharers) for size in chunk_sizes(n, rows * columns, split * sharers)]
    return moved, idle, sum(-(-share // split) for share in shares), sum(shares) * sharers


def _local(x: Any) -> int:
    """Values of an array on one device."""
    return math.prod(x.sharding.shard_shape(x.shape))
