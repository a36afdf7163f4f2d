"""What the forward pass names, by name: bytes on each device, read from the traced loss and nothing else."""

from collections.abc import Iterator
from typing import Any

import jax

from pretrax.run.setup import Run
from pretrax.train.step import make_evaluate


def named_bytes(run: Run) -> dict[str, tuple[int, int]]:
    """{name: bytes on one device, in one forward pass and of the largest array}, of all that the model gives to `save`."""
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
    """(name, bytes, how often). Inside of a shard_map shapes are those of one device; a scan has its body as often as it turns."""
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
