"""The kernels for GPUs and TPUs compute attention, as Pallas interprets them, and are chosen where they can run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pretrax.infer.cached
from pretrax.infer.cache import Pages
from pretrax.infer.generate import generate
from pretrax.infer.kernels import Kernel, attention, choose_kernel
from pretrax.infer.programs import programs_of
from pretrax.model.options.attention import AttentionOptions
from pretrax.model.scores import Scores
from small import LLAMA, mesh_of, random_weights, transformer

KERNELS = [Kernel('pallas-tpu', 'as wanted', interpret=True), Kernel('pallas-gpu', 'as wanted', interpret=True)]
PAGE, PAGES, BLOCKS = 16, 30, 9


def by_name(kernel):
    return kernel.name


def random_cache(heads, d_head, dtype):
    k, v = np.random.default_rng(0).normal(size=(2, heads, PAGES, PAGE, d_head))
    return Pages(jnp.array(k, dtype), jnp.array(v, dtype), None, None)


def expected(q, pages, table, positions, scores):
    """Softmax in f64, row by row."""
    rows, _, heads, d_head = q.shape
    out = np.zeros(q.shape)
    for row in range(rows):
        length = positions[row, 0] + 1
        for head in range(heads):
            of = head * pages.k.shape[0] // heads
            k, v = (np.float64(x[of, table[row]]).reshape(-1, d_head)[:length] for x in (pages.k, pages.v))
            score = k @ np.float64(q[row, 0, head]) / scores.divisor
            if scores.softcap:
                score = scores.softcap * np.tanh(score / scores.softcap)
            p = np.exp(score - score.max(initial=-np.inf))
            out[row, 0, head] = (p / p.sum()) @ v if length else 0
    return out


@pytest.mark.parametrize('kernel', KERNELS, ids=by_name)
@pytest.mark.parametrize(
    ('heads', 'kv_heads', 'softcap'), [(4, 2, 0.0), (2, 2, 3.0), pytest.param(8, 1, 0.0, marks=pytest.mark.nightly)]
)
def test_kernels_compute_attention_to_the_cache(kernel, heads, kv_heads, softcap):
    """Rows that end in the middle of a page, at its first and at its last token; one row is idle."""
    rng = np.random.default_rng(1)
    positions = np.array([[0], [37], [-1], [15], [PAGE * BLOCKS - 1], [16]], np.int32)
    q = rng.normal(size=(len(positions), 1, heads, 128)).astype(np.float32)
    table = rng.integers(1, PAGES, (len(positions), BLOCKS)).astype(np.int32)
    table[2] = 0
    dtype = {'pallas-tpu': jnp.bfloat16, 'pallas-gpu': jnp.float32}[kernel.name]  # of keys and values
    pages, scores = random_cache(kv_heads, 128, dtype), Scores(7.0, softcap, 0)
    found = jax.jit(functools.partial(attention, kernel, scores=scores))(q, pages, table, positions)
    np.testing.assert_allclose(found, expected(q, pages, table, positions, scores), atol=2e-5)


def test_the_kernel_for_gpus_reads_an_int8_cache():
    rng = np.random.default_rng(2)
    scales = rng.uniform(0.01, 0.1, (2, 2, PAGES, PAGE)).astype(np.float32)
    stored = rng.integers(-127, 128, (2, 2, PAGES, PAGE, 64)).astype(np.int8)
    q = rng.normal(size=(3, 1, 4, 64)).astype(np.float32)
    positions = np.array([[5], [100], [64]], np.int32)
    table = rng.integers(1, PAGES, (3, BLOCKS)).astype(np.int32)
    scores = Scores(8.0, 0.0, 0)
    found = attention(KERNELS[1], q, Pages(*stored, *scales), table, positions, scores)
    exact = Pages(*(stored * scales[..., None]), None, None)
    np.testing.assert_allclose(found, expected(q, exact, table, positions, scores), atol=1e-4)


@pytest.mark.parametrize('kernel', KERNELS, ids=by_name)
@pytest.mark.parametrize(('columns', 'window', 'fused'), [(1, 0, True), (3, 0, False), (1, 20, False)])
def test_chunks_and_windows_run_in_plain_jax(kernel, columns, window, fused):
    positions = np.arange(2 * columns, dtype=np.int32).reshape(2, columns) % columns
    q, table = jnp.zeros((2, columns, 4, 128), jnp.bfloat16), np.zeros((2, BLOCKS), np.int32)
    run = functools.partial(attention, kernel, scores=Scores(1.0, 0.0, window))
    assert ('pallas_call' in str(jax.make_jaxpr(run)(q, random_cache(2, 128, jnp.bfloat16), table, positions))) == fused


@pytest.mark.slow  # an interpreter
def test_text_is_the_same_by_a_kernel(monkeypatch):
    """With heads sharded over t. The first prompt is shorter than a page, the second one longer than two."""
    mesh = mesh_of(d=2, t=2)
    model = transformer(LLAMA | {'d_head': 128, 'n_layers': 1}, mesh)
    weights = random_weights(model)
    with jax.set_mesh(mesh):
        weights = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
    texts = []
    for kernel in Kernel('plain', 'as wanted'), KERNELS[0]:
        monkeypatch.setattr(pretrax.infer.cached, 'choose_kernel', lambda *_, kernel=kernel, **__: kernel)
        programs_of.cache_clear()
        texts.append(generate(model, weights, [[1, 2, 3], list(range(40))], tokens=12, temperature=0))
    programs_of.cache_clear()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ('choices', 'chosen'),
    [
        ({'platform': 'cpu'}, 'plain (no kernel for cpu)'),
        ({'platform': 'tpu'}, 'pallas-tpu (the kernel for tpu)'),
        ({'platform': 'cuda'}, 'pallas-gpu (the kernel for cuda)'),
        ({'platform': 'gpu', 'windows': True}, 'pallas-gpu (the kernel for gpu; plain in layers with a window)'),
        ({'platform': 'gpu', 'kind': 'int8', 'd_head': 64}, 'pallas-gpu (the kernel for gpu)'),
        ({'platform': 'tpu', 'dtype': jnp.float32, 'kind': 'bf16'}, 'pallas-tpu (the kernel for tpu)'),
        ({'platform': 'tpu', 'dtype': jnp.float32}, 'it reads the cache in bf16, not in float32'),
        ({'platform': 'tpu', 'd_head': 64}, 'it needs d_head to be a multiple of 128, not 64'),
        ({'platform': 'tpu', 'page': 8}, 'it needs pages of a multiple of 16 tokens, not 8'),
        ({'platform': 'tpu', 'kind': 'int8'}, 'it does not read our int8 cache'),
        ({'platform': 'tpu', 'kind': 'fp8'}, 'it does not read our fp8 cache'),
        ({'platform': 'gpu', 'dtype': jnp.float16, 'kind': 'bf16'}, 'it does not read our bf16 cache in float16'),
        ({'platform': 'gpu', 'dtype': jnp.float32}, 'it computes in bf16 or f16, not float32'),
        ({'platform': 'gpu', 'd_head': 96}, 'it needs d_head to be a power of 2 from 16 to 256, not 96'),
        ({'platform': 'gpu', 'page': 24}, 'it needs pages of a power of 2 tokens up to 128, not 24'),
        ({'platform': 'gpu', 'kind': 'fp8'}, 'it does not read our fp8 cache in bfloat16'),
    ],
)
def test_a_kernel_is_chosen_where_it_can_run(choices, chosen):
    usual = {'dtype': jnp.bfloat16, 'd_head': 128, 'page': 16, 'kind': 'compute', 'windows': False}
    kernel = choose_kernel(**(usual | choices), options=AttentionOptions())
    if chosen.startswith('it '):
        chosen = f'plain (SLOW: not pallas-{choices["platform"]}, because {chosen})'
    assert str(kernel) == chosen
