"""Experts on other devices: tokens travel to them over the axis `e`, and their results come back. No token is dropped.

Letters: T tokens, k experts per token, M d_model, E experts on one device, F feed-forward, G devices along e, N slots.

Shapes are static and the router is free, so tokens travel in rounds. In a round, N slots go from every device to every
other one, a quarter more than an even load needs (`ROOM` in `expert_slots.py`). One round is enough for even loads.
There is another round as long as some pair of devices has tokens left; all devices along e agree on that. So memory is
that of even loads for any routing, and an uneven load costs time. (A single exchange that is always large enough would
take G times the memory.)

The backward pass keeps only the inputs and runs each round again: the token travels once more, and the first two of its
three products are computed once more.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrax.model.dispatch import (
    Slots,
    combine,
    dispatch,
    inverted,
    rank,
    sort_by_expert,
    sort_into_blocks,
)
from pretrax.model.expert_slots import block_length, room_of_round
from pretrax.shardlib import all_to_all, axis_size, bind_scope, f32, i32, num, pmax, scope, vary_together
from pretrax.shardlib.ops import vary

# rows [N, M], their weights [N, 1], groups, weights of the experts -> rows [N, M]: the experts' feed-forwards
FeedForwards = Callable[[jax.Array, jax.Array, jax.Array, Sequence[jax.Array]], jax.Array]


class Destinations(NamedTuple):
    """Where each choice goes."""

    device: i32['C']
    number: i32['C']  # among this device's choices for that device
    expert: i32['C']  # on that device


Round = Callable[[Destinations, jax.Array, jax.Array, jax.Array, Sequence[jax.Array]], jax.Array]


def exchange(
    forward: FeedForwards,
    k: int,
    n_experts: int,
    method: str,
    x: num['T M'],
    weight: f32['T k'],
    chosen: i32['C'],
    weights: Sequence[jax.Array],
) -> num['T M']:
    """The weighted sum over each token's experts, as in `moe.experts`: a partial sum over t.

    Args:
        forward: the feed-forwards of the experts on one device.
        k: experts per token.
        n_experts: on all devices.
        method: of the products, see `grouped_product`.
        x: this device's tokens.
        weight: the router's.
        chosen: the numbers of the experts.
        weights: matrices of this device's experts.
    """
    n_local = n_experts // axis_size('e')
    device = chosen // n_local
    destinations = Destinations(device, rank(device, axis_size('e')), chosen % n_local)
    room = room_of_round(x.shape[0] * k, axis_size('e'))
    # The maximum over d and c too, so that all devices of a slice run the same program. In inference c shards nothing.
    most = vary(jnp.max(destinations.number), ('d', 'e', 'c'))
    rounds = pmax('d e c', most) // room + 1
    x, weight, *weights = vary_together(x, weight, *weights)
    one_round = bind_scope(functools.partial(_round, forward, k, n_local, method, room))  # in the backward pass too
    return _sum_of_rounds(one_round, rounds, destinations, x, weight, weights)


def _round(
    forward: FeedForwards,
    k: int,
    n_local: int,
    method: str,
    room: int,
    destinations: Destinations,
    round_: i32[''],
    x: num['T M'],
    weight: f32['T k'],
    weights: Sequence[jax.Array],
) -> f32['T M']:
    """The results of the choices that travel in this round."""
    n_devices = axis_size('e')
    number = destinations.number - round_ * room
    slot = jnp.where((number >= 0) & (number < room), destinations.device * room + number, n_devices * room)
    leaving = inverted(slot, n_devices * room)
    is_empty = leaving.choice == destinations.expert.shape[0]
    expert = jnp.where(is_empty, n_local, jnp.take(destinations.expert, leaving.choice, mode='clip'))

    rows = _send(dispatch(k, x, leaving))
    row_weights = _send(dispatch(1, weight.reshape(-1, 1), leaving))
    local, groups = _by_expert(_send(expert[:, None])[:, 0], n_local, method)
    results = forward(dispatch(1, rows, local), dispatch(1, row_weights, local), groups, weights)
    return combine(k, _send_back(combine(1, results, local)), leaving).astype(jnp.float32)


def _send(x: num['N M']) -> num['N M']:
    """Rows ordered by their destination device -> rows for this device, ordered by their source device."""
    with scope():  # M is the width of what is sent
        return all_to_all('G N/r/d/c/e M -> G/e N/r/d/c M', x.reshape(axis_size('e'), -1, x.shape[-1]))[0]


def _send_back(x: num['N M']) -> num['N M']:
    """The inverse of `_send`."""
    with scope():
        x = all_to_all('G/e N/r/d/c M -> G N/r/d/c/e M', x[None], partial='t')
    return x.reshape(-1, x.shape[-1])


def _by_expert(expert: i32['N'], n_local: int, method: str) -> tuple[Slots, jax.Array]:
    """The received rows, sorted by expert. Empty rows have the number `n_local` and come last."""
    if method == 'ragged':
        slots, sizes = sort_by_expert(expert, n_local + 1)
        return slots, sizes[:n_local]
    slots, groups = sort_into_blocks(expert, n_local + 1, block_length(expert.shape[0], n_local, method))
    return slots, jnp.minimum(groups, n_local - 1)  # empty rows are zeros, so any expert may multiply them


def _sum_of_rounds(
    one_round: Round,
    rounds: i32[''],
    destinations: Destinations,
    x: num['T M'],
    weight: f32['T k'],
    weights: Sequence[jax.Array],
) -> num['T M']:
    """The sum over all rounds, in x's dtype."""

    @jax.custom_vjp
    def total(
        rounds: i32[''], destinations: Destinations, x: num['T M'], weight: f32['T k'], weights: Sequence[jax.Array]
    ) -> num['T M']:
        def add(round_: i32[''], so_far: f32['T M']) -> f32['T M']:
            return so_far + one_round(destinations, round_, x, weight, weights)

        return jax.lax.fori_loop(0, rounds, add, jnp.zeros_like(x, jnp.float32)).astype(x.dtype)

    def backward(residuals: tuple, d_out: num['T M']) -> tuple:
        rounds, destinations, *given = residuals

        def add(round_: i32[''], so_far: list) -> list:
            pullback = jax.vjp(functools.partial(one_round, destinations, round_), *given)[1]
            return jax.tree.map(jnp.add, so_far, list(pullback(d_out.astype(jnp.float32))))

        sums = jax.lax.fori_loop(0, rounds, add, jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), given))
        return None, None, *jax.tree.map(lambda total, x: total.astype(x.dtype), sums, given)

    total.defvjp(lambda *given: (total(*given), given), backward)
    return total(rounds, destinations, x, weight, weights)
