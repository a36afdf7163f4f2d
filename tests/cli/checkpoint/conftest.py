"""A run with checkpoints, once for all tests of `pretrax checkpoint`."""

import shutil

import pytest

from pretrax import config_from_values, pretrain
from runs import Quiet, small_values, write_documents


@pytest.fixture(scope='session')
def whole(tmp_path_factory):
    """A run, its configuration, and how it ended."""
    directory = tmp_path_factory.mktemp('checkpoints')
    values = small_values(write_documents(directory), directory)
    values |= {
        'mesh': {'r': 8, 'd': 1, 't': 1}, 'checkpoint': {'every': 2, 'keep': 2, 'keep_best': 1},
        'eval': {'every': 2, 'batches': 1}, 'optimizer': {'learning_rate': 0.1},
    }  # fmt: skip
    pretrain(config_from_values(values | {'steps': 8}), progress=Quiet())
    return directory / 'run'


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'copy')
