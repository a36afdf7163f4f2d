"""What is sent besides the gradient and the loss: bytes of each program of training, on each mesh, by formulas.

The programs are compiled for simulated devices. A collective that no formula has fails the test.
"""

import math
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from decoders import decoder_options
from pretrax.distill.hidden_states import HiddenMatch
from pretrax.distill.student import Distillation, DistilledTransformer
from pretrax.hlo.parse import computations_of, find_collectives
from pretrax.model.base import weight_shardings
from pretrax.model.loss import Batch
from pretrax.model.request import ModelRequest
from pretrax.shardlib import make_abstract
from pretrax.train import noise_scale, optimizer, step
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.layer_statistics import make_layer_statistics, weight_statistics
from pretrax.train.state import abstract_state
from pretrax.train.step import Recipe, make_step, training_step
from pretrax.train.validation import make_evaluate
from small import LENGTH, LLAMA, MIXTURE, VOCAB, mesh_of, transformer
from train.test_owners import exchanged, of_matrices

MESHES = {
    'd=8': ({'d': 8}, LLAMA),
    'd=4 t=2': ({'d': 4, 't': 2}, LLAMA),
    'e=4 d=2': ({'d': 2, 'e': 4}, MIXTURE),
    'p=2 d=4': ({'d': 4, 'p': 2}, LLAMA),
}
ROWS = 16
WIDE = {'d_model': 256, 'n_heads': 2, 'd_head': 128, 'd_ff': 384}  # Adafactor factors from 128
OPTIMIZERS = {
    'adamw': optimizer.adamw(),
    'adafactor': optimizer.adafactor(),
    'normuon': optimizer.muon(neuron_b2=0.95),
    'lion': optimizer.lion(),
    'sgd': optimizer.sgd(momentum=0.9),
    'schedule_free': optimizer.schedule_free(),
    'muon': optimizer.muon(),
    'soap': optimizer.soap(),
}
on_each_mesh = pytest.mark.parametrize('mesh', MESHES)


def recipe_on(mesh, method, sizes, options):
    """All that an update may have: clipping, cautious decay, a moving average, and steps that are skipped."""
    model = transformer(options, mesh, micro_batches=sizes.get('p', 1))
    return Recipe(
        model, method, lambda n: 0.1 / (1.0 + n), 0.1, DEFAULT_NO_DECAY, 1.0, 1,
        cautious_decay=True, ema_decay=0.99, spike=5.0,
    )  # fmt: skip


def sent(program, mesh, only_outside=False):
    """{(kind, axes): bytes} of a compiled program, with or without what `typed_shard_map` sends."""
    total = Counter()
    for one in find_collectives(computations_of(program.as_text()), dict(mesh.shape)):
        name = re.search(r'op_name="([^"]*)"', one.detail)
        if not only_outside or name is None or 'shard_map' not in name[1]:
            total[one.collective.kind, one.collective.axes] += one.collective.bytes * one.collective.times
    return dict(total)


class Placed:
    """A weight: the numbers of a device along each dimension, and the mesh axes."""

    def __init__(self, w, sharding, mesh):
        spec = [*sharding.spec, *[None] * w.ndim][: w.ndim]
        self.shape, self.axes = w.shape, [(a,) if isinstance(a, str) else tuple(a or ()) for a in spec]
        split = [math.prod(mesh.shape[axis] for axis in axes) for axes in self.axes]
        self.local = [n // parts for n, parts in zip(w.shape, split, strict=True)]

    def mean_over(self, dims, mesh, summed=None):
        """The bytes of f32 sums over the dimensions `summed`, after a mean over the others of `dims`."""
        left = math.prod(n for i, n in enumerate(self.local) if i not in dims)
        axes = [axis for i in summed or dims for axis in self.axes[i] if mesh.shape[axis] > 1]
        return Counter({('all-reduce', (axis,)): 4 * left for axis in axes})


def placed_weights(weights, shardings, mesh):
    return jax.tree.map(lambda w, sharding: Placed(w, sharding, mesh), weights, shardings)


def axes_of(weights, mesh):
    """The mesh axes that shard a weight, in the mesh's order."""
    used = {axis for w in jax.tree.leaves(weights) for axes in w.axes for axis in axes}
    return tuple(axis for axis in mesh.shape if axis in used and mesh.shape[axis] > 1)


def by_adafactor(weights, mesh):
    """Shazeer and Stern 2018, algorithm 4: means of squares by row and by column, and the mean of those by row; then
    the root mean square of the update of a weight.
    """
    total = Counter()
    for w in jax.tree.leaves(weights):
        *_, second, first = sorted(range(len(w.shape)), key=lambda i: w.shape[i]) if len(w.shape) > 1 else (0, 0)
        if len(w.shape) > 1 and w.shape[second] >= 128:
            total += w.mean_over([first], mesh) + w.mean_over([second], mesh)
            total += w.mean_over([first, second], mesh, summed=[second])
        total += w.mean_over(range(len(w.shape)), mesh)
    return total


def by_neuron(weights, like, mesh):
    """Li et al. 2025, algorithm 1: the mean square of each output over the inputs, and that of each matrix."""
    total, placed = Counter(), dict(jax.tree_util.tree_leaves_with_path(weights))
    for path, (_, (inputs, outputs)) in of_matrices(like).items():
        total += placed[path].mean_over(inputs, mesh) + placed[path].mean_over([*inputs, *outputs], mesh)
    return total


def by_update(name, weights, shardings, mesh):
    """{(kind, axes): bytes} of the update with an optimizer."""
    placed = placed_weights(weights, shardings, mesh)
    total = Counter({('all-reduce', axes_of(placed, mesh)): 2 * 4})  # norms of the gradient and of the weights
    if name == 'adafactor':
        total += by_adafactor(placed, mesh)
    if name in ('muon', 'normuon'):
        total += exchanged(weights, shardings, mesh)
    if name == 'soap':
        total += exchanged(weights, shardings, mesh, tables=True)
    if name == 'normuon':
        total += by_neuron(placed, weights, mesh)
    return total


def by_layer(weights):
    """Bytes of the statistics of layers: a sum of squares and a maximum of the gradient, the update and the weights."""
    in_layers = jax.tree.leaves(weights.layers)
    return 2 * 3 * 4 * (sum(map(len, in_layers)) + len(jax.tree.leaves(weights)) - len(in_layers))


SLOW = {(name, mesh) for name in OPTIMIZERS for mesh in MESHES if name not in ('adamw', 'adafactor')}
SLOW -= {('normuon', 'd=4 t=2')}


@pytest.mark.parametrize(
    ('name', 'mesh'),
    [
        pytest.param(name, mesh, marks=pytest.mark.slow if (name, mesh) in SLOW else ())
        for name in OPTIMIZERS
        for mesh in MESHES
    ],
)
def test_an_update_sends_two_norms_and_what_its_optimizer_needs(name, mesh, monkeypatch):
    sizes, options = MESHES[mesh]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        recipe = recipe_on(mesh, OPTIMIZERS[name], sizes, options | (WIDE if name == 'adafactor' else {}))
        state, terms = abstract_state(recipe), {'nll': (jax.ShapeDtypeStruct((), jnp.float32),) * 2}
        program = traced_update(recipe, state, terms, monkeypatch).lower().compile()
        shardings = weight_shardings(recipe.model, state.weights)
        expected = by_update(name, state.weights, shardings, mesh)
    assert sent(program, mesh) == expected
    before, after = jax.tree.leaves(state), jax.tree.leaves(program.output_shardings[0])
    assert all(new.is_equivalent_to(x.sharding, x.ndim) for x, new in zip(before, after, strict=True))


@pytest.mark.parametrize('platform', ['tpu', 'cuda'])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_update_of_wide_matrices_lowers_for_accelerators(name, platform, monkeypatch):
    """JAX lowers decompositions differently there, those of matrices wider than 256 on TPUs by loops."""
    wide = LLAMA | {'d_model': 320, 'n_heads': 2, 'd_head': 128, 'd_ff': 384}
    mesh = mesh_of(d=4, t=2)
    with jax.set_mesh(mesh):
        recipe = recipe_on(mesh, OPTIMIZERS[name], {}, wide)
        state, terms = abstract_state(recipe), {'nll': (jax.ShapeDtypeStruct((), jnp.float32),) * 2}
        lowered = traced_update(recipe, state, terms, monkeypatch).lower(lowering_platforms=(platform,))
    assert 'stablehlo.all_reduce' in lowered.as_text()


def traced_update(recipe, state, terms, monkeypatch):
    """The training step whose gradient is an argument."""

    def update(state, gradient, terms):
        monkeypatch.setattr(step, 'make_gradients', lambda *_: lambda *_, **__: (gradient, terms, {}))
        return training_step(recipe)(state, None)[:2]

    return jax.jit(update, donate_argnums=0).trace(state, state.weights, terms)


@on_each_mesh
def test_norms_of_layers_are_two_all_reduces(mesh):
    sizes, options = MESHES[mesh]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        model = transformer(options, mesh, micro_batches=sizes.get('p', 1))
        weights = model.abstract()
        shardings = weight_shardings(model, weights)
        program = jax.jit(
            lambda *trees: weight_statistics(*trees, shardings, model.arch),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        ).lower(weights, weights, weights).compile()  # fmt: skip
        axes = axes_of(placed_weights(weights, shardings, mesh), mesh)
    assert sent(program, mesh) == {('all-reduce', axes): by_layer(weights)}


@on_each_mesh
def test_the_noise_scale_sends_two_inner_products(mesh, monkeypatch):
    sizes, options = MESHES[mesh]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        recipe = recipe_on(mesh, optimizer.adamw(), sizes, options)
        state, batch = abstract_state(recipe), batch_of()

        def gradients(weights, batch, *_, **__):  # elementwise: sends nothing
            return jax.tree.map(jnp.sin, weights), {'nll': (jnp.zeros(()), jnp.ones(()))}, {}

        monkeypatch.setattr(noise_scale, 'make_gradients', lambda *_: gradients)
        program = noise_scale.make_noise(recipe).lower(state, batch).compile()
        axes = axes_of(placed_weights(state.weights, weight_shardings(recipe.model, state.weights), mesh), mesh)
    assert sent(program, mesh) == {('all-reduce', axes): 2 * 4}


def batch_of(rows=ROWS):
    return make_abstract(Batch, {'B': rows, 'L': LENGTH}, omit=('seeds', 'top_ids', 'top_log_probs', 'log_tail'))


@pytest.mark.parametrize(
    'mesh', [pytest.param(mesh, marks=() if mesh == 'd=4 t=2' else pytest.mark.slow) for mesh in MESHES]
)
def test_an_evaluation_sends_only_what_the_model_sends(mesh):
    sizes, options = MESHES[mesh]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        model = transformer(options, mesh, micro_batches=sizes.get('p', 1))
        program = make_evaluate(model).lower(model.abstract(), batch_of()).compile()
    assert sent(program, mesh, only_outside=True) == {}
    assert sent(program, mesh)


@pytest.mark.slow
@on_each_mesh
def test_whole_programs_send_nothing_outside_of_typed_shard_map(mesh):
    """The step, the noise scale and the statistics of layers, with the gradient and the forward pass."""
    sizes, options = MESHES[mesh]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        recipe = recipe_on(mesh, optimizer.adamw(), sizes, options)
        state, batch = abstract_state(recipe), batch_of()
        sources = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        programs = [
            make_step(recipe).lower(state, batch),
            noise_scale.make_noise(recipe).lower(state, batch),
            make_layer_statistics(recipe, 2).lower(state, batch, sources),
        ]
        for program in programs:
            assert sent(program.compile(), mesh, only_outside=True) == {}


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [mesh for mesh, (sizes, _) in MESHES.items() if 'p' not in sizes])
def test_distillation_sends_nothing_outside_of_typed_shard_map(mesh):
    sizes, options = MESHES[mesh]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh.shape), 1)
        student, teacher = decoder_options(**options), decoder_options(**options | {'d_model': 64})
        how = Distillation(0.5, 2.0, 'forward', 1, HiddenMatch(((1, 1),), 1.0))
        model = DistilledTransformer(request, options=student, teacher=teacher, how=how)
        recipe = recipe_on(mesh, optimizer.adamw(), sizes, options)._replace(model=model)
        program = make_step(recipe).lower(abstract_state(recipe), batch_of()).compile()
    assert sent(program, mesh, only_outside=True) == {}


DENSE = {'n_layers': 4, 'd_model': 2048, 'n_heads': 16, 'n_kv_heads': 8, 'd_head': 128, 'd_ff': 8192}
EXPERTS = DENSE | {'d_ff': 2048, 'n_experts': 8, 'experts_per_token': 2}


def test_the_manual_has_the_bytes_of_larger_decoders():
    """The formulas above give the table of docs/parallelism.md."""
    optimizers = {'adamw': '`adamw`, `lion`, `sgd`, `schedule_free`', 'adafactor': '`adafactor`', 'muon': '`muon`'}
    rows = {label: [] for label in (*optimizers.values(), '`muon` with `neuron_b2`', 'noise scale', 'layer statistics')}
    for sizes, _ in MESHES.values():
        mesh = mesh_of(**sizes)
        with jax.set_mesh(mesh):
            options = {'family': 'llama'} | (EXPERTS if 'e' in sizes else DENSE)
            model = transformer(options, mesh, vocab_size=32_768, micro_batches=sizes.get('p', 1))
            weights = model.abstract()
            shardings = weight_shardings(model, weights)
        updates = [by_update(name, weights, shardings, mesh).total() for name in (*optimizers, 'normuon')]
        for numbers, n in zip(rows.values(), [*updates, 8, by_layer(weights)], strict=True):
            numbers.append(f'{n:,}')
    text = (Path(__file__).parents[2] / 'docs/parallelism.md').read_text()
    for label, numbers in rows.items():
        assert f'| {label} | {" | ".join(numbers)} |' in text
