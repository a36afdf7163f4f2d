"""Named activations of the forward pass and their bytes per device, from the traced loss."""

from collections.abc import Iterator
from typing import Any

import jax

from pretrax.run.setup import Run
from pretrax.train.evaluate import make_evaluate


def named_bytes(run: Run) -> dict[str, tuple[int, int]]:
    """{name: (bytes per device in one forward pass,
    bytes of the largest array)} of the arrays that the model names with `save`.
    """
    with jax.set_mesh(run.mesh):
        batch = run.abstract_batch()
        rows = batch.tokens.shape[0] // run.recipe.accumulation
        micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding), batch)
        traced = jax.make_jaxpr(make_evaluate(run.recipe.model))(run.like.weights, micro)
    found: dict[str, tuple[int, int]] = {}
    for name, one, times in _named(traced.jaxpr, 1):
        total, largest = found.get(name, (0, 0))
        found[name] = total + times * one, max(largest, one)
    return found


def _named(jaxpr: Any, times: int) -> Iterator[tuple[str, int, int]]:
    """(name, bytes, count). Shapes inside a shard_map are per device; the body of a scan counts once per iteration."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'name':
            value = equation.outvars[0].aval
            yield equation.params['name'], value.size * value.dtype.itemsize, times
        turns = times * equation.params['length'] if equation.primitive.name == 'scan' else times
        for below in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(below):
                yield from _named(getattr(below, 'jaxpr', below), turns)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, 'eqns') or hasattr(getattr(x, 'jaxpr', None), 'eqns')
