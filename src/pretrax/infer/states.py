"""States of sequences: what a layer with a state keeps in the place of keys and values, a row for each slot.

A state has seen every token of its sequence once and cannot go back. So tokens are read in order and once, a prompt
that begins like another one is read again, and no tokens are proposed.

Letters: R rows, C columns (tokens of a row); see also model/recurrent.py.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pretrax.model.layer_spec import LayerSpec
from pretrax.model.recurrent import RecurrentWeights, State, mix, projections, state_output
from pretrax.shardlib import i32, num, scope


def read_into_states(
    h: num['B/r/d/e L/c/t M'],
    w: RecurrentWeights,
    states: State,
    slot: i32['R/r/d/e'],
    positions: i32['R/r/d/e C'],
    layer: LayerSpec,
) -> tuple[num['B/r/d/e L/c/t M'], State]:
    """What a layer with a state adds to the residual stream, and the states after the tokens.

    Args:
        h: the tokens of all rows, as one row.
        w: weights of the layer.
        states: of every slot.
        slot: of each row. If there are as many rows as slots, row i is slot i.
        positions: of each token in its sequence, ascending. 0 begins a sequence, with an empty state; -1: padding after
            the tokens of a row, which changes no state.
        layer: the kind of the layer.
    """
    x = projections(h, w, layer)
    with scope():  # here a row is a sequence
        rows = jax.tree.map(lambda a: a.reshape(*positions.shape, *a.shape[2:]), x)
        real = (positions >= 0)[..., None]
        steps = jnp.where(real, rows.a, -jnp.inf)  # of size 0
        beta = None if rows.beta is None else jnp.where(real, rows.beta, -jnp.inf)
        rows = dataclasses.replace(rows, a=steps, beta=beta)
        every = positions.shape[0] == states.state.shape[0]
        begins = (positions[:, 0] == 0)[:, None, None, None]
        before = jax.tree.map(lambda a: jnp.where(begins, 0, a if every else a[slot]), states)
        y, state = mix(rows, w, jnp.ones_like(positions), layer, before)
        count = jnp.sum(real, axis=1)  # [R, 1]

        def last(before: jax.Array, here: jax.Array) -> jax.Array:
            at = count + jnp.arange(before.shape[1])
            tokens = jnp.concatenate([before, here.astype(before.dtype)], axis=1)
            return jnp.take_along_axis(tokens, at[..., None, None], axis=1)

        after = State(last(before.q, rows.q), last(before.k, rows.k), last(before.v, rows.v), state)
        if not every:
            after = jax.tree.map(lambda a, one: a.at[slot].set(one), states, after)
    return state_output(y.reshape(x.v.shape), x.z, w, layer), after
