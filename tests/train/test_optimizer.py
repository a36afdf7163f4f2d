"""Every optimizer lowers the loss, and the mesh does not change what it does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from pretrax.model.base import weight_shardings
from pretrax.model.weights import Layer, matrix_dimensions
from pretrax.train import muon, optimizer
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_step
from small import LLAMA, assert_same, mesh_of, random_batch, random_weights, transformer

# Wide enough for Adafactor to factor its moments: both dimensions have to be at least 128.
MODEL = LLAMA | {'n_layers': 1, 'd_model': 128, 'd_ff': 128, 'layers': 'scan'}
RATES = {'adamw': 1e-2, 'adafactor': 1e-2, 'lion': 1e-3, 'sgd': 1.0, 'muon': 1e-2, 'soap': 1e-2, 'schedule_free': 1e-2}


def train(name, mesh, n_steps, **options):
    """Losses, and the weights after two steps (later ones magnify rounding)."""
    with jax.set_mesh(mesh):
        rate = RATES[name]
        recipe = Recipe(
            transformer(MODEL, mesh), getattr(optimizer, name)(**options), lambda step: jnp.float32(rate), 0.1,
            DEFAULT_NO_DECAY, 1.0, 1,
        )  # fmt: skip
        state, step, batch = init_state(recipe, 0), make_step(recipe), random_batch(8)
        losses, early = [], None
        for number in range(n_steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics['loss']))
            early = jax.device_get(state) if number == 1 else early
    return losses, early


# Rounding decides the direction where a gradient has no rank, unless eps is well above it.
OPTIONS = {'soap': {'eps': 1e-3}, 'muon': {'neuron_b2': 0.95}}
SLOW = RATES.keys() - {'adamw'}


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RATES])
def test_lowers_the_loss_alike_on_any_mesh(name):
    options = OPTIONS.get(name, {})
    losses, one = train(name, mesh_of(), 20, **options)
    assert losses[-1] < losses[0] - 0.5
    again, many = train(name, mesh_of(1, 2, 2), 2, **options)
    np.testing.assert_allclose(losses[:2], again, rtol=1e-5)
    assert_same(many.weights, one.weights, rtol=1e-3)


def test_momentum_is_that_of_polyak():
    """The second step of SGD with momentum 0.9 goes 1.9 times as far on the same gradient."""
    rule = optimizer.sgd(momentum=0.9)
    g = {'w': jnp.ones(3)}
    state = rule.init(g)
    first, state = rule.update(g, state)
    second, _ = rule.update(g, state)
    np.testing.assert_allclose((first['w'][0], second['w'][0]), (1.0, 1.9), rtol=1e-6)


def test_muon_orthogonalises_matrices_and_gives_vectors_to_adam():
    """The singular values of a matrix's update come out about equal, whatever those of its gradient."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.standard_normal((32, 16)))
    v, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    g = {'matrix': jnp.asarray(u * np.geomspace(1, 0.05, 16) @ v.T), 'vector': jnp.asarray(rng.standard_normal(5))}
    rule = optimizer.muon()
    update, _ = rule.update(g, rule.init(g), g)
    values = np.linalg.svd(update['matrix'], compute_uv=False)
    assert values.max() / values.min() < 3  # of the gradient: 20
    assert np.sqrt(np.mean(np.square(update['matrix']))) == pytest.approx(0.2, rel=0.3)
    assert np.sum(update['matrix'] * g['matrix']) > 0  # a direction to subtract
    first = 1 + 0.9 * 0.1 / (1 - 0.9**2)  # Adam's first step, with Nesterov's look ahead (Dozat 2016)
    np.testing.assert_allclose(update['vector'], first * np.sign(g['vector']), rtol=1e-3)


def test_muon_is_as_published():
    """Jordan's iteration and momentum in NumPy, and the scale of arXiv:2502.16982, eq. 4; the hidden matrices alone
    have it.

    Optax also corrects the bias of the momentum, as in Adam, so that steps 2 to about 60 differ.
    """
    rng, beta, rule = np.random.default_rng(0), 0.9, optimizer.muon(momentum=0.9)
    gradients = rng.standard_normal((150, 6, 4))
    state, update, momentum = rule.init({'w': jnp.zeros((6, 4))}), jax.jit(rule.update), np.zeros((6, 4))
    for number, g in enumerate(gradients):
        direction, state = update({'w': jnp.float32(g)}, state, {'w': jnp.zeros((6, 4))})
        momentum = beta * momentum + (1 - beta) * g
        if number in (0, 149):
            x = (1 - beta) * g + beta * momentum
            x = x.T / np.linalg.norm(x)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            np.testing.assert_allclose(direction['w'], 0.2 * np.sqrt(6) * x.T, rtol=1e-3, atol=1e-4)
    with jax.set_mesh(mesh_of()):
        weights = random_weights(transformer(LLAMA))
    found = jax.tree_util.tree_leaves_with_path(rule.init(weights)[0].inner_states['muon'])
    assert {path[-1].name for path, leaf in found if leaf.ndim > 2} == {'q', 'k', 'v', 'o', 'gate', 'up', 'down'}
    assert not [path for path, _ in found if getattr(path[-1], 'name', '') in ('embed', 'unembed', 'norm', 'norm1')]


@pytest.mark.parametrize(('name', 'inputs'), [('q', 32), ('o', 32), ('down', 48)])
def test_muon_sees_the_matrices_of_a_decoder_as_they_multiply(name, inputs):
    """Heads belong to the outputs of q and to the inputs of o; the layers are one matrix each."""
    weights = random_weights(transformer(LLAMA))
    rng = np.random.default_rng(0)
    zeros = jax.tree.map(np.zeros_like, weights)
    size = zeros.layers.named()[name].shape
    matrices = [rng.standard_normal((inputs, 32)) * np.geomspace(1, 0.1, 32) for _ in range(size[0])]
    layers = Layer.from_named(zeros.layers.named() | {name: np.reshape(matrices, size).astype(np.float32)})
    gradient = dataclasses.replace(zeros, layers=layers)
    rule = optimizer.muon()
    update, _ = jax.jit(lambda g: rule.update(g, rule.init(g), g))(gradient)
    for one in np.asarray(update.layers.named()[name]).reshape(-1, inputs, 32):
        values = np.linalg.svd(one, compute_uv=False)
        assert values.max() / np.quantile(values, 0.1) < 2, values  # of the gradient: about 20


def test_muon_gives_the_state_and_the_updates_of_optax():
    """Also on a mesh, where the matrices have owners; so a checkpoint of one continues with the other."""
    mesh = mesh_of(d=4, t=2)
    ours = optimizer.muon()
    theirs = optax.chain(
        contrib.muon(
            1.0, beta=0.95, adam_b1=0.9, adam_b2=0.95, eps=1e-8, adam_learning_rate=1.0, consistent_rms=0.2,
            muon_weight_dimension_numbers=matrix_dimensions,
        ),
        optax.scale(-1.0),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        model, weights = transformer(LLAMA, mesh), random_weights(transformer(LLAMA))
        shardings = weight_shardings(model, weights)
        ours_now, theirs_now = ours.init(weights), theirs.init(weights)
        names = [[path for path, _ in jax.tree_util.tree_leaves_with_path(one)] for one in (ours_now, theirs_now)]
        assert names[0] == names[1]
        step = jax.jit(lambda g, state: ours.update(g, state, g, shardings=shardings))
        for seed in range(3):
            g = random_weights(transformer(LLAMA), seed)
            direction, ours_now = step(jax.device_put(g, shardings), ours_now)
            expected, theirs_now = jax.jit(theirs.update)(g, theirs_now, g)
            assert_same(direction, expected, rtol=1e-4)
    for now, expected in zip(jax.tree.leaves(ours_now), jax.tree.leaves(theirs_now), strict=True):
        np.testing.assert_allclose(now, expected, rtol=1e-5, atol=1e-7)


def test_polar_express_has_the_polynomials_of_its_paper():
    """Algorithm 1 of arXiv:2505.16932 in NumPy: each iteration's polynomial is the best on the interval of the values.

    The best odd quintic errs by the same amount, with alternating signs, at four points.
    """

    def best(low, high):
        if low / high >= 1 - 5e-6:
            return np.array([15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5])
        inner, error = (0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high), np.inf
        while True:
            points = [low, *inner, high]
            *found, now = np.linalg.solve(
                [[x, x**3, x**5, s] for x, s in zip(points, (1, -1, 1, -1), strict=True)], np.ones(4)
            )
            if abs(now - error) < 1e-15:
                return np.array(found)
            error, (a, b, c) = now, found
            root = np.sqrt(9 * b * b - 20 * a * c)
            inner = np.sqrt((-3 * b - root) / (10 * c)), np.sqrt((-3 * b + root) / (10 * c))

    low, high, expected = 1e-3, 1.0, []
    for _ in range(8):
        found = best(max(low, 0.02407327424182761 * high), high)
        ends = [found @ [x, x**3, x**5] for x in (low, high)]
        expected.append(found * 2 / sum(ends))
        low = expected[-1] @ [low, low**3, low**5]
        high = 2 - low
    safety = np.array([[1.01, 1.01**3, 1.01**5]] * 7 + [[1, 1, 1]])
    np.testing.assert_allclose(muon.coefficients('polar_express', 8), expected / safety, rtol=1e-6)


@pytest.mark.parametrize('shape', [(96, 96), (48, 192), (192, 48)])
@pytest.mark.parametrize('polynomials', ['jordan', 'polar_express'])
def test_bf16_products_move_singular_values_as_little_as_the_manual_says(polynomials, shape):
    """The polynomials of the singular values in f64, for a spectrum in proportion to 1 / k."""
    left, _, right = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), full_matrices=False)
    s = 1 / np.arange(1, min(shape) + 1)
    x, s = left * s @ right, s / np.linalg.norm(s)
    of_iterations = muon.coefficients(polynomials, 5)
    for a, b, c in of_iterations:
        s = a * s + b * s**3 + c * s**5
    for dtype, error, moved in ((jnp.float32, 1e-5, 1e-5), (jnp.bfloat16, 0.1, 0.07)):
        result = np.asarray(muon.orthogonalize(jnp.asarray(x[None], dtype), of_iterations, 1e-8)[0], np.float64)
        assert np.linalg.norm(result - left * s @ right) <= error * np.linalg.norm(s)
        of_result = np.linalg.svd(result, compute_uv=False)
        assert abs(of_result[0] - s.max()) <= moved
        assert abs(of_result[-1] - s.min()) <= moved


@pytest.mark.parametrize(('options', 'spread'), [({}, 1.8), ({'polynomials': 'polar_express'}, 1.31)])
def test_muon_brings_singular_values_together(options, spread):
    """The largest over the smallest after five iterations, from 100; with the best polynomials nearer to 1:
    1.28 by the bound of arXiv:2505.16932."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.standard_normal((48, 32)))
    v, _ = np.linalg.qr(rng.standard_normal((32, 32)))
    g = {'matrix': jnp.asarray(u * np.geomspace(1, 0.01, 32) @ v.T, jnp.float32)}
    for precision, error in (('f32', 1.0), ('bf16', 1.15)):
        rule = optimizer.muon(precision=precision, **options)
        values = np.linalg.svd(rule.update(g, rule.init(g), g)[0]['matrix'], compute_uv=False)
        assert values.max() / values.min() < spread * error


def test_normuon_is_as_published():
    """Algorithm 1 of arXiv:2510.05491 in NumPy, on the orthogonalized momentum: W is [outputs, inputs] there."""
    rng, b2, rms = np.random.default_rng(0), 0.9, 0.2
    rule, plain = optimizer.muon(neuron_b2=b2, rms=rms), optimizer.muon(rms=rms)
    weights = {'w': jnp.zeros((6, 4))}
    state, other, v = rule.init(weights), plain.init(weights), np.zeros((4, 1))
    for g in rng.standard_normal((3, 6, 4)).astype(np.float32):
        direction, state = rule.update({'w': jnp.asarray(g)}, state, weights)
        orthogonal, other = plain.update({'w': jnp.asarray(g)}, other, weights)
        o = np.asarray(orthogonal['w'], np.float64).T
        v = b2 * v + (1 - b2) * np.mean(o * o, axis=1, keepdims=True)
        scaled = o / (np.sqrt(v) + 1e-8)
        expected = rms * np.sqrt(scaled.size) * scaled / np.linalg.norm(scaled)
        np.testing.assert_allclose(direction['w'].T, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('ok', [True, False])
def test_adamw_is_that_of_optax_and_a_skipped_step_keeps_its_state(ok):
    ours, theirs = optimizer.adamw(b1=0.8, b2=0.9, eps=1e-6), optax.scale_by_adam(0.8, 0.9, 1e-6)
    weights = {'a': jnp.ones((3, 4)), 'frozen': None}
    gradients = [jax.tree.map(lambda w, k=k: jax.random.normal(jax.random.key(k), w.shape), weights) for k in range(3)]
    state, other = ours.init(weights), theirs.init(weights)
    for gradient in gradients[:2]:
        direction, state = jax.jit(ours.update)(gradient, state)
        expected, other = jax.jit(theirs.update)(gradient, other)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (direction, state), (expected, other))
    after = jax.jit(ours.update)(gradients[2], state, trains=jnp.asarray(ok))[1]
    expected = theirs.update(gradients[2], other)[1] if ok else other
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after, expected)


def test_a_step_of_adamw_on_a_cpu_copies_no_moments():
    """With Optax's own transformation XLA copies both moments, which are 8 bytes per parameter."""
    with jax.set_mesh(mesh_of()):
        temporaries = []
        for adam in (optimizer.adamw(), optax.scale_by_adam(b2=0.95)):
            recipe = Recipe(
                transformer(MODEL | {'d_ff': 4096}, mesh_of()), adam, lambda step: jnp.float32(1e-2), 0.1, (), 1.0, 1
            )
            state = init_state(recipe, 0)
            compiled = make_step(recipe).lower(state, random_batch(1)).compile()
            temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        n_params = sum(w.size for w in jax.tree.leaves(state.weights))
    assert temporaries[1] - temporaries[0] > 4 * n_params
