"""Checkpoints that cannot be written."""

import shutil
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import steps_in
from pretrax.errors import UserError
from runs import Quiet


class Blocked(Quiet):
    """From step 1 a file lies where the directory of checkpoints should be; at step `until` it is gone."""

    def __init__(self, run_dir, until=None):
        super().__init__()
        self.obstacle, self.until = Path(run_dir) / 'checkpoints', until

    def update(self, metrics):
        if metrics['step'] == 1:
            shutil.rmtree(self.obstacle, ignore_errors=True)
            self.obstacle.write_text('')
        if metrics['step'] == self.until:
            self.obstacle.unlink()


def test_a_failed_checkpoint_is_reported_and_retried(small):
    run = Path(small['run_dir'])
    progress = Blocked(run, until=3)
    values = small | {'checkpoint': {'every': 2}}
    result = pretrain(config_from_values(values), progress=progress)
    [warning] = [line for line in progress.said if 'no checkpoint could be written' in line]
    assert 'Training continues' in warning
    assert int(result.state.step) == 6
    assert steps_in(run / 'checkpoints') == [4, 6]


def test_a_failed_last_checkpoint_is_an_error(small):
    progress = Blocked(small['run_dir'])
    with pytest.raises(UserError, match='the state of step 2 is not saved'):
        pretrain(config_from_values(small | {'steps': 2, 'schedule': {}}), progress=progress)
