"""`pretrax eval`: a run, all its checkpoints, and its export give the same numbers."""

import json

import pytest

from pretrax import config_from_values, pretrain
from pretrax.cli import main
from runs import BIGRAM, Quiet

FLAGS = ['--tasks', 'arithmetic,cloze,code_parses', '--limit', '2']


def ended_with(arguments, code=0):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code


@pytest.mark.slow
def test_checkpoints_and_an_export(values, tmp_path, capsys):
    values['checkpoint'] = {'every': 3}
    pretrain(config_from_values(values), progress=Quiet())
    run, out = str(tmp_path / 'run'), tmp_path / 'results.json'
    ended_with(['eval', run, '--all-checkpoints', '--json', str(out), *FLAGS])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ['task', 'metric', 'documents', 'run@3', 'run@6']
    found = json.loads(out.read_text())['results']
    assert list(found) == ['run@3', 'run@6']
    assert found['run@3'] != found['run@6']
    assert not found['run@6']['failed']
    ended_with(['export', run, str(tmp_path / 'exported')])
    ended_with(['eval', f'{run}/checkpoints/6', str(tmp_path / 'exported'), '--json', str(out), *FLAGS])
    again = json.loads(out.read_text())['results']
    assert again['run@6'] == found['run@6']
    logprobs = [one['tasks']['cloze']['logprob']['value'] for one in again.values()]
    assert logprobs[0] == pytest.approx(logprobs[1], rel=1e-3)  # on some CPUs, an import computes in bf16


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--tasks', 'arithmetics'], "there is no task 'arithmetics'\n  did you mean arithmetic?"),
        (['--lengths', '8,x'], '--lengths 8,x: expected numbers'),
        (['nowhere'], 'nowhere: no such run or checkpoint'),
    ],
)
def test_mistakes(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ended_with(['eval', *([] if arguments == ['nowhere'] else ['run']), *arguments], code=2)
    assert message in capsys.readouterr().err


def test_a_list_of_tasks(capsys):
    ended_with(['eval', '--list'])
    assert 'arithmetic       sums and differences' in capsys.readouterr().out


def test_tokens_without_a_tokenizer(values, tmp_path, capsys):
    """One clear message, and exit code 2."""
    values['data'] = {'name': 'synthetic', 'vocab_size': 64}
    pretrain(config_from_values(values | {'sample': {'every': 0}, 'model': BIGRAM}), progress=Quiet())
    ended_with(['eval', str(tmp_path / 'run')], code=2)
    assert 'has no tokenizer' in capsys.readouterr().err
