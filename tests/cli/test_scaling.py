"""`pretrax scaling`: from a table, from runs, and from a grid that it trains."""

import json
import subprocess

import numpy as np
import pytest

from launched import BASE, PATIENCE, PRETRAX, environment
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.experiments.scaling_file import read_scaling, steps_of
from pretrax.view.scaling.points import matching, read_table


def write_points(path, noise=0.0):
    """Runs of equal FLOPs: the best size of C FLOPs has (C/6)^(1/2) parameters."""
    random = np.random.default_rng(0)
    rows = ['params,tokens,loss']
    for flops in (6e12, 6e14, 6e16):
        for factor in (0.25, 0.5, 1, 2, 4):
            params = (flops / 6) ** 0.5 * factor
            tokens = flops / 6 / params
            loss = 1.5 + 30 / params**0.25 + 30 / tokens**0.25
            rows.append(f'{params},{tokens},{loss * np.exp(noise * random.standard_normal())}')
    path.write_text('\n'.join(rows) + '\n')


def run(monkeypatch, place, *words):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as ended:
        main(['scaling', *words])
    return ended.value.code or 0


def test_a_table_gives_the_best_sizes_and_a_picture(tmp_path, monkeypatch, capsys):
    write_points(tmp_path / 'points.csv', noise=1e-4)
    (tmp_path / 'fit.yaml').write_text('points: points.csv\napproaches: [2]\noptimal_for: [6e18]\n')
    assert run(monkeypatch, tmp_path, 'fit.yaml') == 0
    said = capsys.readouterr().out
    assert 'approach 2 IsoFLOP: a = 0.5' in said
    found = json.loads((tmp_path / 'scaling' / 'fit' / 'fit.json').read_text())
    (best,) = found['optimal']
    assert best['params'] == pytest.approx(1e9, rel=0.05)
    assert best['tokens'] == pytest.approx(1e9, rel=0.05)
    low, high = best['interval_of_params']
    assert low < 1e9 < high
    assert (tmp_path / 'scaling' / 'fit' / 'fit.svg').read_bytes().startswith(b'<?xml')


def test_rows_with_the_same_run_are_a_curve(tmp_path):
    rows = [{'run': 'a', 'params': 10, 'tokens': tokens, 'loss': 5 - tokens / 100} for tokens in (100, 50)]
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (point,) = read_table(tmp_path / 'p.jsonl')
    assert (point.params, point.tokens, point.loss, point.flops) == (10, 100, 4, 6000)
    assert point.curve == ((50, 4.5), (100, 4))


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('approaches: [2]\n', 'has none of them; expected one of points, runs, or base'),
        ('points: a.csv\nruns: [b]\n', 'has points and runs'),
        ('base: a.yaml\n', 'needs sizes and budgets'),
        ('points: a.csv\nbudgets: [1e9]\n', 'applies to a grid'),
        ('points: a.csv\napproaches: [4]\n', 'expected 1, 2 or 3'),
    ],
)
def test_a_mistake_in_the_file_is_refused(tmp_path, text, words):
    (tmp_path / 'fit.yaml').write_text(text)
    with pytest.raises(UserError, match=words):
        read_scaling(tmp_path / 'fit.yaml')


def test_a_row_that_is_no_point_is_named(tmp_path):
    (tmp_path / 'p.csv').write_text('params,tokens,loss\n10,10,1\n10,x,1\n')
    with pytest.raises(UserError, match=r'p.csv:3 has no params, tokens and loss'):
        read_table(tmp_path / 'p.csv')


def test_a_budget_is_six_times_parameters_times_tokens():
    assert steps_of(6 * 1000 * 64 * 50, params=1000, batch_tokens=64) == 50


@pytest.mark.slow
def test_a_grid_is_trained_and_fitted_and_the_runs_can_be_read_again(tmp_path):
    (tmp_path / 'base.yaml').write_text(json.dumps(BASE))
    fit = {
        'base': 'base.yaml', 'change': {'eval.batches': 1}, 'sizes': [{'model.d_model': size} for size in (8, 16, 32)],
        'budgets': [2e7, 4e7], 'approaches': [1], 'bootstrap': 0, 'at_once': 2,
    }  # fmt: skip
    (tmp_path / 'fit.yaml').write_text(json.dumps(fit))
    command = [PRETRAX, 'scaling', 'fit.yaml']
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=3 * PATIENCE
    )
    runs = sorted((tmp_path / 'scaling' / 'fit' / 'runs').iterdir())
    assert len(runs) == 6, done.stdout + done.stderr
    for one in runs:
        facts = json.loads((one / 'environment.json').read_text())
        last = json.loads((one / 'metrics.jsonl').read_text().splitlines()[-1])
        of_step = 6 * facts['parameters'] * 64
        distance = min(abs(of_step * last['step'] - budget) for budget in fit['budgets'])
        assert distance <= of_step / 2  # the nearest whole number of steps
    assert done.returncode in (0, 2), done.stderr  # so small a grid need not determine a fit
    assert 'Traceback' not in done.stderr


def test_the_name_of_a_run_may_have_brackets(tmp_path):
    for name in ('a [1]', 'a 1', 'b'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'metrics.jsonl').write_text('')
    assert matching(tmp_path, ['a [1]']) == [tmp_path / 'a [1]']
    assert matching(tmp_path, ['a*', f'{tmp_path}/b']) == [tmp_path / 'a 1', tmp_path / 'a [1]', tmp_path / 'b']
