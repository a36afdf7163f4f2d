"""The state of a run: its shapes, where its arrays lie, and what the seed chooses."""

import math
import re

import jax
import numpy as np
import pytest

from bigram import assert_identical, recipe
from pretrax.train import optimizer
from pretrax.train.state import abstract_state, init_state
from small import LLAMA, mesh_of, transformer


def test_moments_lie_where_their_weights_lie():
    with jax.set_mesh(mesh_of(2, 2, 2)):
        rule = recipe(transformer(LLAMA, mesh_of(2, 2, 2)), optimizer.adamw())
        like = abstract_state(rule)
    weights = jax.tree.map(lambda x: (x.shape, x.sharding), like.weights)
    assert jax.tree.map(lambda x: (x.shape, x.sharding), like.optimizer.mu) == weights
    assert jax.tree.map(lambda x: (x.shape, x.sharding), like.optimizer.nu) == weights
    assert like.weights.layers.attention.q.sharding.spec == jax.sharding.PartitionSpec('p', 'd', 't', None)


def test_a_state_has_the_shape_that_it_promises():
    with jax.set_mesh(mesh_of(2, 2, 1)):
        rule = recipe(direction=optimizer.adamw())
        like, state = abstract_state(rule), init_state(rule, 0)
    describe = lambda x: (x.shape, x.dtype, x.sharding)  # noqa: E731
    assert jax.tree.map(describe, like) == jax.tree.map(describe, state)


def test_the_seed_chooses_the_weights():
    with jax.set_mesh(mesh_of()):
        one, same, other = (jax.device_get(init_state(recipe(), seed).weights) for seed in (1, 1, 2))
    assert_identical(one, same)
    assert not np.array_equal(one.table, other.table)


def test_no_device_holds_more_than_its_slice_of_a_fresh_state(monkeypatch):
    """In the program that makes it on 8 devices: slices come out, and no array in it is a whole matrix."""
    model = transformer(LLAMA | {'d_model': 256, 'd_ff': 1024}, mesh_of(d=8), vocab_size=4096)
    of_adam = recipe(model, optimizer.adamw())
    programs, jit = [], jax.jit

    def kept(function, **options):
        def call(*arguments):
            programs.append(jit(function, **options).lower(*arguments).compile())
            return programs[-1](*arguments)

        return call

    with jax.set_mesh(mesh_of(d=8)):
        like = abstract_state(of_adam)
        monkeypatch.setattr(jax, 'jit', kept)
        state = init_state(of_adam, 0)
    (program,) = programs
    jax.tree.map(
        lambda x, want: x.sharding.is_equivalent_to(want.sharding, x.ndim) or pytest.fail(str(want)), state, like
    )
    dims = re.findall(r'f32\[([\d,]+)\]', program.as_text())
    assert (
        max(math.prod(map(int, d.split(','))) for d in dims) == max(x.size for x in jax.tree.leaves(state.weights)) // 8
    )
    stats, whole = program.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(state))
    assert stats.output_size_in_bytes < 1.01 * whole / 8
    assert stats.temp_size_in_bytes < whole / 8
