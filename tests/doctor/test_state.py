"""The size of checkpoints, before and after the run has begun."""

import jax
import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import check_sizes
from pretrax.doctor.findings import Context
from pretrax.doctor.state import checkpoint_size, state_bytes
from runs import Quiet

VALUES = {
    'name': 'a', 'model': {'n_layers': 2, 'd_model': 64, 'attention': {'n_heads': 2}}, 'data': {'name': 'synthetic',
    'vocab_size': 512},
    'steps': 1, 'batch': {'tokens': 128, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2},
    'mesh': {'r': 1, 'd': 8, 't': 1}, 'eval': {'every': 0}, 'log': {'report': False},
}  # fmt: skip


@pytest.mark.parametrize(
    'optimizer', ['adamw', *(pytest.param(name, marks=pytest.mark.slow) for name in ('sgd', 'adafactor'))]
)
def test_the_state_has_the_size_that_training_gives_it(optimizer, tmp_path):
    values = VALUES | {'run_dir': str(tmp_path / 'a'), 'optimizer': {'name': optimizer, 'learning_rate': 1e-2}}
    result = pretrain(config_from_values(values), progress=Quiet())
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(result.state))
    found, note = state_bytes(config_from_values(values))
    assert found == pytest.approx(real, rel=1e-3)
    assert note == ''


def test_the_newest_checkpoint_is_measured(tmp_path):
    config = config_from_values(VALUES | {'run_dir': str(tmp_path / 'a')})
    [before] = checkpoint_size(Context(config))
    pretrain(config, progress=Quiet())
    [after] = checkpoint_size(Context(config))
    assert before.result.endswith('each, 3 kept; they fit')
    assert 'as the newest' in after.result
    files = check_sizes(tmp_path / 'a' / 'checkpoints', 1).files
    assert sum(file.size for file in files.values()) > 0
