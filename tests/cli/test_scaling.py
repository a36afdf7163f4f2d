"""`pretrax scaling`: from a table, from runs, and from a grid that it trains."""

import json
import subprocess

import numpy as np
import pytest

from launched import BASE, PATIENCE, PRETRAX, environment
from pretrax.cli import main


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
