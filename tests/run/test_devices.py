"""Platforms that are not here."""

import os
import subprocess
import sys

import pytest

from runs import write_yaml


@pytest.mark.slow
@pytest.mark.parametrize('platform', ['cuda', 'tpu', 'nonsense'])
def test_a_platform_that_is_not_here_is_named(platform, small, tmp_path):
    config = write_yaml(
        small | {'model': {'name': 'transformer', 'n_layers': 1, 'd_model': 8, 'attention': {'n_heads': 1}}},
        tmp_path / 'run.yaml',
    )
    done = subprocess.run(
        [sys.executable, '-m', 'pretrax', 'train', config],
        env=os.environ | {'JAX_PLATFORMS': platform},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert f'JAX_PLATFORMS={platform}: JAX finds no such device' in done.stderr
    assert 'Traceback' not in done.stderr
