"""`scan` over stacked weights that keeps no gathered weight for the backward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pretrax.shardlib.ops import vary
from pretrax.shardlib.replication import varying_axes
from pretrax.shardlib.save import Choice, keep_by_name, recompute_by_name

type Body[X] = Callable[[X, Any], tuple[X, Any]]


def scan[X](
    bodies: Sequence[Body[X]],
    init: X,
    stacked: Any,
    choices: Mapping[str, Choice] | None = None,
    part: Callable[[int, Any], Any] = lambda _, one: one,
) -> tuple[X, tuple[Any, ...]]:
    """`jax.lax.scan` over stacked weights that keeps the sharded weights for the backward pass, not the gathered ones.

    Args:
        bodies: each maps (carry, weights) to (carry, output). They run one after another on each slice of `stacked`.
        init: the initial carry.
        stacked: weights with a leading dimension to loop over.
        choices: the values of the body to keep for the backward pass, as in `recompute_by_name`; None keeps computed
            values and gathers weights again (as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
        part: (i, slice) -> the weights of bodies[i].

    Returns:
        The last carry, and the outputs of each body, stacked.
    """
    policy = _was_computed if choices is None else keep_by_name(choices)
    checkpointed = [jax.checkpoint(body, policy=policy, prevent_cse=False) for body in bodies]

    def turn(carry: X, one: Any) -> tuple[X, tuple[Any, ...]]:
        if len(bodies) == 1:
            carry, output = checkpointed[0](carry, part(0, one))
            return carry, (output,)
        return unroll(checkpointed, carry, [part(i, one) for i in range(len(bodies))])

    return jax.lax.scan(turn, match_carry([turn], init, stacked), stacked)


def unroll[X](
    bodies: Sequence[Body[X]], init: X, weights: Sequence[Any], choices: Mapping[str, Choice] | None = None
) -> tuple[X, tuple[Any, ...]]:
    """Runs each body on its own weights, without a loop in the program. XLA can then optimize across bodies.

    A body that occurs several times is traced once for all weights of the same shapes.

    If `choices` is None, everything that the backward pass needs is kept, including gathered weights.

    Returns:
        The last carry, and the output of each body.
    """
    run = {body: recompute_by_name(body, choices) for body in bodies}
    run |= {body: jax.jit(one, inline=True) for body, one in run.items() if bodies.count(body) > 1}
    carry, outputs = init, []
    for i, (body, own) in enumerate(zip(bodies, weights, strict=True)):
        with jax.named_scope(f'layer_{i}'):
            carry, output = run[body](carry, own)
        outputs.append(output)
    return carry, tuple(outputs)


def match_carry[X](bodies: Sequence[Body[X]], init: X, stacked: Any) -> X:
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
    """Whether a value is computed, and not only moved or rounded, which is cheap to repeat."""
    return primitive.name not in _MOVES


_MOVES = {
    'all_gather',
    'broadcast_in_dim',
    'claim',
    'convert_element_type',
    'copy',
    'dynamic_slice',
    'expand_dims',
    'known_same',
    'name',
    'pvary',
    'reshape',
    'settle',
    'slice',
    'squeeze',
    'transpose',
}
