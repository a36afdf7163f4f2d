"""Sums of gradients over micro-batches, and over the devices that have copies of a weight."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.hlo.parse import collectives
from pretrax.train.step import make_gradients
from small import LLAMA, mesh_of, random_batch, random_weights, transformer

ROWS = 8


@pytest.mark.parametrize(('accumulation', 'in_the_loop'), [(1, True), (2, False)])
def test_the_sum_over_r_is_that_of_slices_and_of_each_layer_in_a_step_of_one_pass(accumulation, in_the_loop):
    """A device sends its slice of each matrix's gradient over r once; never the whole gradient, or one of each pass."""
    mesh = mesh_of(r=2, d=2)
    with jax.set_mesh(mesh):
        model = transformer(LLAMA | {'n_layers': 3, 'layers': 'scan'}, mesh)
        like = model.abstract()
        program = jax.jit(make_gradients(model, accumulation)).lower(like, random_batch(ROWS)).compile()
    over_r = [one for one in collectives(program.as_text(), dict(mesh.shape)) if one.axes == ('r',)]
    matrices = [w.size for w in jax.tree.leaves(like.layers) if w.ndim > 2]
    tables = [w.size for w in (like.embed, like.unembed) if w is not None]
    assert sum(one.times * one.bytes for one in over_r) == 4 * sum(matrices + tables) / 2
    assert any(one.times == 3 for one in over_r) == in_the_loop


def reduced_in_bf16(mesh, **options):
    model = transformer(LLAMA | {'layers': 'scan'} | options, mesh, micro_batches=mesh.shape['p'])
    model.plan = dataclasses.replace(model.plan, reduction='bf16')
    return model


@pytest.mark.parametrize(('accumulation', 'stages', 'in_the_loop'), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_gradients_are_sent_over_r_in_bf16_if_asked(accumulation, stages, in_the_loop):
    """In the program before XLA's optimizations: XLA for CPUs sums bf16 in f32."""
    mesh = mesh_of(r=2, d=2, p=stages)
    with jax.set_mesh(mesh):
        model = reduced_in_bf16(mesh, n_layers=4, pipeline_schedule='1f1b' if stages > 1 else 'auto')
        like = model.abstract()
        program = jax.jit(make_gradients(model, accumulation)).lower(like, random_batch(ROWS)).compiler_ir('hlo')
    sent = [one for one in collectives(program.as_hlo_text(), dict(mesh.shape)) if 'r' in one.axes and one.bytes > 4]
    on_a_device = sum(math.prod(w.sharding.shard_shape(w.shape)) for w in jax.tree.leaves(like))
    assert {one.axes for one in sent} == {('r',)}
    assert sum(one.times * one.bytes for one in sent) == 2 * on_a_device
    assert any(one.times > 1 for one in sent) == in_the_loop


@pytest.mark.parametrize('accumulation', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sum_in_bf16_rounds_the_gradient_of_each_replica_once(accumulation):
    batch = random_batch(ROWS)
    halves = [jax.tree.map(lambda x: x[:4], batch), jax.tree.map(lambda x: x[4:], batch)]

    def gradient(mesh, batch):
        with jax.set_mesh(mesh):
            model = reduced_in_bf16(mesh, n_layers=2)
            return jax.device_get(jax.jit(make_gradients(model, accumulation))(random_weights(model), batch)[0])

    ours = gradient(mesh_of(r=2, d=2), batch)
    first, second = (
        jax.tree.map(lambda g, half=half: g * (half.mask.sum() / batch.mask.sum()), gradient(mesh_of(d=2), half))
        for half in halves
    )
    for g, a, b in zip(*map(jax.tree.leaves, (ours, first, second)), strict=True):
        rounded = (a.astype(jnp.bfloat16) + b.astype(jnp.bfloat16)).astype(np.float32)
        assert np.array_equal(g, g.astype(jnp.bfloat16).astype(np.float32))
        assert (
            np.mean(g == rounded) > 0.98
        )  # the gradients themselves differ by f32's rounding, here and there across an edge
        assert np.all(np.abs(g - rounded) <= 2**-7 * (np.abs(a) + np.abs(b)))
