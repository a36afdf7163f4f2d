"""The TPU kernel computes what the plain one does: run by Pallas's interpreter on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

from pretrax.model.architecture import Scores
from pretrax.model.attention import attend
from pretrax.model.attention_kernels import Kernel
from pretrax.shardlib import f32, i32, typed_shard_map
from small import mesh_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kv_heads', 'scores'), [(4, Scores(8.0, 0.0, 0)), (2, Scores(8.0, 0.0, 0)), (2, Scores(5.0, 1.5, 50))]
)
def test_splash_equals_blockwise_in_value_and_gradient(monkeypatch, kv_heads, scores):
    interpreted = functools.partial(splash.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(splash, 'make_splash_mha_single_device', interpreted)
    random = np.random.default_rng(0)
    q = random.normal(size=(2, 256, 4, 64)).astype(np.float32)
    k, v = random.normal(size=(2, 2, 256, kv_heads, 64)).astype(np.float32)
    weigh = random.normal(size=q.shape).astype(np.float32)
    segments = np.sort(random.integers(1, 4, (2, 256)), axis=1).astype(np.int32)

    def outcome(name):
        @typed_shard_map
        def run(
            q: f32['B/r/d/e L H/t D'],
            k: f32['B/r/d/e L K/t D'],
            v: f32['B/r/d/e L K/t D'],
            segments: i32['B/r/d/e L'],
        ) -> f32['B/r/d/e L H/t D']:
            return attend(q, k, v, segments, Kernel(name, 'test', 3), scores)

        def loss(q, k, v):
            out = run(q, k, v, segments)
            return jnp.sum(out * weigh), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    with jax.set_mesh(mesh_of(d=2, t=2)):
        ((_, out), gradients), ((_, plain_out), plain_gradients) = outcome('splash'), outcome('blockwise')
    np.testing.assert_allclose(out, plain_out, rtol=2e-3, atol=2e-3)
    for ours, plain in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=5e-3, atol=5e-3)
