"""Statistics of layers, by a forward pass in plain jax.numpy that keeps every intermediate value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import reference
from parallel.cases import MODELS
from pretrax.model.statistics import forward_statistics
from pretrax.train.validation import make_evaluate
from small import GPT2, LENGTH, LLAMA, MIXTURE, mesh_of, random_batch, random_weights, transformer

slow, nightly = (functools.partial(pytest.param, marks=mark) for mark in (pytest.mark.slow, pytest.mark.nightly))

ROWS = 2
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def statistics(options, mesh=None, *, length=LENGTH, accumulation=1, micro_batches=1, batch=None):
    """All statistics by name, on the host."""
    mesh = mesh or mesh_of()
    model = transformer(options, mesh, length=length, micro_batches=micro_batches)
    batch = random_batch(ROWS, length=length) if batch is None else batch
    rows = len(batch.tokens)
    if model.column_order is not None:
        batch = jax.tree.map(lambda x: x[:, model.column_order], batch)

    def forward(weights, batch, sources):
        return forward_statistics(model, accumulation, 2, weights, batch, sources)

    with jax.set_mesh(mesh):
        weights = random_weights(model)
        arguments = weights, batch, np.arange(rows, dtype=np.int32) % 2
        whole = NamedSharding(mesh, PartitionSpec())
        program = jax.jit(forward, out_shardings=whole).lower(*arguments).compile(compiler_options=QUICK)
        return jax.device_get(program(*arguments))


def by_hand(options, length=LENGTH, batch=None):
    """The same, from whole arrays of intermediate values. Token by token only what counts is kept."""
    model = transformer(options, length=length)
    arch, w = model.arch, jax.tree.map(jnp.asarray, random_weights(model))
    batch = random_batch(ROWS, length=length) if batch is None else batch
    columns = np.arange(length)
    counts = columns <= np.where(batch.mask > 0, columns, -1).max(axis=1, keepdims=True)
    queries = columns[max(1, length // 32) - 1 :: max(1, length // 32)]
    found = {name: [] for name in ('residual', 'attention', 'feed_forward', 'entropy', 'score', 'unit', 'expert')}
    learned = 0 if w.positions is None else w.positions[batch.positions]
    xs = list(w.embed[batch.tokens] + learned)
    for i in range(arch.n_layers):
        layer = reference.layer_of(w.layers, i, arch)
        here = {name: [] for name in found}
        for row, x in enumerate(xs):
            real, segments, positions = counts[row], batch.segments[row], batch.positions[row]
            normed = reference.norm(x, layer.norm1, layer.norm1_bias, arch)
            attended = reference.attention(normed, layer, segments, positions, arch)
            h = reference.norm(x + attended, layer.norm2, layer.norm2_bias, arch)
            if reference.has_experts(i, arch):
                out, (_, _, chosen) = reference.mixture(h, layer, arch)
                here['expert'].append(np.asarray(chosen)[real])
            else:
                out = reference.feed_forward(h, layer, arch)
                bias = 0 if layer.up_bias is None else layer.up_bias
                here['unit'].append(
                    np.asarray(h @ layer.gate if arch.feed_forward.gated else h @ layer.up + bias)[real]
                )
            xs[row] = x = x + attended + out
            for name, value in (('residual', x), ('attention', attended), ('feed_forward', out)):
                here[name].append(np.asarray(value)[real])
            entropies, largest = [], []
            for head in range(arch.attention.n_heads):
                kv = head // (arch.attention.n_heads // arch.attention.n_kv_heads)
                q = normed @ layer.q[:, head] + (0 if layer.q_bias is None else layer.q_bias[head])
                k = normed @ layer.k[:, kv] + (0 if layer.k_bias is None else layer.k_bias[kv])
                if arch.positions == 'rope':
                    q = reference.rope(q, positions, arch.rope.base)
                    k = reference.rope(k, positions, arch.rope.base)
                scores = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T / np.sqrt(arch.attention.d_head)
                seen = [
                    scores[query, (columns <= query) & (segments == segments[query])]
                    for query in queries[real[queries]]
                ]
                p = [np.exp(score - score.max()) / np.exp(score - score.max()).sum() for score in seen]
                entropies.append([-(one * np.log(one)).sum() for one in p])
                largest.append([score.max() for score in seen])
            here['entropy'].append(np.transpose(entropies))
            here['score'].append(np.transpose(largest))
        for name, values in here.items():
            found[name].append(np.concatenate(values) if values else None)
    logits = np.asarray(
        reference.logits(w, batch.tokens, batch.segments, batch.positions, arch)[..., : arch.vocab_size], np.float64
    )
    log_z = np.log(np.exp(logits).sum(-1))
    nll = log_z - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    source = np.broadcast_to(np.arange(ROWS)[:, None] % 2, nll.shape)
    bins = batch.positions * 16 // length

    def mean(values, where):
        weight = batch.mask * where
        return (values * weight).sum() / weight.sum() if weight.sum() else np.nan

    expected = {
        'logit_max': logits[batch.mask > 0].max(),
        'log_partition': mean(log_z, 1),
        'loss_by_position': [mean(nll, bins == b) for b in range(16)],
        'loss_by_source': [mean(nll, source == s) for s in range(2)],
        'attention_entropy': [layer.mean(0) for layer in found['entropy']],
        'attention_logit_max': [layer.max(0) for layer in found['score']],
    }
    for name in ('residual', 'attention', 'feed_forward'):
        expected[f'{name}_rms'] = [np.sqrt((layer**2).mean()) for layer in found[name]]
        expected[f'{name}_max'] = [np.abs(layer).max() for layer in found[name]]
    if any(layer is not None for layer in found['unit']):
        expected['dead_units'] = [
            np.nan if layer is None else (layer <= 0).all(axis=0).mean() for layer in found['unit']
        ]
    if arch.experts.n_experts:
        absent = np.full((1, arch.experts.n_experts), np.nan)
        load = np.array([(absent if layer is None else layer).mean(axis=0) for layer in found['expert']])
        share = load / load.sum(axis=1, keepdims=True)
        expected['expert_load'] = share * arch.experts.n_experts
        expected['expert_entropy'] = -(share * np.log(share)).sum(axis=1) / np.log(arch.experts.n_experts)
    return expected


def assert_equal(found, expected, rtol=2e-4):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], np.asarray(value), rtol=rtol, atol=1e-6, err_msg=name)


def few_tokens():
    """A batch in which few tokens count, so some units are dead."""
    batch = random_batch(ROWS)
    batch.mask[:, 3:] = 0
    batch.mask[1:, 1:] = 0
    return batch


@pytest.mark.parametrize(
    ('options', 'length'),
    [
        (LLAMA, 64),
        pytest.param(MIXTURE, LENGTH, marks=pytest.mark.slow),
        pytest.param(
            MIXTURE | {'n_layers': 3, 'dense_layers': (1,), 'd_ff_dense': 32}, LENGTH, marks=pytest.mark.nightly
        ),
    ],
    ids=['dense', 'experts', 'mixed'],
)
def test_every_statistic_is_that_of_the_intermediate_values(options, length):
    assert_equal(statistics(options, length=length), by_hand(options, length))


@pytest.mark.parametrize(
    'name',
    [
        'chunked attention',
        *(pytest.param(name, marks=pytest.mark.slow) for name in ('states', 'latent attention', 'experts, biases',
        'parallel block')),
    ],
)  # fmt: skip
def test_the_loss_of_the_statistics_is_that_of_an_evaluation(name):
    """The statistics have a forward pass of their own, which must have every part of a layer."""
    options, length = MODELS[name], 32
    model, batch = transformer(options, length=length), random_batch(ROWS, length=length)
    with jax.set_mesh(mesh_of()):
        total, weight = jax.jit(make_evaluate(model), compiler_options=QUICK)(random_weights(model), batch)['nll']
    found = statistics(options, length=length)['loss_by_source']
    np.testing.assert_allclose(np.average(found, weights=batch.mask.sum(axis=1)), total / weight, rtol=1e-6)


@pytest.mark.slow
def test_dead_units_are_those_that_are_never_above_zero_for_a_token_that_counts():
    found, expected = statistics(LLAMA, batch=few_tokens()), by_hand(LLAMA, batch=few_tokens())
    assert min(expected['dead_units']) > 0
    np.testing.assert_allclose(found['dead_units'], expected['dead_units'], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('more', [{}, {'loss_chunks': 2, 'layers': 'scan'}], ids=['', 'loss in chunks'])
def test_biases_learned_positions_and_gelu(more):
    assert_equal(statistics(GPT2 | more), by_hand(GPT2))


@pytest.mark.parametrize(
    ('options', 'axes', 'more'),
    [  # the slow ones have every axis of a mesh
        slow(LLAMA, {}, {'accumulation': 2}),
        slow(LLAMA, {'r': 4, 't': 2}, {}),
        slow(LLAMA | {'layers': 'scan'}, {'p': 2, 'd': 2, 't': 2}, {'micro_batches': 2}),
        slow(MIXTURE, {'e': 2, 'c': 2, 'p': 2}, {'micro_batches': 2}),
        nightly(LLAMA, {'d': 2, 'c': 2, 't': 2}, {}),
        nightly(LLAMA | {'context': 'ring'}, {'c': 4, 't': 2}, {}),
        nightly(LLAMA | {'n_layers': 4, 'pipeline_rounds': 2}, {'p': 2, 'c': 2}, {'micro_batches': 4}),
        nightly(MIXTURE | {'capacity': 0.75}, {'e': 2, 't': 2}, {}),
    ],
    ids=lambda value: ' '.join(f'{k}{v}' for k, v in value.items() if len(k) == 1) if isinstance(value, dict) else '',
)
def test_the_mesh_and_accumulation_change_nothing(options, axes, more):
    batch = random_batch(8)
    assert_equal(statistics(options, mesh_of(**axes), batch=batch, **more), statistics(options, batch=batch))
