"""`pretrax distill prepare`: a run that reads what its teacher said before learns what it learns from the teacher
itself.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from launched import environment
from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.distill import preparation
from pretrax.distill.files import DESCRIPTION, TeacherFiles
from pretrax.distill.preparation import prepare_cache
from pretrax.errors import UserError
from pretrax.run.setup import prepare
from runs import Quiet, StoppedAt, lines_of, small_values, without_clock, write_documents, write_yaml

STUDENT = {'n_layers': 1, 'd_model': 8, 'attention': {'n_heads': 2}}
VOCAB = 300


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    """The values of a trained run."""
    directory = tmp_path_factory.mktemp('teacher')
    values = small_values(write_documents(directory), directory) | {'mesh': {'r': 8}, 'steps': 3}
    pretrain(config_from_values(values), progress=Quiet())
    return values


@pytest.fixture(scope='module')
def cache(teacher, tmp_path_factory):
    """All tokens of the vocabulary, for six steps, prepared on one mesh."""
    out = tmp_path_factory.mktemp('cache') / 'all'
    values = student_of(teacher, out.parent, 'prepares', teacher=teacher['run_dir']) | {
        'mesh': {'d': 2, 't': 2, 'c': 2}
    }
    assert prepare_cache(config_from_values(values), out, VOCAB, lambda text: None).rows == 48
    return out


def student_of(teacher, directory, name='student', /, **distill):
    section = {'temperature': 2.0, 'weight': 0.7} | distill
    run = {'name': name, 'run_dir': str(directory / name), 'model': STUDENT, 'distill': section, 'steps': 6}
    return teacher | run


def train(values, progress=None, **arguments):
    progress = progress or Quiet()
    pretrain(config_from_values(values), progress=progress, **arguments)
    return progress.said


def losses(values):
    return [[line[name] for name in ('loss', 'nll', 'distillation')] for line in lines_of(values)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('mesh', 'tokens'), [({'d': 4, 't': 2}, 256), pytest.param({'r': 8}, 128, marks=pytest.mark.nightly)]
)
def test_all_tokens_offline_train_as_online_on_another_mesh_with_other_batches(teacher, cache, tmp_path, mesh, tokens):
    changes = {'mesh': mesh, 'batch': {'tokens': tokens, 'sequence_length': 16}, 'steps': 768 // tokens}
    online = student_of(teacher, tmp_path, 'online', teacher=teacher['run_dir']) | changes
    offline = student_of(teacher, tmp_path, 'offline', cache=str(cache)) | changes
    for values in (online, offline):
        train(values)
    assert len(losses(offline)) == changes['steps']
    # A divergence is a sum of differences of logarithms near -5.7, and an f32 of that size is exact to 5e-7
    np.testing.assert_allclose(losses(offline), losses(online), rtol=2e-5, atol=5e-7)


@pytest.mark.slow
def test_a_run_resumes_exactly_and_another_cache_is_refused(teacher, cache, tmp_path):
    changes = {'mesh': {'r': 2, 't': 2, 'd': 2}, 'batch': {'tokens': 128, 'sequence_length': 16, 'micro': 1}}
    own = tmp_path / 'cache'
    shutil.copytree(cache, own)
    whole, parts = (student_of(teacher, tmp_path, name, cache=str(own)) | changes for name in ('whole', 'parts'))
    train(whole)
    train(parts, StoppedAt(3))
    said = train(parts)
    assert any('resuming from step' in line for line in said)
    lines, again = (list(map(without_clock, lines_of(values))) for values in (whole, parts))
    assert [(line['step'], line['loss'], line['distillation']) for line in lines] == [
        (line['step'], line['loss'], line['distillation']) for line in again
    ]
    description = json.loads((own / DESCRIPTION).read_text())
    (own / DESCRIPTION).write_text(json.dumps(description | {'teacher': 'another'}))
    with pytest.raises(UserError, match='was trained with another teacher than that of'):
        train(parts)


def test_an_interrupted_preparation_continues(teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preparation, 'PART_BYTES', 1)
    values = student_of(teacher, tmp_path, teacher=teacher['run_dir']) | {
        'batch': {'tokens': 128, 'sequence_length': 16}
    }

    def interrupt(text):
        if '16 rows' in text:
            raise KeyboardInterrupt

    config = config_from_values(values)
    with pytest.raises(KeyboardInterrupt):
        prepare_cache(config, tmp_path / 'parts', 5, interrupt)
    assert len(TeacherFiles(tmp_path / 'parts')) == 16
    short = prepare(config, lambda text: None)
    assert short.teaching is not None
    short.teaching.files = TeacherFiles(tmp_path / 'parts')
    with pytest.raises(UserError, match=r'has 0 of 8 rows of a batch: .*\nrun `pretrax distill prepare`'):
        short.teaching.begin(short, lambda text: None)
    typed = ['distill', 'prepare', write_yaml(values, tmp_path / 'config.yaml'), '--out', str(tmp_path / 'parts')]
    with pytest.raises(SystemExit) as ended:
        main([*typed, '--top-k', '5'])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert '32 new rows' in said
    assert 'continues after 16 rows' in said
    assert '48 rows, 38 bytes per token' in said
    one = prepare_cache(config, tmp_path / 'whole', 5, lambda text: None)
    assert (one.rows, one.new_rows) == (48, 48)
    parts, whole = TeacherFiles(tmp_path / 'parts'), TeacherFiles(tmp_path / 'whole')
    host = prepare(config, lambda text: None).source.batch(0, slice(0, 48), 48)
    for found, expected in zip(parts.read(host), whole.read(host), strict=True):
        np.testing.assert_array_equal(found, expected)
    mass = np.exp(whole.read(host).log_probs).sum(-1) + np.exp(whole.read(host).log_tail)
    np.testing.assert_allclose(mass, 1, rtol=1e-5)
    assert 0.01 < one.tail < 0.99


# `pretrax`, with a part after every batch. KILLED=N ends the process while it writes its Nth file, as kill -9 does.
PROGRAM = """
import os, signal
import numpy as np
from pretrax.cli import main
from pretrax.distill import preparation
preparation.PART_BYTES = 1
save, files = np.save, []
def counted(file, array, **more):
    save(file, array, **more)
    files.append(file)
    if len(files) == int(os.environ.get('KILLED', 0)):
        os.kill(os.getpid(), signal.SIGKILL)
np.save = counted
main()
"""


@pytest.mark.slow
def test_two_processes_that_are_killed_continue_and_write_what_one_process_writes(teacher, tmp_path):
    values = student_of(teacher, tmp_path, teacher=teacher['run_dir'])
    values |= {'batch': {'tokens': 128, 'sequence_length': 16}, 'faults': {'heartbeat_seconds': 3}}
    together = write_yaml(values | {'mesh': {'r': 2}, 'processes': {'count': 2}}, tmp_path / 'config.yaml')
    out = tmp_path / 'parts'

    def prepared_by_two(**changes):
        with socket.socket() as one:
            one.bind(('127.0.0.1', 0))
            coordinator = f'processes.coordinator=127.0.0.1:{one.getsockname()[1]}'
        command = [
            sys.executable,
            '-c',
            PROGRAM,
            'distill',
            'prepare',
            together,
            coordinator,
            '--out',
            str(out),
            '--top-k',
            '5',
        ]
        with contextlib.ExitStack() as stack:
            both = [
                stack.enter_context(
                    subprocess.Popen(
                        [*command, f'processes.index={i}'],
                        env=environment(**changes),
                        text=True,
                        stdout=subprocess.PIPE,
                    )
                )
                for i in (0, 1)
            ]
            said = both[0].communicate()[0]
            if changes:
                both[1].kill()
            return said, [process.wait() for process in both]

    _, codes = prepared_by_two(KILLED='10')  # two files of the third part are written
    assert codes[0] == -signal.SIGKILL
    assert len(TeacherFiles(out)) == 16
    said, codes = prepared_by_two()
    assert codes == [0, 0]
    assert 'continues after 16 rows' in said
    assert '32 new rows' in said
    config = config_from_values(values | {'mesh': {'r': 8}})
    assert prepare_cache(config, tmp_path / 'whole', 5, lambda text: None).rows == 48
    host = prepare(config, lambda text: None).source.batch(0, slice(0, 48), 48)
    parts, whole = TeacherFiles(out), TeacherFiles(tmp_path / 'whole')
    np.testing.assert_array_equal(parts.rows, whole.rows)
    assert len(set(parts.rows.tolist())) == 48
    for found, expected in zip(parts.read(host), whole.read(host), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'distill': {'temperature': 1.0}}, r'distill.temperature = 2, and the run has 1\nuse distill.temperature=2'),
        ({'batch': {'tokens': 128, 'sequence_length': 8}}, r'batch.sequence_length = 16, and the run has 8\nuse'),
        ({'data': {'vocab_size': 280}}, r'prepared with another tokenizer: .*\nprepare it again: pretrax distill'),
        ({'data': {'validation': 0.3}}, r'prepared with another data: .*\nprepare it again: pretrax distill'),
        ({'distill': {'cache': 'nowhere'}}, r'nowhere has no teacher.json\nwrite it first'),
        ({'distill': {'teacher': 'runs/teacher'}}, r'distill.cache is given, but distill.teacher is given too'),
        ({'distill': {'cache': None}}, r'distill.teacher is missing'),
        (
            {'distill': {'hidden': {'layers': [[0, 0]]}}},
            r'distill.hidden needs a teacher that runs: distill.cache has no',
        ),
    ],
)
def test_what_was_prepared_for_another_run_is_refused(teacher, cache, tmp_path, changes, said):
    values = student_of(teacher, tmp_path, cache=str(cache))
    values |= {name: values.get(name, {}) | change for name, change in changes.items()}
    with pytest.raises(UserError, match=said) as refused:
        prepare(config_from_values(values), lambda text: None)
    assert len(str(refused.value).splitlines()) <= 10


def test_what_cannot_be_prepared_is_refused(teacher, cache, tmp_path):
    values = student_of(teacher, tmp_path, teacher=teacher['run_dir'])
    grows = {'batch': {'tokens': 128, 'sequence_length': [[0, 8], [3, 16]]}}
    for changes, k, said in (
        ({'distill': None}, 5, 'needs a teacher'),
        (grows, 5, 'sequence_length grows'),
        ({}, 301, '--top-k 301: the vocabulary has 300 tokens'),
        ({}, 5, 'was prepared with another top_k: 300 there, 5 now'),
    ):
        with pytest.raises(UserError, match=said):
            prepare_cache(config_from_values(values | changes), cache, k, lambda text: None)
