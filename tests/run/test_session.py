"""Mistakes are found before the text is tokenized and before anything is written."""

from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.errors import UserError
from pretrax.run import setup
from runs import Quiet, documents, values  # noqa: F401  (fixtures)


def refusal(values, **changes):  # noqa: F811
    with pytest.raises(UserError) as refused:
        pretrain(config_from_values(values | changes), progress=Quiet())
    return str(refused.value)


@pytest.mark.parametrize(
    ('changes', 'answer'),
    [
        ({'init_from': 'runs/nope'}, 'neither a checkpoint nor a run'),
        ({'init_from': 'gpt2'}, 'write init_from=hf:gpt2'),
        ({'init_from': {'path': 'runs/nope', 'partial': True}}, 'neither a checkpoint nor a run'),
        ({'log': {'trackio': 'mine'}}, 'needs the package trackio'),
        ({'mesh': {'t': 8}}, 'is not divisible by mesh.t = 8'),
        ({'mesh': {'p': 8}}, 'mesh.p'),
    ],
    ids=str,
)
def test_a_mistake_is_found_before_the_data_is_opened(changes, answer, values, monkeypatch):  # noqa: F811
    def opened(*args):
        raise AssertionError('the data is opened')

    monkeypatch.setattr(setup, 'open_source', opened)
    assert answer in refusal(values, **changes)
    assert not Path(values['run_dir']).exists()


def test_a_mistake_leaves_no_new_directory_and_every_file_of_an_old_one(values, tmp_path):  # noqa: F811
    data = {'text': str(tmp_path / 'nope.txt')}
    assert 'no such file' in refusal(values, data=data)
    assert not Path(values['run_dir']).exists()
    Path(values['run_dir']).mkdir()
    (Path(values['run_dir']) / 'notes.txt').write_text('mine')
    assert 'no such file' in refusal(values, data=data)
    assert (Path(values['run_dir']) / 'notes.txt').read_text() == 'mine'


def test_a_directory_that_cannot_be_created_is_named(values, tmp_path):  # noqa: F811
    (tmp_path / 'file').touch()
    for place in ('/proc/nope', str(tmp_path / 'file')):
        assert refusal(values, run_dir=place).startswith(f'run_dir: {place} cannot be used')
