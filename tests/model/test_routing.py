"""Which experts a token gets, from the formulas one token at a time; and biases that balance the load, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model.routing import adjust, choose_experts
from pretrax.model.weights import Layer
from pretrax.train import optimizer
from pretrax.train.groups import DEFAULT_NO_DECAY, Group, adjusted, weight_settings
from pretrax.train.step import Recipe, make_step
from run.test_equivalence import fresh_state
from small import MIXTURE, mesh_of, random_batch, random_weights, transformer

DEEPSEEK = MIXTURE | {
    'n_experts': 8, 'experts_per_token': 2, 'router_scores': 'sigmoid', 'router_bias': True, 'n_expert_groups': 4,
    'groups_per_token': 2, 'group_scores': 'top2', 'router_scale': 2.5, 'balance_loss': 0.0, 'shared_gate': False,
    'router_bias_rate': 0.03,
}  # fmt: skip
WITHOUT_BIAS = {'router_bias': False, 'router_bias_rate': None}
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def by_hand(logits, bias, arch):
    """The weight of each expert for one token, [E]: DeepSeek-V2's and V3's papers (arXiv:2405.04434, 2412.19437)."""
    scores = (
        np.exp(logits) / np.exp(logits).sum() if arch.experts.router.scores == 'softmax' else 1 / (1 + np.exp(-logits))
    )
    order = scores if bias is None else scores + bias
    size = len(logits) // arch.experts.router.n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(arch.experts.router.n_groups)]
    best = {'max': 1, 'top2': 2}[arch.experts.router.group_scores]
    groups.sort(key=lambda group: -sum(sorted((order[e] for e in group), reverse=True)[:best]))
    allowed = [e for group in groups[: arch.experts.router.groups_per_token] for e in group]
    chosen = sorted(allowed, key=lambda e: -order[e])[: arch.experts.experts_per_token]
    weight = np.zeros(len(logits))
    weight[chosen] = scores[chosen]
    if arch.experts.router.normalize:
        weight /= weight.sum()
    return arch.experts.router.scale * weight


@pytest.mark.parametrize(
    'changes',
    [
        {},
        WITHOUT_BIAS,
        {'group_scores': 'max', 'router_scores': 'softmax', 'normalize_router': False} | WITHOUT_BIAS,  # V2
        {'n_expert_groups': 1, 'groups_per_token': 1},
        {'groups_per_token': 3, 'experts_per_token': 5},
    ],
    ids=str,
)
def test_experts_and_weights_follow_the_formulas(changes):
    rng = np.random.default_rng(0)
    arch = transformer(DEEPSEEK | changes).arch
    logits = rng.standard_normal((3, 7, 8)).astype(np.float32)
    bias = (0.3 * rng.standard_normal(8)).astype(np.float32) if arch.experts.router.bias else None
    weight, chosen = choose_experts(jnp.asarray(logits), bias, arch)
    found = np.zeros(logits.shape)
    np.put_along_axis(found, np.asarray(chosen), np.asarray(weight), axis=-1)
    expected = np.array([[by_hand(token.astype(np.float64), bias, arch) for token in row] for row in logits])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_bias_moves_against_the_load_exactly():
    """Loads beyond the whole numbers of f32 in their sum: 8 * 2^22 + 1 tokens, so the mean is 2^22 and a bit."""
    model = transformer(DEEPSEEK)
    layers = Layer.from_named(random_weights(model).layers.named() | {'router_bias': jnp.zeros((2, 8))})
    weights = dataclasses.replace(random_weights(model), layers=layers)
    even = np.full(8, 2**22)
    loads = np.array([even + np.eye(8, dtype=int)[3], [0, 1, 2, 3, 4, 5, 6, 7]])
    table = jnp.concatenate([jnp.asarray(loads, jnp.float32), jnp.zeros((2, 1))], axis=1)
    after = np.asarray(adjust(weights, {'routing': table}, model.arch).layers.experts.router_bias)
    signs = [[1, 1, 1, -1, 1, 1, 1, 1], [1, 1, 1, 1, -1, -1, -1, -1]]
    np.testing.assert_array_equal(after, np.float32(0.03) * np.float32(signs))


def test_biases_that_are_frozen_stay():
    model = transformer(DEEPSEEK)
    weights = random_weights(model)
    table = {'routing': jnp.concatenate([jnp.tile(jnp.arange(8.0), (2, 1)), jnp.zeros((2, 1))], axis=1)}
    moved = adjust(weights, table, model.arch).layers.experts.router_bias != weights.layers.experts.router_bias
    assert moved.all()
    for pattern, expected in (('layers[0].*', [0, 1]), ('*router*', [0, 0]), ('layers.q*', [1, 1])):
        settings = weight_settings(weights, 0.1, groups=(Group((pattern,), 0.0),), arch=model.arch)
        after = adjusted(model, weights, table, settings)
        still = after.layers.experts.router_bias == weights.layers.experts.router_bias
        np.testing.assert_array_equal(np.all(still, axis=1), np.logical_not(expected))
        np.testing.assert_array_equal(after.layers.attention.q, weights.layers.attention.q)


def trained(mesh, accumulation=1, steps=3, **more):
    """The state after some steps, on a mesh. A stage has as many micro-batches as the mesh has stages."""
    rows, stages = 8, mesh.get('p', 1)
    model = transformer(DEEPSEEK | {'layers': 'scan'} | more, mesh_of(**mesh), micro_batches=stages)
    order = model.column_order
    recipe = Recipe(model, optimizer.adamw(), lambda step: 0.01, 0.1, DEFAULT_NO_DECAY, 0.5, accumulation)
    with jax.set_mesh(mesh_of(**mesh)):
        state = fresh_state(recipe, random_weights(model))
        batches = [random_batch(rows, seed=i) for i in range(steps)]
        if order is not None:
            batches = [jax.tree.map(lambda x: x[:, order], batch) for batch in batches]
        step = make_step(recipe).lower(state, batches[0]).compile(compiler_options=QUICK)
        for batch in batches:
            state, _ = step(state, batch)
        return jax.device_get(state)


@pytest.mark.slow
def test_biases_are_the_same_for_any_number_of_micro_batches():
    before = random_weights(transformer(DEEPSEEK)).layers.experts.router_bias
    whole, parts = trained({}), trained({}, accumulation=4)
    after = whole.weights.layers.experts.router_bias
    assert whole.optimizer.mu.layers.experts.router_bias is None
    np.testing.assert_array_equal(after, parts.weights.layers.experts.router_bias)
    moved = np.rint((after - before) / np.float32(0.03))  # each step moves each bias by the rate, up or down, or not
    assert np.all(np.abs(moved) <= 3)
    assert (moved > 0).any()
    assert (moved < 0).any()
    np.testing.assert_allclose(after, before + 0.03 * moved, atol=1e-6)  # no decay, no gradient


@pytest.mark.parametrize(
    'mesh',
    [
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ({'d': 2, 't': 2}, {'e': 4}, {'p': 2, 'pipeline_schedule': '1f1b'})
        ),
        *(pytest.param(mesh, marks=pytest.mark.nightly) for mesh in ({'r': 2, 'e': 2}, {'c': 2}, {'p': 2})),
    ],
    ids=str,
)
def test_biases_are_the_same_on_any_mesh(mesh):
    more = {'context': 'ring'} if 'c' in mesh else {}
    if 'pipeline_schedule' in mesh:
        mesh, more = {'p': 2}, {'pipeline_schedule': '1f1b', 'save': 'none'}
    expected = trained({}).weights.layers.experts
    found = trained(mesh, **more).weights.layers.experts
    np.testing.assert_array_equal(found.router_bias, expected.router_bias)
    np.testing.assert_allclose(found.router, expected.router, rtol=1e-3, atol=1e-5)
