"""`scan` over stacked weights, for which no gathered weight is kept until the backward pass."""

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
    """`jax.lax.scan(body, init, stacked)` that holds on to the slices of the weights, not to the gathered weights.

    Args:
        body: carry, one slice of the weights -> carry, output. Several take turns, one slice each: the loop then goes
            over groups of slices, and those that are left for no whole group come after it.
        init: the first carry.
        stacked: weights with a leading dimension to loop over.
        choices: what of the body is kept for the backward pass, as in `recompute_by_name`; None keeps what was
            computed and gathers again (as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    bodies = [body] if callable(body) else list(body)
    init = as_carried(bodies, init, stacked)
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
    """`scan` without a loop in the program: it compiles longer, and XLA may join what the slices do.

    With None for `choices` everything is kept that the backward pass needs, gathered weights too.
    """
    bodies = [recompute_by_name(one, choices) for one in ([body] if callable(body) else body)]
    count = jax.tree.leaves(stacked)[0].shape[0]
    return _in_turn([bodies[i % len(bodies)] for i in range(count)], init, stacked, count)


def _in_turn(bodies: list[Any], carry: Any, slices: Any, count: int) -> tuple[Any, Any]:
    """The first `count` bodies, each on its own slice; the outputs are stacked."""
    outputs = []
    for i, one in enumerate(bodies[:count]):
        carry, output = one(carry, jax.tree.map(lambda x, i=i: x[i], slices))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def as_carried[X](bodies: Sequence[Callable[[X, Any], tuple[X, Any]]], init: X, stacked: Any) -> X:
    """The first carry of a loop, varying for JAX as the bodies' results do, which `jax.lax.scan` asks for.

    They vary along the axes of gathered weights.
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
                return init  # jax.lax.scan says so
            init = jax.tree.map(lambda x, after: vary(x, after.manual_axis_type.varying), init, carried)
    return init


def _was_computed(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a value is more than another one moved or rounded: those are made again from what is kept."""
    return primitive.name not in _MOVES


_MOVES = {
    'all_gather', 'broadcast_in_dim', 'claim', 'convert_element_type', 'copy', 'dynamic_slice', 'expand_dims',
    'known_same', 'name', 'pvary', 'reshape', 'settle', 'slice', 'squeeze', 'transpose',
}  # fmt: skip
