"""`log.graph` writes the program at the start of a run."""

import gzip

import pytest

from pretrax import config_from_values, pretrain
from pretrax.view.program.file import TEXT, read_program
from runs import Quiet


def train_small(values, **log):
    progress = Quiet()
    pretrain(config_from_values(values | {'steps': 4, 'log': {'every': 1, **log}}), progress=progress)
    return [line for line in progress.said if line.startswith(('program: ', 'WARNING: '))]


def test_a_run_writes_its_program_as_a_page_a_picture_and_text(small, tmp_path):
    said = train_small(small, graph=True)
    directory = tmp_path / 'run' / 'program'
    assert sorted(path.name for path in directory.iterdir()) == [TEXT, 'program.html', 'program.svg']
    assert said == [f'program: {directory / "program.html"} (also program.svg and {TEXT})']
    program = read_program(directory / TEXT)
    assert program.mesh == {'r': 2, 'd': 2, 'e': 1, 'c': 1, 't': 2, 'p': 1}
    assert any(one.scope[:1] == ('optimizer',) for one in program.kernels())
    assert '<title>small</title>' in (directory / 'program.html').read_text()


def test_without_quickjs_the_page_is_written(small, tmp_path, monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    said = train_small(small, graph=True)
    directory = tmp_path / 'run' / 'program'
    assert said == [f'program: {directory / "program.html"} (also {TEXT})']
    assert sorted(path.name for path in directory.iterdir()) == [TEXT, 'program.html']


def test_a_run_that_is_traced_writes_the_text_alone(small, tmp_path):
    assert train_small(small, profile=1) == []
    assert [path.name for path in (tmp_path / 'run' / 'program').iterdir()] == [TEXT]


def test_a_trace_keeps_the_program_of_its_steps_when_the_batches_grow(small, tmp_path):
    growing = small | {'steps': 6, 'batch': {'tokens': [[0, 128], [5, 256]], 'sequence_length': 16}}
    pretrain(config_from_values(growing | {'log': {'every': 1, 'report': False, 'profile': 1}}), progress=Quiet())
    (trace,) = (tmp_path / 'run' / 'profile').rglob('steps.json')
    texts = [gzip.decompress((path / TEXT).read_bytes()) for path in (trace.parent, tmp_path / 'run' / 'program')]
    assert [b's32[2,16]' in text for text in texts] == [True, False]  # sequences per device x length
    assert [b's32[4,16]' in text for text in texts] == [False, True]


def test_a_picture_that_fails_is_a_warning(small, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError('no room\nat all')

    monkeypatch.setattr('pretrax.view.program.picture.write_picture', fail)
    assert train_small(small, graph=True) == [
        f'WARNING: {tmp_path / "run" / "program"}: the picture of the program was not written: no room'
    ]


@pytest.mark.parametrize('log', [{}, {'graph': False}])
def test_other_runs_write_nothing(small, tmp_path, log):
    assert train_small(small, **log) == []
    assert not (tmp_path / 'run' / 'program').exists()
