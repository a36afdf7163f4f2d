"""What the forward pass names, by name: bytes on each device, read from the traced loss and nothing else."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from ..train.setup import Run
from ..train.step import make_evaluate


def named_bytes(run: Run) -> dict[str, int]:
    """{name: bytes on one device in one forward pass}, of everything that the model gives to `save`, largest first."""
    with jax.set_mesh(run.mesh):
        batch = run.abstract_batch()
        rows = batch.tokens.shape[0] // run.recipe.accumulation
        micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding), batch)
        traced = jax.make_jaxpr(make_evaluate(run.recipe.model))(run.like.weights, micro)
    counts: Counter[str] = Counter()
    for name, size in _named(traced.jaxpr, 1):
        counts[name] += size
    return dict(counts.most_common())


def _named(jaxpr: Any, times: int) -> Iterator[tuple[str, int]]:
    """Inside of a shard_map shapes are those of one device; a scan has its body as often as it turns."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'name':
            value = equation.outvars[0].aval
            yield equation.params['name'], times * value.size * value.dtype.itemsize
        turns = times * equation.params['length'] if equation.primitive.name == 'scan' else times
        for below in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(below):
                yield from _named(getattr(below, 'jaxpr', below), turns)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, 'eqns') or hasattr(getattr(x, 'jaxpr', None), 'eqns')
