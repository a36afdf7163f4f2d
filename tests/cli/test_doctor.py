"""`pretrax doctor` on one machine."""

import os

import pytest

from doctored import doctored
from preloaded import run


def test_one_machine_without_a_configuration():
    found = run(['pretrax', 'doctor'], env=dict(os.environ) | {'XLA_FLAGS': ''})
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert {'open', 'devices', 'known', 'products', 'versions'} <= {
        line.split()[1] for line in lines if line[:2] == 'ok'
    }


@pytest.mark.slow
def test_too_few_open_files_end_with_1(tmp_path):
    found = doctored(tmp_path, before={0: ('prlimit', '--nofile=64:256')})
    assert found.codes == [1]
    [row] = found.bad('open files')
    assert row['status'] == 'failure'
    assert row['fix'].startswith('LimitNOFILE=')


def test_a_word_that_is_no_configuration(tmp_path):
    found = run(['pretrax', 'doctor', 'steps=3'], cwd=tmp_path)
    assert found.returncode == 2
    assert 'pretrax doctor CONFIG steps=3' in found.stderr
