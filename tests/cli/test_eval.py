"""`pretrax eval`: a run, all its checkpoints, and its export give the same numbers."""

import json
import math
import shutil
import sys

import pytest

from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.data.tokenizers.tokenizer_files import load_tokenizer
from pretrax.view.record.run_record import read_run
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
    assert logprobs[0] == pytest.approx(logprobs[1], rel=1e-5)


@pytest.mark.slow
def test_texts_of_the_user(values, tmp_path, monkeypatch):
    """Of a model that is not trained yet: a uniform guess costs log2(vocabulary) bits a token."""
    monkeypatch.chdir(tmp_path)
    pretrain(config_from_values(values | {'steps': 1, 'schedule': {'warmup': 0}}), progress=Quiet())
    (tmp_path / 'law.txt').write_text('The parties agree. ' * 150)
    (tmp_path / 'web.jsonl').write_text('{"text": "Click here"}\n{"text": "or there", "n": 1}\n')
    ended_with(['eval', 'run', '--text', 'law=law.txt', '--text', 'web=web.jsonl', '--json', 'found.json'])
    found = json.loads((tmp_path / 'found.json').read_text())['results']['run@1']['tasks']
    assert {name: one['bits_per_byte']['documents'] for name, one in found.items()} == {'law': 2, 'web': 2}
    tokenizer = load_tokenizer(next((tmp_path / 'run' / 'data').glob('tokens-*')))
    text = 'Click hereor there'
    tokens = len(tokenizer.encode('Click here')) + len(tokenizer.encode('or there'))
    uniform = tokens * math.log2(tokenizer.vocab_size) / len(text)
    assert found['web']['bits_per_byte']['value'] == pytest.approx(uniform, rel=0.1)


@pytest.mark.slow
def test_follow_evaluates_each_checkpoint_once(values, tmp_path, monkeypatch, capsys):
    """While the run trains, and again after a stop:
    its numbers are those of `eval` afterwards, in the record of the run.
    """
    pretrain(config_from_values(values | {'checkpoint': {'every': 3}}), progress=Quiet())
    run, whole = tmp_path / 'run', tmp_path / 'whole'
    run.rename(whole)
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns('3', '6'))
    command = ['eval', str(run), '--follow', *FLAGS]
    waits = []

    def train_on(seconds):
        waits.append(seconds)
        step = str(3 * len(waits))
        shutil.copytree(whole / 'checkpoints' / step, run / 'checkpoints' / step)

    monkeypatch.setattr('pretrax.weights.evaluated.time.sleep', train_on)
    ended_with(command)
    assert len(waits) == 2
    printed = capsys.readouterr()
    assert [line.split()[3] for line in printed.out.splitlines() if line.startswith('task')] == ['run@3', 'run@6']
    assert printed.err.count('waiting for checkpoints') == 1
    ended_with(['eval', str(run), '--all-checkpoints', '--json', str(tmp_path / 'later.json'), *FLAGS])
    later = json.loads((tmp_path / 'later.json').read_text())['results']
    record = read_run(run)
    column = record.metrics['task/cloze/logprob']
    assert column.steps.tolist() == [3, 6]
    assert column.values.tolist() == [later[f'run@{step}']['tasks']['cloze']['logprob']['value'] for step in (3, 6)]
    assert not record.warnings
    capsys.readouterr()
    ended_with(command)  # nothing is left to do
    assert capsys.readouterr().out == ''
    shutil.rmtree(run / 'checkpoints' / '6')
    lines = (run / 'evaluations.jsonl').read_text().splitlines(keepends=True)
    (run / 'evaluations.jsonl').write_text(lines[0][:40])  # a kill while the first line was written
    monkeypatch.setattr('pretrax.weights.evaluated.time.sleep', lambda seconds: sys.exit(7))
    ended_with(command, code=7)
    assert read_run(run).metrics['task/cloze/logprob'].steps.tolist() == [3]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['run'], 'run: no such run'),
        (['a', 'b'], 'the checkpoints of one run'),
        (['run', '--all-checkpoints'], 'the checkpoints of one run'),
        (['run', '--harness', 'x'], 'not on --harness'),
    ],
)
def test_follow_needs_one_run(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ended_with(['eval', '--follow', *arguments], code=2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--tasks', 'arithmetics'], "there is no task 'arithmetics'\n  did you mean arithmetic?"),
        (['--lengths', '8,x'], '--lengths 8,x: expected numbers'),
        (['--text', 'law.txt'], '--text law.txt: expected a name and a file'),
        (['--text', 'cloze=law.txt'], 'there is another task cloze'),
        (['--text', 'law=law.txt'], 'law.txt: no such file'),
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


@pytest.mark.nightly
def test_tasks_of_the_harness(values, tmp_path, capsys):
    pretrain(config_from_values(values), progress=Quiet())
    documents = [{'question': f'{n} + 1 =', 'choices': [' a', ' b'], 'answer': n % 2} for n in range(6)]
    (tmp_path / 'sums.jsonl').write_text(''.join(json.dumps(one) + '\n' for one in documents))
    (tmp_path / 'sums.yaml').write_text(
        f"""task: local_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/sums.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    run, out, flags = str(tmp_path / 'run'), tmp_path / 'out.json', ['--harness-tasks', str(tmp_path)]
    ended_with(['eval', run, '--harness', 'local_sums', '--limit', '4', '--json', str(out), *flags])
    (found,) = json.loads(out.read_text())['results'].values()
    assert found['n-samples'] == {'local_sums': {'original': 6, 'effective': 4}}
    assert found['results']['local_sums']['acc,none'] in (0, 0.25, 0.5, 0.75, 1)
    assert '|local_sums|' in capsys.readouterr().out.replace(' ', '')
    ended_with(['eval', run, '--harness', 'local_sum', *flags], 2)
    assert "--harness: there is no task 'local_sum'; did you mean local_sums?" in capsys.readouterr().err
