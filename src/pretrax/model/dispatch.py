"""Where the rows of an expert's product come from, and where its results go back to.

Letters: T tokens, C choices (token t's k-th expert is choice t * k + j), E experts, N places: rows of a matrix in which
the tokens of one expert stand together. All of it is on one device. Both ways are gathers, also in the backward pass,
since each says from where a row comes; a scatter-add would be slow and, on some hardware, not reproducible.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Places(NamedTuple):
    """A table of who stands where, and where who stands. Nobody: the number of choices; dropped: the number of places."""

    of_choice: Any  # i32[C]
    choice: Any  # i32[N]


def together(chosen: Any, n_experts: int) -> tuple[Places, Any]:
    """Each expert's tokens one after the other, no room between. i32[C] -> places, i32[E] how many tokens each has."""
    sizes = _count(chosen, n_experts)
    return _place(chosen, jnp.cumsum(sizes) - sizes, chosen.shape[0]), sizes


def in_blocks(chosen: Any, n_experts: int, length: int) -> tuple[Places, Any]:
    """Each expert's tokens begin a new block of `length` places. i32[C] -> places, i32[blocks] whose each block is."""
    n_choices = chosen.shape[0]
    # Not more than this, however they choose: each expert that is chosen leaves at most length - 1 places empty.
    n_blocks = (n_choices + min(n_experts, n_choices) * (length - 1)) // length
    blocks = -(-_count(chosen, n_experts) // length)
    ends = jnp.cumsum(blocks)
    places = _place(chosen, (ends - blocks) * length, n_blocks * length)
    expert = jnp.sum(jnp.arange(n_blocks)[:, None] >= ends, axis=1)
    return places, jnp.minimum(expert, n_experts - 1).astype(jnp.int32)  # blocks left over are empty


def within_capacity(chosen: Any, n_experts: int, capacity: int) -> Places:
    """Every expert has `capacity` places in each row; who comes later is dropped. i32[B, C] -> places of B E capacity.

    Tokens come in their order, so that what is dropped depends on nothing that follows.
    """
    rows, n_choices = chosen.shape
    n_places = rows * n_experts * capacity
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    own = chosen + n_experts * row  # every row has experts of its own
    number = rank(own.reshape(-1), rows * n_experts).reshape(rows, n_choices)
    of_choice = jnp.where(number < capacity, own * capacity + number, n_places).reshape(-1)
    return both_ways(of_choice, n_places)


def block_length(n_choices: int, n_experts: int) -> int:
    """Rows of one product: a power of two, small enough that about a tenth of the places stay empty."""
    even = max(1, n_choices // n_experts)
    return max(8, min(512, 1 << max(0, (even // 4).bit_length() - 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(k: int, x: Any, places: Places) -> Any:
    """The row of its token, x[T, M], at each place [N, M]; zeros where nobody stands. A token has k choices."""
    return _rows(x, places.choice // k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collect(k: int, y: Any, places: Places) -> Any:
    """The sum of the rows y[N, M] of each token's places [T, M], in f32 and rounded to y's dtype. `spread` transposed."""
    of_token = places.of_choice.reshape(-1, k)
    parts = [_rows(y, of_token[:, j]).astype(jnp.float32) for j in range(k)]
    return functools.reduce(jnp.add, parts).astype(y.dtype)


spread.defvjp(lambda k, x, places: (spread(k, x, places), places), lambda k, places, dy: (collect(k, dy, places), None))
collect.defvjp(
    lambda k, y, places: (collect(k, y, places), places), lambda k, places, dx: (spread(k, dx, places), None)
)


def _rows(x: Any, index: Any) -> Any:
    """Rows of x, zeros for an index past its end."""
    return jnp.take(x, index, axis=0, mode='fill', fill_value=0)


def _count(chosen: Any, n: int) -> Any:
    return jnp.sum(chosen[:, None] == jnp.arange(n), axis=0, dtype=jnp.int32)


def rank(chosen: Any, n: int) -> Any:
    """How many choices before each one are for the same expert."""
    order = jnp.argsort(chosen, stable=True)
    sizes = _count(chosen, n)
    first = jnp.cumsum(sizes) - sizes
    ranks = jnp.arange(chosen.shape[0], dtype=jnp.int32) - first[chosen[order]]
    return jnp.zeros_like(chosen).at[order].set(ranks, unique_indices=True)


def _place(chosen: Any, first: Any, n_places: int) -> Places:
    return both_ways(first[chosen] + rank(chosen, first.shape[0]), n_places)


def both_ways(of_choice: Any, n_places: int) -> Places:
    """Places from where each choice stands; nobody stands at one past the last."""
    n_choices = of_choice.shape[0]
    nobody = jnp.full((n_places,), n_choices, jnp.int32)
    choice = nobody.at[of_choice].set(jnp.arange(n_choices, dtype=jnp.int32), mode='drop')
    return Places(of_choice.astype(jnp.int32), choice)
