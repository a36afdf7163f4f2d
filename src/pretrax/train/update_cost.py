"""What the update of each optimizer costs per device and step: state, memory traffic, products, exchanges.

An update of single values costs memory traffic: gradients and weights, the state, and what `_MORE_PASSES` lists. An
optimizer of whole matrices also costs products on the owners of the matrices, and exchanges with them (`owners.py`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pretrax.cost.step_facts import Exchange, UpdateCost
from pretrax.shardlib.types import current_mesh
from pretrax.train.groups import settings_of, without_frozen
from pretrax.train.owners import Stack, layout_of, stacks_of
from pretrax.train.skipping import InPlace
from pretrax.train.soap import OwnedState
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
    """The work of an optimizer on whole matrices."""

    precision: str  # of the products: 'f32', 'bf16', or 'highest', f32 without a faster format
    products: Callable[[Any, int, int], _Products]  # options, rows, columns -> the products on one matrix


def update_cost(recipe: Recipe, like: TrainState) -> UpdateCost:
    """The cost of an update.

    Args:
        recipe: the step.
        like: shapes and dtypes of the state, with shardings.
    """
    weights = without_frozen(like.weights, settings_of(recipe, like.weights))
    state, average = (
        sum(_local(x) * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in ((like.optimizer, like.ema), like.ema)
    )
    name, options = recipe.section.name, recipe.section.options
    passes = _MORE_PASSES.get(name, 0) + _NORMUON_PASSES * (getattr(options, 'neuron_b2', None) is not None)
    values = sum(map(_local, jax.tree.leaves(weights)))
    traffic = (_WEIGHT_AND_GRADIENT + 4 * passes) * values + 2 * state
    copied = average if isinstance(recipe.optimizer, InPlace) else state
    cost = UpdateCost(state, copied, traffic)
    rule = _matrix_rule(name, options)
    if rule is None:
        return cost
    with jax.sharding.use_abstract_mesh(jax.tree.leaves(weights)[0].sharding.mesh.abstract_mesh):
        return _with_matrices(cost, rule, options, _stacks(recipe, like, weights))


def axes_of_cost(recipe: Recipe) -> str:
    """The mesh axes whose sizes change the cost: those that shard weights; of whole matrices, also those of owners."""
    section = recipe.section
    return 'detp' if _matrix_rule(section.name, section.options) is None else 'rdectp'


def _matrix_rule(name: str, options: Any) -> _MatrixRule | None:
    if name == 'muon':
        return _MatrixRule(options.precision, _newton_schulz)
    if name == 'soap':
        return _MatrixRule('highest', _eigenbasis)
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


def _with_matrices(cost: UpdateCost, rule: _MatrixRule, options: Any, stacks: Sequence[Stack]) -> UpdateCost:
    width = 2 if rule.precision == 'bf16' else 4
    flops, traffic, sizes = 0.0, 0.0, current_mesh().shape
    exchanges = Counter[tuple[str, tuple[str, ...]]]()
    for stack in stacks:
        owners, matrices = stack.owners, stack.owned
        of_one = rule.products(options, stack.rows, stack.columns)
        matrix = width * stack.rows * stack.columns
        flops, traffic = flops + matrices * of_one.flops, traffic + width * matrices * of_one.values
        if owners.split > 1:
            traffic += 4 * matrices * matrix  # both exchanges are read and written
            moved = tuple(axis for axis in owners.moved if sizes[axis] > 1)
            exchanges['all-to-all', moved] += 2 * matrices * matrix
        if owners.idle:
            exchanges['all-gather', owners.idle] += stack.gathered * matrix // owners.split
    sent = tuple(Exchange(*key, n_bytes) for key, n_bytes in exchanges.items())
    return dataclasses.replace(cost, flops=flops, precision=rule.precision, matrices=traffic, exchanges=sent)


def _stacks(recipe: Recipe, like: TrainState, weights: Any) -> list[Stack]:
    """The stacks of matrices that an optimizer exchanges."""
    for state in jax.tree.leaves(like.optimizer, is_leaf=lambda x: isinstance(x, OwnedState)):
        if isinstance(state, OwnedState):
            return state.stacks
    leaves, tree = jax.tree.flatten(weights)
    dims = tree.flatten_up_to(recipe.model.matrix_dimensions(weights))
    layouts = [each and layout_of(w, each, w.sharding) for w, each in zip(leaves, dims, strict=True)]
    return stacks_of([w.shape for w in leaves], layouts)


def _local(x: Any) -> int:
    """Values of an array on one device."""
    return math.prod(x.sharding.shard_shape(x.shape))
