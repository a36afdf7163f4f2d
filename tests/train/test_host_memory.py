"""What lies in host memory: state between steps, activations by name. Nothing of it changes what is computed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoders import decoder_options
from pretrax import config_from_values, pretrain
from pretrax.errors import UserError
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.observe.metrics import read_metrics
from pretrax.run.setup import prepare
from pretrax.train.host_memory import check_host_memory
from pretrax.train.step import make_gradients
from runs import BIGRAM, Quiet
from small import LENGTH, LLAMA, VOCAB, assert_same, mesh_of, random_batch, random_weights


def losses(directory):
    return [
        (line['step'], line['loss'], line['grad_norm'])
        for line in read_metrics(Path(directory) / 'metrics.jsonl')
        if 'loss' in line
    ]


@pytest.mark.parametrize(
    'name', ['adamw', *(pytest.param(n, marks=pytest.mark.slow) for n in ('soap', 'schedule_free'))]
)
def test_a_run_with_its_state_in_host_memory_resumes_to_the_same_losses(name, values, tmp_path):
    common = values | {'model': BIGRAM, 'eval': {'every': 3, 'batches': 1}, 'schedule': {'name': 'constant'}}
    common |= {'optimizer': values['optimizer'] | {'name': name}}
    plain = pretrain(config_from_values(common | {'run_dir': str(tmp_path / 'plain')}), progress=Quiet())
    offloaded = common | {'memory': {'offload': ['optimizer', 'weights']}}
    pretrain(config_from_values(offloaded | {'steps': 3}), progress=Quiet())
    again = Quiet()
    result = pretrain(config_from_values(offloaded), progress=again, verbose=True)
    assert 'offload: optimizer and weights in host memory between steps' in again.said
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves((result.state.weights, result.state.optimizer))
        if leaf.ndim
    }
    assert kinds == {'pinned_host'}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(plain.state.weights)} == {'device'}
    assert losses(values['run_dir']) == losses(tmp_path / 'plain')
    assert result.validation['val_loss'] == plain.validation['val_loss']
    same = jax.tree.map(np.array_equal, jax.device_get(result.state.weights), jax.device_get(plain.state.weights))
    assert all(jax.tree.leaves(same))


def test_what_cannot_be_in_eight_bits_is_refused_and_what_is_slow_is_said(values):
    eight = values | {'precision': {'compute': 'f32', 'matmul': 'int8', 'exempt': ['head']}}
    report = prepare(config_from_values(eight), lambda text: None).startup
    (line,) = [line for line in map(str, report) if line.startswith('products: ')]
    assert (
        'int8 (a scale per row and column, gradients rounded stochastically) in 7 of 8 products; compute dtype: head'
        in line
    )
    assert 'SLOW: TPUs have hardware for it; cpu emulates it' in line
    with pytest.raises(UserError, match=r'model.name = bigram-of-tests computes its own matrix products'):
        prepare(config_from_values(eight | {'model': BIGRAM}), lambda text: None)


@pytest.mark.slow
def test_what_is_kept_recomputed_or_offloaded_changes_no_gradient():
    mesh = mesh_of(d=2)

    def gradient(save):
        request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh.shape), host_memory=True)
        model = Transformer(request, options=decoder_options(**LLAMA, layers='scan', save=save))
        with jax.set_mesh(mesh):
            run, operands = make_gradients(model, 1), (random_weights(model), random_batch(4))
            moved = str(jax.make_jaxpr(run)(*operands)).count('<host>')
            return jax.device_get(jax.jit(run)(*operands)[0]), moved

    everything, moved = gradient('all')
    assert moved == 0
    some = {'input': 'offload', 'q': 'offload', 'up': 'keep', 'attention': 'recompute'}
    for save in ('attention', some):
        result, moved = gradient(save)
        assert_same(result, everything, rtol=1e-6)
        assert (moved > 0) == isinstance(save, dict), save


def test_a_device_without_host_memory_refuses_in_words():
    class Device:
        platform = 'toy'

        def addressable_memories(self):
            return [type('Memory', (), {'kind': 'device'})]

    with pytest.raises(UserError, match=r'optimizer: the toy backend has no pinned_host memory, only device'):
        check_host_memory(Device(), ('optimizer',))
    check_host_memory(Device(), ())
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'toy', dict(mesh_of().shape))
    with pytest.raises(UserError, match=r'q: offload: the devices have no pinned host memory\nkeep or recompute'):
        Transformer(request, options=decoder_options(**LLAMA, save={'q': 'offload'}))
    with pytest.raises(ValueError, match='input: keep or offload'):
        decoder_options(**LLAMA, save={'input': 'recompute'})
