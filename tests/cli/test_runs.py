"""`pretrax runs`: the list has what the files of the runs say, whatever state they are in."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.view import run_list
from pretrax.view.report import write_report
from pretrax.view.run_list import list_runs, select

EVENTS = {
    'finished': [{'time': 1.0, 'event': 'began', 'step': 0}, {'time': 9.0, 'event': 'finished', 'step': 20}],
    'failed': [
        {'time': 1.0, 'event': 'began', 'step': 0},
        {'time': 9.0, 'event': 'failed', 'step': 5, 'why': 'the loss was NaN'},
    ],
    'lost': [{'time': 1.0, 'event': 'began', 'step': 0}],
}


def write_run(directory, lines, steps=20, events=()):
    directory.mkdir(parents=True)
    (directory / 'config.yaml').write_text(f'# Every value\nname: x  # override\nsteps: {steps}  # override\n')
    (directory / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (directory / 'attempts.jsonl').write_text(''.join(json.dumps(event) + '\n' for event in events))


def lines_to(last, final, best=(8, 1.25)):
    """Metrics with a loss in every line, and a validation loss in every fourth step, the lowest one in the middle."""
    lines = []
    for step in range(1, last + 1):
        lines.append({'step': step, 'loss': final + last - step, 'tokens_per_second': 100.0 * step, 'time': 7e8 + step})
        if step % 4 == 0:
            lines.append({'step': step, 'val_loss': best[1] if step == best[0] else 3.0, 'time': 7e8 + step})
    return lines


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path('runs/a-10'), lines_to(20, 2.0), events=EVENTS['finished'])
    write_run(Path('runs/a-2'), lines_to(5, 0.5, best=(4, 9.0)), events=EVENTS['failed'])
    write_run(Path('runs/deep/er/b'), lines_to(12, 3.0), events=EVENTS['lost'])
    (tmp_path / 'runs' / 'no-run').mkdir()
    return tmp_path / 'runs'


def called(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as end:
        main(['runs', *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code or 0) == code, err
    return out + err


@pytest.mark.usefixtures('runs')
def test_the_list_has_the_numbers_of_the_files(capsys):
    head, *rows = called(capsys).splitlines()
    assert head.split('  ')[0] == 'run'
    assert [row.replace(', ', ',').split()[:8] for row in rows] == [
        ['a-2', 'failed', '5/20', '25%', '0.5000', '9.0000', '4', '500'],
        ['a-10', 'finished,overfit', '20/20', '100%', '2.0000', '1.2500', '8', '2,000'],
        ['deep/er/b', 'lost,overfit', '12/20', '60%', '3.0000', '1.2500', '8', '1,200'],
    ]
    records = json.loads(called(capsys, '--json'))
    assert (records[0]['name'], records[0]['why']) == ('a-2', 'the loss was NaN')
    assert records[0]['written'] == 7e8 + 5


@pytest.mark.usefixtures('runs')
@pytest.mark.parametrize(
    ('options', 'names'),
    [
        ('--sort loss', ['a-2', 'a-10', 'deep/er/b']),
        ('--sort val_loss', ['a-10', 'deep/er/b', 'a-2']),
        ('--sort progress --reverse', ['a-2', 'deep/er/b', 'a-10']),
        ('--sort age', ['a-10', 'deep/er/b', 'a-2']),
        ('--state failed --state lost', ['a-2', 'deep/er/b']),
        ('--match a-*', ['a-2', 'a-10']),
        ('--first 1', ['a-2']),
        ('--match none', []),
    ],
)
def test_order_and_selection(options, names, capsys):
    assert [record['name'] for record in json.loads(called(capsys, '--json', *options.split()))] == names


@pytest.mark.usefixtures('runs')
def test_tables_are_written(capsys):
    called(capsys, '--out', 'a.csv')
    with open('a.csv', newline='') as file:
        assert [row['best_val_loss'] for row in csv.DictReader(file)] == ['9.0', '1.25', '1.25']
    called(capsys, '--out', 'a.json')
    assert json.loads(Path('a.json').read_text()) == json.loads(called(capsys, '--json'))


def test_broken_runs_are_in_the_list(runs):
    (runs / 'a-2' / 'metrics.jsonl').write_bytes(b'{"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}\n\xff\n{"st')
    (runs / 'a-10' / 'metrics.jsonl').write_text('')
    (runs / 'deep' / 'er' / 'b' / 'metrics.jsonl').unlink()
    (runs / 'deep' / 'er' / 'b' / 'metrics.jsonl').mkdir()
    nan, empty, unreadable = list_runs([str(runs)])
    assert nan.step == 3
    assert nan.loss != nan.loss
    assert (empty.step, empty.loss, empty.best_val_loss) == (0, None, None)
    assert (unreadable.state, unreadable.why) == ('unreadable', os.strerror(21))
    assert [run.name for run in select([nan, empty, unreadable], order='loss')] == ['a-2', 'a-10', 'deep/er/b']


def test_the_end_of_a_large_file_is_enough(runs, monkeypatch):
    """With limits of 1,000 and 400 bytes: the best validation loss is that of the lines that were read, and marked."""
    monkeypatch.setattr(run_list, '_SEARCHED', 1000)
    monkeypatch.setattr(run_list, '_TAIL', 400)
    run = list_runs([str(runs / 'a-10')])[0]
    assert (run.name, run.step, run.loss, run.best_val_loss, run.is_partial) == ('a-10', 20, 2.0, 3.0, True)


@pytest.mark.usefixtures('runs')
@pytest.mark.parametrize(
    ('arguments', 'part'),
    [
        (['none'], 'none cannot be read: No such file'),
        (['runs/no-run'], 'no runs in runs/no-run'),
        (['runs', '--out', 'a.txt'], '.csv, .json'),
        (['runs', '--state', 'dead'], 'expected one of running, finished'),
        (['runs', '--sort', 'x'], "'x' is not one of"),
        (['http://x/y'], 'http:// is not supported'),
        (['runs', '--out', 'runs/a-2/config.yaml/a.csv'], 'cannot write'),
    ],
)
def test_mistakes(arguments, part, capsys):
    assert part in called(capsys, *arguments, code=2)


def test_the_runs_of_a_bucket_are_those_of_a_disk(runs, s3):
    for path in runs.rglob('*.*'):
        key = f'all/{path.relative_to(runs).as_posix()}'
        s3.put(f'{key}/000000' if path.suffix == '.jsonl' else key, path.read_bytes())
    here, there = list_runs([str(runs)]), list_runs([f'{s3.url}/all'])
    assert [run.path for run in there] == [f'{s3.url}/all/{run.name}' for run in here]
    numbers = ('name', 'state', 'why', 'step', 'steps', 'loss', 'best_val_loss', 'best_step', 'written')
    for a, b in zip(here, there, strict=True):
        assert [getattr(a, key) for key in numbers] == [getattr(b, key) for key in numbers]
    assert [run.name for run in list_runs([f'{s3.url}/all/a-2'])] == ['a-2']


def test_a_run_that_diverged_is_no_plain_success_in_any_list(runs, capsys):
    rising = [{'step': step, 'loss': 6.0 if step < 30 else 58_000.0 + step} for step in range(1, 2001)]
    write_run(runs / 'bad', rising, events=EVENTS['finished'])
    assert re.search(r'bad +finished, diverged ', called(capsys))  # the first and the last losses of a long file
    assert json.loads(called(capsys, '--json', '--match', 'bad'))[0]['verdict'].startswith(
        'diverged: the loss rose from 6 '
    )
    write_report(runs / 'bad', runs / 'bad.html')
    assert 'diverged: the loss rose from 6 (step 1) to 59,9' in (runs / 'bad.html').read_text()
