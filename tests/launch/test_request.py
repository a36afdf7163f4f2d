"""What is refused before anything is submitted."""

from pathlib import Path

import pytest

from pretrax import config_from_values
from pretrax.errors import UserError
from pretrax.launch.sizes import check_request
from pretrax.launch.slurm import is_on_one_machine
from pretrax.storage import locate


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'mesh': {'d': 8}}, '4 nodes with 1 device each, 4 in all: '),
        ({'mesh': {}, 'processes': {'count': 3}}, 'processes.count is 3, but there are 4 nodes'),
        ({'mesh': {}, 'processes': {'index': 0}}, 'the launcher sets'),
        ({'mesh': {}, 'batch': {'tokens': 96, 'sequence_length': 16}}, '4 nodes with 1 device each, 4 in all: '),
    ],
)
def test_a_run_that_does_not_fit_is_refused(values, changes, words):
    with pytest.raises(UserError) as refused:
        check_request(config_from_values(values | changes), 4, 1)
    assert str(refused.value).startswith(words) or words in str(refused.value)
    assert len(refused.value.short_text().splitlines()) <= 10


def test_a_run_that_fits_is_accepted(values):
    check_request(config_from_values(values), 4, 2)
    check_request(config_from_values(values | {'mesh': {}}), 8, 1)


def test_a_directory_of_one_machine_is_recognized(monkeypatch, tmp_path):
    assert is_on_one_machine(Path('/tmp/runs/base'))
    assert not is_on_one_machine(Path('/home/me/runs/base'))
    assert not is_on_one_machine(locate('gs://bucket/base'))
    monkeypatch.chdir('/tmp')
    assert is_on_one_machine(Path('runs/base'))
