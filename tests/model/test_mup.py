"""muP against its tables in the papers, written down once more by hand: for a model twice as wide as its base."""

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoders import decoder_options
from pretrax.errors import UserError
from pretrax.model.architecture import resolve
from pretrax.train import optimizer
from pretrax.train.groups import Setting, settings_of
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_step
from small import GPT2, LLAMA, MIXTURE, VOCAB, assert_same, mesh_of, random_batch, transformer

MODEL = MIXTURE | {'dense_layers': 1, 'tied': False}  # d_model 32
DENSE = LLAMA | {'tied': False}
MUP = {'base_width': 16}
# arXiv:2203.03466, table 8: what has infinitely many inputs and outputs, and what has infinitely many inputs
HIDDEN = [
    f'layers.{name}'
    for name in ('q', 'k', 'v', 'o', 'gate', 'up', 'down', 'expert_*', 'shared_gate', 'shared_up', 'shared_down')
]
OUTPUT = ['unembed', 'layers.router', 'layers.shared_mix']


def name_of(path):
    return jax.tree_util.keystr(path, simple=True, separator='.')


def factor_of(name, hidden, output):
    for patterns, factor in ((HIDDEN, hidden), (OUTPUT, output)):
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            return factor
    return 1.0


def drawn(options):
    with jax.set_mesh(mesh_of()):
        return jax.jit(transformer(options).init)(jax.random.key(0))


@pytest.mark.parametrize('init', ['scaled', pytest.param('truncated', marks=pytest.mark.nightly)])
def test_initial_values(init):
    """Table 8: variances of 1/fan_in inside, and of 1/fan_in^2 at the output."""
    standard, scaled = (drawn(MODEL | {'init': init, 'mup': mup}) for mup in (None, MUP))
    expected = jax.tree_util.tree_map_with_path(lambda path, w: w * factor_of(name_of(path), 2**-0.5, 1 / 2), standard)
    assert_same(scaled, expected, rtol=1e-6)
    named = {name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(standard)}
    assert all(fnmatch.filter(named, pattern) for pattern in HIDDEN + OUTPUT)


def test_xavier_already_follows_the_width():
    standard, scaled = (drawn(MODEL | {'init': 'xavier', 'mup': mup}) for mup in (None, MUP))
    expected = jax.tree_util.tree_map_with_path(lambda path, w: w * factor_of(name_of(path), 1, 1 / 2), standard)
    assert_same(scaled, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ('width_power', 'hidden'),
    [(1.0, 1 / 2), (0.5, 2**-0.5)],  # Adam, and Muon, whose update has singular values in proportion to sqrt(width)
)
@pytest.mark.parametrize('independent', [True, False])
def test_learning_rates_and_decay(width_power, hidden, independent):
    """Table 8 for Adam. The outputs of an expert's choice and of the vocabulary are as many for any width."""
    recipe = Recipe(
        transformer(MODEL | {'mup': MUP | {'independent_decay': independent}}),
        *(optimizer.adamw(), lambda _: 0.01, 0.3, ('*norm*',), None, 1),
        width_power=width_power,
    )
    with jax.set_mesh(mesh_of()):
        weights = recipe.model.abstract()

    def expected(path, _):
        name = name_of(path)
        factor = factor_of(name, hidden, 1 / 2)
        decay = 0.0 if 'norm' in name else 0.3 / factor if independent else 0.3
        return Setting(pytest.approx(factor), pytest.approx(decay))

    settings = settings_of(recipe, weights)
    flat = jax.tree.leaves(settings, is_leaf=lambda x: isinstance(x, Setting))
    assert flat == [expected(*leaf) for leaf in jax.tree_util.tree_leaves_with_path(weights)]


def test_a_step_of_adam():
    """A first step moves each number by the learning rate: sign(gradient), Kingma and Ba 2015, section 2.1."""
    options = {'n_layers': 1, 'd_model': 32, 'n_heads': 4, 'n_kv_heads': 2, 'tied': True, 'mup': MUP}
    recipe = Recipe(transformer(options), optimizer.adamw(eps=1e-30), lambda _: 0.01, 0.0, (), None, 1)
    with jax.set_mesh(mesh_of()):
        state = init_state(recipe, 0)
        before = jax.device_get(state.weights)
        after, _ = make_step(recipe)(state, random_batch(4))
    moved = {name: np.max(np.abs(np.subtract(*pair))) for name, pair in _pairs(jax.device_get(after.weights), before)}
    assert moved == {name: pytest.approx(0.01 * factor_of(name, 1 / 2, 1 / 2), rel=1e-3) for name in moved}


def _pairs(after, before):
    found = jax.tree_util.tree_leaves_with_path(after)
    return [(name_of(path), (a, b)) for (path, a), b in zip(found, jax.tree.leaves(before), strict=True)]


def logits(options, weights, tokens):
    with jax.set_mesh(mesh_of()):
        return np.array(_logits(transformer(options))(weights, tokens))


def _logits(model):
    from pretrax.infer.recompute import logits_per_device

    return jax.jit(logits_per_device(model))


@pytest.mark.parametrize(
    ('options', 'mup', 'same'),
    [
        (GPT2, MUP, {'logit_multiplier': 0.5}),  # tied
        (MODEL, MUP, {}),
        (DENSE | {'scale_embedding': True}, MUP, {'embedding_multiplier': 2**-0.5}),
        (DENSE, MUP | {'base_d_head': 4}, {'query_pre_attn_scalar': 16.0}),  # heads of 8: over 8 / sqrt(4)
        (MODEL, MUP | {'base_layers': 1}, {'residual_multiplier': 1 / 2}),  # arXiv:2505.01618
        (DENSE, MUP | {'base_layers': 1, 'depth_power': 0.5}, {'residual_multiplier': 2**-0.5}),  # arXiv:2310.02244
    ],
)
def test_the_forward_pass(options, mup, same):
    weights, tokens = drawn(options), jnp.asarray(random_batch(2).tokens)
    np.testing.assert_allclose(
        logits(options | {'mup': mup}, weights, tokens), logits(options | same, weights, tokens), rtol=1e-6, atol=1e-7
    )


def test_depth_slows_down_the_layers_alone():
    """arXiv:2310.02244, table 1: Adam's rate in proportion to L^-1/2 with branches times L^-1/2."""
    arch = resolve(decoder_options(**MODEL, mup=MUP | {'base_layers': 1, 'depth_power': 0.5}), VOCAB, 16)
    assert arch.mup is not None
    assert arch.mup.rate('layers.q', True, 1.0) == pytest.approx(2**-0.5 / 2)
    assert arch.mup.rate('layers.norm1', False, 1.0) == pytest.approx(2**-0.5)
    assert arch.mup.rate('embed', False, 1.0) == 1


def test_the_base_model_is_the_model_without_mup():
    plain, base = (resolve(decoder_options(**MODEL, mup=mup), VOCAB, 16) for mup in (None, {'base_width': 32}))
    assert all(getattr(plain, field) == getattr(base, field) for field in vars(plain) if field != 'mup')
    assert_same(drawn(MODEL | {'mup': {'base_width': 32}}), drawn(MODEL), rtol=0)


@pytest.mark.parametrize(
    ('mup', 'options', 'message'),
    [
        ({'base_width': 16, 'depth_power': 0.5}, {}, 'is relative to base_layers\ngive model.mup.base_layers'),
        ({'base_width': 16, 'base_d_head': 4}, {'query_pre_attn_scalar': 4.0}, 'leave out one'),
        ({'base_width': 16, 'base_d_head': 4}, {'kv_rank': 8}, 'does not fit latent attention'),
    ],
)
def test_choices_that_contradict_each_other_are_refused(mup, options, message):
    sizes = {'n_layers': 1, 'd_model': 32, 'n_heads': 4}
    with pytest.raises((UserError, ValueError), match=message):
        decoder_options(**sizes, **options, mup=mup)
