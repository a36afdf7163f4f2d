"""`scan` over stacked weights that keeps no gathered weight for the backward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.shardlib.ops import vary
from pretrax.shardlib.replication import varying_axes
from pretrax.shardlib.save import Choice, keep_by_name, recompute_by_name


def scan[X](
    body: Callable[[X, Any], tuple[X, Any]] | Sequence[Callable[[X, Any], tuple[X, Any]]],
    init: X,
    stacked: Any,
    choices: Mapping[str, Choice] | None = None,
) -> tuple[X, Any]:
    """`jax.lax.scan(body, init, stacked)` that keeps the sharded weights for the backward pass, not the gathered ones.

    Args:
        body: maps (carry, one slice of the weights) to (carry, output). A sequence of bodies alternates, one slice
            each: the loop is over groups of slices, followed by any remaining slices.
        init: the initial carry.
        stacked: weights with a leading dimension to loop over.
        choices: the values of the body to keep for the backward pass, as in `recompute_by_name`; None keeps computed
            values and gathers weights again (as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    bodies = [body] if callable(body) else list(body)
    init = match_carry(bodies, init, stacked)
    policy = _was_computed if choices is None else keep_by_name(choices)
    bodies = [jax.checkpoint(one, policy=policy, prevent_cse=False) for one in bodies]
    if len(bodies) == 1:
        return jax.lax.scan(bodies[0], init, stacked)

    count = jax.tree.leaves(stacked)[0].shape[0]
    groups, turns = count // len(bodies), len(bodies)
    looped = jax.tree.map(lambda x: x[: groups * turns].reshape(groups, turns, *x.shape[1:]), stacked)

    def group(carry: X, slices: Any) -> tuple[X, Any]:
        return _in_turn(bodies, carry, slices, turns)

    carry, outputs = jax.lax.scan(group, init, looped)
    outputs = jax.tree.map(lambda x: x.reshape(groups * turns, *x.shape[2:]), outputs)
    if groups * turns == count:
        return carry, outputs
    rest = jax.tree.map(lambda x: x[groups * turns :], stacked)
    carry, last = _in_turn(bodies, carry, rest, count - groups * turns)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, last)


def unroll[X](
    body: Callable[[X, Any], tuple[X, Any]] | Sequence[Callable[[X, Any], tuple[X, Any]]],
    init: X,
    stacked: Any,
    choices: Mapping[str, Choice] | None = None,
) -> tuple[X, Any]:
    """`scan` without a loop in the program. Compilation takes longer, and XLA can optimize across slices.

    If `choices` is None, everything that the backward pass needs is kept, including gathered weights.
    """
    bodies = [recompute_by_name(one, choices) for one in ([body] if callable(body) else body)]
    count = jax.tree.leaves(stacked)[0].shape[0]
    return _in_turn([bodies[i % len(bodies)] for i in range(count)], init, stacked, count)


def _in_turn(bodies: list[Any], carry: Any, slices: Any, count: int) -> tuple[Any, Any]:
    """Runs the first `count` bodies, each on its own slice, and stacks the outputs."""
    outputs = []
    for i, one in enumerate(bodies[:count]):
        with jax.named_scope(f'layer_{i}'):
            carry, output = one(carry, jax.tree.map(lambda x, i=i: x[i], slices))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def match_carry[X](bodies: Sequence[Callable[[X, Any], tuple[X, Any]]], init: X, stacked: Any) -> X:
    """Makes the initial carry vary over the same axes as the bodies' results, which `jax.lax.scan` requires.

    The results vary along the axes over which weights are gathered.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    one = jax.tree.map(lambda x: x[0], stacked)
    before = None
    while before != jax.tree.map(varying_axes, init):
        before = jax.tree.map(varying_axes, init)
        for body in bodies:
            if all(varying_axes(x).issuperset(axes) for x in jax.tree.leaves(init)):
                return init
            carried = jax.eval_shape(lambda x, body=body: body(x, one)[0], init)
            if jax.tree.structure(carried) != jax.tree.structure(init):
                return init  # jax.lax.scan raises the error
            init = jax.tree.map(lambda x, after: vary(x, after.manual_axis_type.varying), init, carried)
    return init


def _was_computed(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a value is the result of a computation, not merely another value moved or rounded, which is cheap to repeat."""
    return primitive.name not in _MOVES


_MOVES = {
    'all_gather', 'broadcast_in_dim', 'claim', 'convert_element_type', 'copy', 'dynamic_slice', 'expand_dims',
    'known_same', 'name', 'pvary', 'reshape', 'settle', 'slice', 'squeeze', 'transpose',
}  # fmt: skip
