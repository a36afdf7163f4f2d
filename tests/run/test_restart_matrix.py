"""A state written on so many devices goes on, on so many others, as it would have on the first ones.

What each process reads is in `test_processes.py::test_one_stream_of_tokens_whatever_number_of_processes_resumes`.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoint.test_store import DESCRIPTION, recipe
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import Checkpoints, restore
from pretrax.distill.preparation import prepare_cache
from pretrax.train.state import abstract_state, init_state
from pretrax.train.step import make_step
from run.test_processes import run_together
from runs import Quiet, StoppedAt, lines_of, small_values, without_clock, write_documents
from small import mesh_of, random_batch

MESHES = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 2, 2)}
FIRST, LAST = 2, 4


@pytest.fixture(scope='module')
def steps():
    """The compiled step for each number of devices."""
    found = {}
    for n, mesh in MESHES.items():
        with jax.set_mesh(mesh_of(*mesh)):
            found[n] = make_step(recipe()).lower(abstract_state(recipe()), random_batch(8, 0)).compile()
    return found


@pytest.fixture(scope='module')
def written(steps, tmp_path_factory):
    """A checkpoint of step 2 for each number of devices, and the losses of the steps after it there."""
    found = {}
    for n, mesh in MESHES.items():
        directory = tmp_path_factory.mktemp(f'from-{n}')
        with jax.set_mesh(mesh_of(*mesh)):
            state = init_state(recipe(), 0)
            for number in range(FIRST):
                state, _ = steps[n](state, random_batch(8, number))
            checkpoints = Checkpoints(directory, 1)
            checkpoints.save(FIRST, state, DESCRIPTION)
            checkpoints.close()
            found[n] = directory, go_on(steps[n], state)
    return found


def go_on(step, state):
    losses = []
    for number in range(FIRST, LAST):
        state, metrics = step(state, random_batch(8, number))
        losses.append(float(metrics['loss']))
    return losses


@pytest.mark.parametrize('after', MESHES)
@pytest.mark.parametrize('before', MESHES)
def test_a_run_goes_on_with_another_number_of_devices(before, after, steps, written):
    directory, expected = written[before]
    with jax.set_mesh(mesh_of(*MESHES[after])):
        losses = go_on(steps[after], restore(directory, FIRST, abstract_state(recipe())))
    if before == after:
        assert losses == expected  # to the last bit
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses != [losses[0]] * len(losses)


TEACHER = f'hf:{Path(__file__).parents[1] / "goldens" / "llama2"}'

# Its losses are nearly equal, but those of steps 52 and 53 are spikes. The run moves between them and the rollback.
SPIKES = """
import numpy as np
from pretrax.config import register
from pretrax.data.batches.synthetic import SyntheticSource

@register('data', 'spiky')
class Spiky(SyntheticSource):
    def __init__(self, request):
        super().__init__(request, 96, 20)

    def batch(self, step, rows, batch_rows):
        batch = super().batch(step, rows, batch_rows)
        if step in (51, 52):
            batch.targets[:] = 95 - batch.targets
        return batch
"""

# What to change in `values` for each feature. DIRECTORY is that of the test.
FEATURES = {
    'a delta net and an average of the weights': {
        'model': {'n_layers': 2, 'layer_types': ['delta', 'full'], 'recurrent': {'n_heads': 4, 'd_head': 8,
        'd_key': 8}},
        'optimizer': {'ema_decay': 0.9},
    },
    'mamba and muon': {
        'model': {'n_layers': 2, 'layer_types': ['mamba', 'full'], 'recurrent': {'n_heads': 4, 'd_head': 8,
        'd_key': 8}},
        'optimizer': {'name': 'muon'},
    },
    'experts whose router has biases, and predictions of two tokens': {
        'model': {'experts': {'n_experts': 4, 'experts_per_token': 2, 'router': {'balance_loss': 0.01, 'bias': True,
        'bias_rate': 0.01}}, 'multi_token': {'n_layers': 1, 'loss': 0.3}},
        'mesh': {'d': 2, 'e': 2},
    },
    'schedule-free and a teacher': {
        'optimizer': {'name': 'schedule_free'},
        'distill': {'teacher': TEACHER, 'temperature': 2.0},
    },
    'soap and what a teacher said before': {
        'optimizer': {'name': 'soap'},
        'distill': {'cache': 'DIRECTORY/cache', 'temperature': 2.0},
    },
    'growing batches and frozen weights': {
        'batch': {'tokens': [[0, 128], [2, 256], [5, 512]], 'sequence_length': [[0, 8], [4, 16]]},
        'optimizer': {
            'freeze': ['layers.[qk]'], 'groups': [{'match': 'embed', 'learning_rate_scale': 0.5, 'weight_decay': 0}]
        },
    },
    'a loss that fp16 scales': {'precision': {'compute': 'fp16', 'loss_scale': 2.0**30, 'loss_scale_steps': 2}},
    'a mixture with two ways of packing': {
        'data': {
            'name': 'text', 'tokenizer': 'bytes', 'vocab_size': None, 'validation': 0, 'packing': 'best_fit',
            'mixture': [
                {'name': 'rows', 'weight': [[0, 1], [6, 4]], 'text': 'DIRECTORY/documents.jsonl'},
                {'name': 'windows', 'weight': 2, 'text': 'DIRECTORY/documents.jsonl', 'packing': 'concatenate'},
            ],
        },
    },
    'a stream of text, and the noise scale': {
        'data': {
            'name': 'text', 'text': 'DIRECTORY/documents.jsonl', 'tokenizer': 'bytes', 'streaming': True,
            'validation_documents': 0,
        },
        'log': {'every': 1, 'report': False, 'noise_scale': 1},
    },
    'two spikes, and a rollback': {
        'plugins': ['DIRECTORY/spikes.py'], 'data': {'name': 'spiky'}, 'steps': 55,
        'faults': {'spike': 4.0, 'rollback_after': 2}, 'checkpoint': {'every': 50}, 'optimizer': {'ema_decay': 0.9},
    },
    'a module of NNX with dropout': {
        'model': {'name': 'nnx', 'target': 'nnx_modules:Plain', 'arguments': {'rate': 0.1}}, 'mesh': {'d': 4},
    },
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize('feature', FEATURES)
def test_a_feature_goes_on_in_two_processes_on_another_mesh(feature, tmp_path):
    """Eight devices of one process train the first steps, four devices of two processes the others.

    The run that it is compared with stays in one process.
    """
    write_documents(tmp_path)
    (tmp_path / 'spikes.py').write_text(SPIKES)
    more = json.loads(json.dumps(FEATURES[feature]).replace('DIRECTORY', str(tmp_path)))
    last = more.get('steps', 6)
    then = more.pop('mesh', {'d': 2, 't': 2})
    values = small_values('none', tmp_path) | {'data': {'name': 'synthetic', 'vocab_size': 96}} | more
    values |= {'mesh': {'d': 8}, 'schedule': {'name': 'constant', 'warmup': 2}}
    if more.get('model', {}).get('name') != 'nnx':
        sizes = {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}}
        values['model'] = sizes | more.get('model', {})
    values['optimizer'] = {'learning_rate': 1e-2, 'weight_decay': 0.1} | more.get('optimizer', {})
    if cache := values.get('distill', {}).get('cache'):
        said = values | {'distill': {'teacher': TEACHER, 'temperature': 2.0}, 'run_dir': str(tmp_path / 'says')}
        prepare_cache(config_from_values(said), Path(cache), 96, lambda _: None)

    straight = pretrain(config_from_values(values), progress=Quiet()).state
    moved = values | {'run_dir': str(tmp_path / 'moved')}
    pretrain(config_from_values(moved), progress=StoppedAt(last - 3))
    config = tmp_path / 'moved.yaml'
    config.write_text(json.dumps(moved | {'mesh': {'r': 1, 'd': 1} | then}))
    run_together(config, tmp_path / 'moved', last, 2, 4, '--allow-changes')

    expected, found = (list(map(without_clock, lines_of(run))) for run in (values, moved))
    assert [line['step'] for line in found] == [line['step'] for line in expected]
    close = {'rtol': 3e-3} if values['precision']['compute'] == 'fp16' else {'rtol': 1e-5}
    for before, after in zip(expected, found, strict=True):
        assert after.keys() == before.keys()
        np.testing.assert_allclose(list(after.values()), list(before.values()), **close, err_msg=str((before, after)))
    kept = restore(tmp_path / 'moved' / 'checkpoints', last, jax.tree.map(like, straight._replace(constants=None)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        *(jax.device_get(state._replace(constants=None)) for state in (kept, straight)),
    )


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
