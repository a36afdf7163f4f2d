"""Experts on other devices: tokens go to them over the axis `e`, and what they make of them comes back. None is dropped.

Letters: T tokens, M d_model, E experts of one device, F feed-forward, G devices along e, N places.
Shapes are static and the router is free, so tokens travel in rounds: in each there are N places from every device to every
other, a quarter more than an even load takes (`ROOM`). With even loads one round is enough; a further one is run only
where some pair has tokens left, as all devices along e agree. So memory is that of even loads whatever the router does, and
an uneven load costs time. (A single exchange that always suffices would take G times the memory.)

For the backward pass nothing is kept but what came in: each round is run again (the token travels once more, and the
first two of its three products are computed once more).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pretrax.model.dispatch import Places, block_length, both_ways, collect, in_blocks, rank, spread, together
from pretrax.shardlib import alike, all_to_all, as_here, axis_size, pmax, scope

ROOM = 1.25


class Plan(NamedTuple):
    """Where each choice goes: device, number among this device's choices for it, expert there. i32[T * k] each."""

    device: Any
    number: Any
    expert: Any


def exchange(forward: Any, k: int, n_experts: int, method: str, x: Any, weight: Any, chosen: Any, weights: Any) -> Any:
    """The weighted sum over each token's experts, as `moe.experts` has it: a partial sum over t.

    Args:
        forward: rows [N, M], their weights [N, 1], groups and `weights` -> rows [N, M]: the feed-forwards, by group.
        k: experts of a token.
        n_experts: on all devices together.
        method: of the products, see `grouped_product`.
        x: [T, M], this device's tokens.
        weight: f32[T, k], the router's.
        chosen: i32[T * k], the numbers of the experts.
        weights: matrices of this device's experts.
    """
    here = n_experts // axis_size('e')
    device = chosen // here
    plan = Plan(device, rank(device, axis_size('e')), chosen % here)
    room = _room(x.shape[0] * k)
    # Along d and c too, so that all devices of a slice run the same program.
    rounds = pmax('d e c', jnp.max(plan.number)) // room + 1
    x, weight, *weights = alike(x, weight, *weights)
    once = as_here(functools.partial(_round, forward, k, here, method, room))  # in the backward pass too
    return _in_rounds(once, rounds, plan, x, weight, weights)


def _room(n_choices: int) -> int:
    """Places from one device to another in a round: a multiple of 8, and not more than there are choices."""
    even = ROOM * n_choices / axis_size('e')
    return min(n_choices, 8 * max(1, round(even / 8 + 0.5)))


def _round(
    forward: Any, k: int, here: int, method: str, room: int, plan: Plan, turn: Any, x: Any, weight: Any, weights: Any
) -> Any:
    """What the experts make of the choices whose turn it is, f32[T, M]."""
    n_devices = axis_size('e')
    number = plan.number - turn * room
    place = jnp.where((number >= 0) & (number < room), plan.device * room + number, n_devices * room)
    leaving = both_ways(place, n_devices * room)
    nobody = leaving.choice == plan.expert.shape[0]
    expert = jnp.where(nobody, here, jnp.take(plan.expert, leaving.choice, mode='clip'))

    rows = _send(spread(k, x, leaving))
    row_weights = _send(spread(1, weight.reshape(-1, 1), leaving))
    local, groups = _by_expert(_send(expert[:, None])[:, 0], here, method)
    made = forward(spread(1, rows, local), spread(1, row_weights, local), groups, weights)
    return collect(k, _return(collect(1, made, local)), leaving).astype(jnp.float32)


def _send(x: Any) -> Any:
    """Rows in the order of the devices they are for -> rows for this device, in the order of those they come from."""
    with scope():  # M is the width of a token, or of what is said of it
        return all_to_all('G N/r/d/c/e M -> G/e N/r/d/c M', x.reshape(axis_size('e'), -1, x.shape[-1]))[0]


def _return(x: Any) -> Any:
    """`_send` undone."""
    with scope():
        x = all_to_all('G/e N/r/d/c M -> G N/r/d/c/e M', x[None], partial='t')
    return x.reshape(-1, x.shape[-1])


def _by_expert(expert: Any, here: int, method: str) -> tuple[Places, Any]:
    """The rows that came in order of their experts. Empty ones have the number `here`, and come last."""
    if method == 'ragged':
        places, sizes = together(expert, here + 1)
        return places, sizes[:here]
    places, groups = in_blocks(expert, here + 1, block_length(expert.shape[0], here))
    return places, jnp.minimum(groups, here - 1)  # zeros, whoever multiplies them


def _in_rounds(once: Any, rounds: Any, plan: Plan, x: Any, weight: Any, weights: Any) -> Any:
    """The sum of `once(plan, turn, x, weight, weights)` over all turns, in x's dtype."""

    @jax.custom_vjp
    def total(rounds: Any, plan: Plan, x: Any, weight: Any, weights: Any) -> Any:
        def add(turn: Any, so_far: Any) -> Any:
            return so_far + once(plan, turn, x, weight, weights)

        return jax.lax.fori_loop(0, rounds, add, jnp.zeros_like(x, jnp.float32)).astype(x.dtype)

    def backward(residuals: tuple[Any, ...], d_out: Any) -> Any:
        rounds, plan, *given = residuals

        def add(turn: Any, so_far: Any) -> Any:
            pullback = jax.vjp(functools.partial(once, plan, turn), *given)[1]
            return jax.tree.map(jnp.add, so_far, list(pullback(d_out.astype(jnp.float32))))

        sums = jax.lax.fori_loop(0, rounds, add, jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), given))
        return None, None, *jax.tree.map(lambda total, x: total.astype(x.dtype), sums, given)

    total.defvjp(lambda *given: (total(*given), given), backward)
    return total(rounds, plan, x, weight, weights)
