"""Checkpoints that cannot be written."""

from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import steps_in
from pretrax.errors import UserError
from runs import At, Quiet


def test_a_failed_checkpoint_is_reported_and_retried(small):
    """A file lies where the directory of checkpoints should be; at step 3 it is gone."""
    run = Path(small['run_dir'])
    run.mkdir()
    obstacle = run / 'checkpoints'
    progress = At(3, obstacle.unlink)
    values = small | {'checkpoint': {'every': 2}}
    obstacle.write_text('')
    result = pretrain(config_from_values(values), progress=progress)
    [warning] = [line for line in progress.said if 'no checkpoint could be written' in line]
    assert 'Training continues' in warning
    assert int(result.state.step) == 6
    assert steps_in(run / 'checkpoints') == [4, 6]


def test_a_failed_last_checkpoint_is_an_error(small):
    run = Path(small['run_dir'])
    run.mkdir()
    (run / 'checkpoints').write_text('')
    progress = Quiet()
    with pytest.raises(UserError, match='the state of step 2 is not saved'):
        pretrain(config_from_values(small | {'steps': 2, 'schedule': {}}), progress=progress)
