"""`pretrax data show`: the rows are those that the step saw; what cannot be shown is an error that says why."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pretrax.cli import main
from pretrax.config import from_values, resolved_yaml
from pretrax.errors import UserError
from pretrax.run.loop import train
from pretrax.run.saving import _described
from pretrax.run.seen_batch import batch_of_step, seen_batch
from pretrax.run.setup import prepare
from runs import BIGRAM, Quiet


@pytest.fixture
def mixed(values, tmp_path):
    """A run on two sources. One of them has only capital letters."""
    text = Path(values['data']['text'])
    loud = tmp_path / 'loud.jsonl'
    loud.write_text(text.read_text().upper().replace('"TEXT"', '"text"'))
    sources = [{'name': 'quiet', 'weight': 3, 'text': str(text)}, {'name': 'loud', 'weight': 1, 'text': str(loud)}]
    data = {'tokenizer': 'bytes', 'validation': 0, 'mixture': sources}
    return values | {'model': BIGRAM, 'data': data, 'steps': 2, 'mesh': {'r': 8}}


def lines_of_metrics(directory, *records):
    directory.mkdir(exist_ok=True)
    (directory / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))


def test_the_batch_of_a_step_follows_the_newest_line_before_it(tmp_path):
    lines = [{'step': 1, 'batch': 0}, {'step': 5, 'val_loss': 1.0}, {'step': 6, 'batch': 8}, {'step': 9, 'batch': 11}]
    lines_of_metrics(tmp_path, *lines)
    assert [batch_of_step(tmp_path, step, print) for step in range(1, 10)] == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    lines_of_metrics(tmp_path, {'step': 110, 'batch': 112})  # a run that continues the count of another
    assert batch_of_step(tmp_path, 101, print) == 103


def test_a_run_without_batch_numbers_is_reported(tmp_path):
    said = []
    lines_of_metrics(tmp_path, {'step': 7})
    assert batch_of_step(tmp_path, 3, said.append) == 2
    assert 'never rolled back' in said[0]


@pytest.mark.parametrize('step', [0, -1, 8])
def test_a_step_that_was_not_done_is_an_error(tmp_path, step):
    lines_of_metrics(tmp_path, {'step': 7, 'batch': 6})
    with pytest.raises(UserError, match='it has done the steps 1 to 7'):
        batch_of_step(tmp_path, step, print)


def test_rows_are_shown_with_their_source(mixed, capsys):
    train(from_values(mixed), progress=Quiet())
    seen = seen_batch(mixed['run_dir'], 2, None, print)
    sources = seen.source_of_rows(99)
    assert {'quiet', 'loud'} == set(sources)
    for name, tokens in zip(sources, seen.rows(99).tokens.tolist(), strict=True):
        letters = bytes(token for token in tokens if token < 256).decode()
        assert letters == (letters.upper() if name == 'loud' else letters.lower())
    with pytest.raises(SystemExit) as ended:
        main(['data', 'show', mixed['run_dir'], '--step', '2', '--rows', '3'])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith('batch 1 of step 2: 8 rows of 16 tokens; the first 3:\n')
    assert [line.partition('from ')[2] for line in out.splitlines() if line.startswith('row')] == sources[:3]


def test_a_text_that_has_changed_is_an_error(mixed):
    train(from_values(mixed), progress=Quiet())
    loud = Path(mixed['data']['mixture'][1]['text'])
    loud.write_text(loud.read_text().replace('A', 'B'))
    with pytest.raises(UserError, match='has changed since'):
        seen_batch(mixed['run_dir'], 1, None, print)


def test_an_island_shows_the_rows_of_its_share(values, monkeypatch, tmp_path):
    config = from_values(values | {'federation': {'bucket': str(tmp_path / 'shared'), 'islands': 3}})
    run = prepare(config, print)
    (run.run_dir / 'config.yaml').write_text(resolved_yaml(config))
    with pytest.raises(UserError, match='an island without a checkpoint'):
        seen_batch(str(run.run_dir), None, 4, print)
    session = SimpleNamespace(run=run.with_share(2), island=None)
    described = _described(session, SimpleNamespace(batch=5))
    monkeypatch.setattr('pretrax.run.seen_batch.steps_in', lambda directory: [5])
    monkeypatch.setattr('pretrax.run.seen_batch.read_description', lambda directory, step: described)
    seen = seen_batch(str(run.run_dir), None, 4, print)
    assert seen.rows(99).tokens.tolist() == np.asarray(run.with_share(2).batch(4).tokens).tolist()
    whole = run.source.batch(4, slice(None), 3 * seen.n_rows)
    assert seen.rows(99).tokens.tolist() == whole.tokens[2::3].tolist()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--step', '1'], 'no run is there'),
        ([], 'give --step N or --batch N'),
        (['--step', '1', '--batch', '0'], 'give --step N or --batch N'),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(['data', 'show', str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
