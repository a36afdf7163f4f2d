"""What the backward pass repeats, against the products in traced steps."""

import math

import jax
import pytest

from pretrax.config import from_values
from pretrax.cost.saved import repeated_products
from pretrax.run.setup import prepare, step_facts
from pretrax.train.step import make_step

VALUES = {
    'name': 'saved', 'steps': 3, 'data': {'name': 'synthetic', 'vocab_size': 256}, 'mesh': {'d': 2},
    'batch': {'tokens': 512, 'sequence_length': 128}, 'optimizer': {'learning_rate': 1e-3},
}  # fmt: skip
LLAMA = {
    'family': 'llama', 'n_layers': 2, 'd_model': 64, 'attention': {'n_heads': 4, 'n_kv_heads': 2},
    'feed_forward': {'d_ff': 192},
}  # fmt: skip
SANDWICH = LLAMA | {'block': {'norms': 'sandwich'}}
TOKENS = 256  # of a device


def traced(model):
    """A run, and the multiply-adds per token of all products of its traced step."""
    run = prepare(from_values(VALUES | {'model': model}), lambda text: None, jax.devices()[:2])
    with jax.set_mesh(run.mesh):
        jaxpr = jax.make_jaxpr(make_step(run.recipe))(run.like, run.abstract_batch())
    return run, multiply_adds(jaxpr.jaxpr) / TOKENS


def multiply_adds(jaxpr, times=1):
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            (summed, _), _ = equation.params['dimension_numbers']
            shape = equation.invars[0].aval.shape
            total += times * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in summed)
        turns = times * equation.params['length'] if equation.primitive.name == 'scan' else times
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns'))
        for part in inner:
            below = getattr(part, 'jaxpr', part)
            total += multiply_adds(below, turns) if hasattr(below, 'eqns') else 0
    return total


@pytest.mark.parametrize(
    ('model', 'save'),
    [
        (LLAMA, 'none'),
        (LLAMA, 'attention'),
        (LLAMA, {'attention': 'keep', 'up': 'offload'}),
        (SANDWICH, 'attention'),
    ],
    ids=str,
)
def test_repeated_products_are_those_of_the_traced_step(model, save):
    """The other step keeps the results of products, and repeats attention if this one does."""
    run, ours = traced(model | {'save': save})
    _, others = traced(model | {'save': 'dots' if save == 'none' else 'full'})
    assert run.recipe.model.arch is not None
    assert sum(repeated_products(run.recipe.model.arch, step_facts(run)).values()) == ours - others
