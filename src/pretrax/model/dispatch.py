"""Which row of an expert's product each token goes to (dispatch), and where its results come back from (combine).

Letters: T tokens, C choices (the j-th expert of token t is choice t * k + j), E experts, N slots: rows of a matrix in
which the tokens of an expert are adjacent, M d_model. All of it is on one device. Both ways are gathers, in the
backward pass too, because slots and choices each know their source; a scatter-add would be slow and, on some hardware,
not reproducible.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrax.model.expert_slots import number_of_blocks
from pretrax.shardlib import f32, i32, num


class Slots(NamedTuple):
    """Maps each choice to its slot, and back."""

    of_choice: i32['C']  # the number of slots, if the choice is dropped
    choice: i32['N']  # the number of choices, if the slot is empty


def sort_by_expert(chosen: i32['C'], n_experts: int) -> tuple[Slots, i32['E']]:
    """Slots without gaps between experts, and the number of tokens of each expert."""
    sizes = _count(chosen, n_experts)
    return _slots(chosen, jnp.cumsum(sizes) - sizes, chosen.shape[0]), sizes


def sort_into_blocks(chosen: i32['C'], n_experts: int, length: int) -> tuple[Slots, i32['blocks']]:
    """Slots in which each expert begins a new block of `length` slots, and the expert of each block."""
    n_choices = chosen.shape[0]
    n_blocks = number_of_blocks(n_choices, n_experts, length)
    blocks = -(-_count(chosen, n_experts) // length)
    ends = jnp.cumsum(blocks)
    slots = _slots(chosen, (ends - blocks) * length, n_blocks * length)
    expert = jnp.sum(jnp.arange(n_blocks)[:, None] >= ends, axis=1)
    return slots, jnp.minimum(expert, n_experts - 1).astype(jnp.int32)  # unused blocks are empty


def sort_with_capacity(chosen: i32['B C'], n_experts: int, capacity: int) -> Slots:
    """B * E * capacity slots: `capacity` for every expert in each row. Later choices are dropped.

    Tokens keep their order, so whether a choice is dropped does not depend on later tokens.
    """
    rows, n_choices = chosen.shape
    n_slots = rows * n_experts * capacity
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    own = chosen + n_experts * row  # the experts of different rows have different numbers
    number = rank(own.reshape(-1), rows * n_experts).reshape(rows, n_choices)
    of_choice = jnp.where(number < capacity, own * capacity + number, n_slots).reshape(-1)
    return inverted(of_choice, n_slots)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(k: int, x: num['T M'], slots: Slots) -> num['N M']:
    """The row of its token in each slot; zeros in empty slots. A token has k choices."""
    return _rows(x, slots.choice // k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(k: int, y: num['N M'], slots: Slots) -> num['T M']:
    """The sum over each token's slots, computed in f32 and rounded to y's dtype. The transpose of `dispatch`."""
    of_token = slots.of_choice.reshape(-1, k)
    parts = [_rows(y, of_token[:, j]).astype(jnp.float32) for j in range(k)]
    return functools.reduce(jnp.add, parts).astype(y.dtype)


dispatch.defvjp(lambda k, x, slots: (dispatch(k, x, slots), slots), lambda k, slots, dy: (combine(k, dy, slots), None))
combine.defvjp(lambda k, y, slots: (combine(k, y, slots), slots), lambda k, slots, dx: (dispatch(k, dx, slots), None))


def expert_of_rows(groups: jax.Array, method: str, n_rows: int) -> i32['N']:
    """The expert of each row of a grouped product; `groups` and `method` as in `matmul.grouped_product`."""
    if method != 'ragged':
        return jnp.repeat(groups, n_rows // groups.shape[0])
    expert = jnp.sum(jnp.arange(n_rows)[:, None] >= jnp.cumsum(groups), axis=1, dtype=jnp.int32)
    return jnp.minimum(expert, groups.shape[0] - 1)  # empty rows come last


@jax.custom_vjp
def gather_by_expert(values: f32['E F'], expert: i32['N']) -> f32['N F']:
    """The values of each row's expert. The gradient is a product, not a scatter-add of rows."""
    return jnp.take(values, expert, axis=0)


def _gather_by_expert_backward(residuals: tuple[jax.Array, jax.Array], d_rows: f32['N F']) -> tuple[jax.Array, None]:
    expert, values = residuals
    hits = (expert[:, None] == jnp.arange(values.shape[0])).astype(d_rows.dtype)
    return jnp.einsum('ne,nf->ef', hits, d_rows, preferred_element_type=jnp.float32), None


gather_by_expert.defvjp(
    lambda values, expert: (gather_by_expert(values, expert), (expert, values)), _gather_by_expert_backward
)


def _rows(x: num['T M'], index: i32['N']) -> num['N M']:
    """Rows of x; zeros for an index past its end."""
    return jnp.take(x, index, axis=0, mode='fill', fill_value=0)


def _count(chosen: i32['C'], n: int) -> i32['E']:
    return jnp.sum(chosen[:, None] == jnp.arange(n), axis=0, dtype=jnp.int32)


def rank(chosen: i32['C'], n: int) -> i32['C']:
    """How many earlier choices are for the same expert."""
    order = jnp.argsort(chosen, stable=True)
    sizes = _count(chosen, n)
    first = jnp.cumsum(sizes) - sizes
    ranks = jnp.arange(chosen.shape[0], dtype=jnp.int32) - first[chosen[order]]
    return jnp.zeros_like(chosen).at[order].set(ranks, unique_indices=True)


def _slots(chosen: i32['C'], first: i32['E'], n_slots: int) -> Slots:
    return inverted(first[chosen] + rank(chosen, first.shape[0]), n_slots)


def inverted(of_choice: i32['C'], n_slots: int) -> Slots:
    """`Slots` from the slot of each choice."""
    n_choices = of_choice.shape[0]
    empty = jnp.full((n_slots,), n_choices, jnp.int32)
    choice = empty.at[of_choice].set(jnp.arange(n_choices, dtype=jnp.int32), mode='drop')
    return Slots(of_choice.astype(jnp.int32), choice)
