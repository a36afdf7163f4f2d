"""benchmarks/optimizers.py at a tiny size, its arithmetic on made-up curves, and its table in docs/research.md."""

import json
import math
import sys
from pathlib import Path

import pytest

from benchmark_scripts import BENCHMARKS, benchmark_script

DOCS = Path(__file__).parents[2] / 'docs'
TINY = 'model={n_layers: 1, d_model: 16, attention: {n_heads: 2, n_kv_heads: 1}}'


def cells(line):
    return [cell.strip() for cell in line.strip('|').split('|')]


def rows(text):
    return {cells(line)[0]: cells(line)[1:] for line in text.splitlines() if line.startswith('|')}


@pytest.fixture(scope='module')
def optimizers():
    return benchmark_script('optimizers')


def test_steps_to_a_loss_are_linear_between_points(optimizers):
    curve = [(10, 6.0), (20, 5.0), (30, 5.5), (40, 4.0)]
    assert optimizers.steps_to(curve, 7.0) == 10  # reached before the first point
    assert optimizers.steps_to(curve, 5.25) == 17.5
    assert optimizers.steps_to(curve, 4.5) == pytest.approx(30 + 10 * 2 / 3)
    assert optimizers.steps_to(curve, 4.0) == 40
    assert optimizers.steps_to(curve, 3.9) is None


def test_the_time_to_the_target_is_tokens_times_the_ratio_of_steps(optimizers):
    same = {'best_rate': '2^-5', 'loss_by_rate': {'2^-5': 3.0}, 'weights': 8, 'weight_bytes': 32}
    of_adamw = {'curves': [[(50, 6.0), (100, 4.0)]] * 2, 'seconds_of_pairs': [(1.0, 1.0)] * 2, 'state_bytes': 64}
    # reaches a loss of 4 after 75 and 50 of 100 steps, each of which takes 1.2 times as long
    of_muon = {
        'curves': [[(50, 5.0), (100, 3.0)], [(50, 4.0), (100, 3.0)]],
        'seconds_of_pairs': [(1.0, 1.2), (2.0, 2.4)],
        'state_bytes': 48,
    }
    of_soap = of_muon | {'curves': [[(50, 5.0), (100, 3.0)], [(50, 5.0), (100, 4.5)]]}
    measured = {'adamw': same | of_adamw, 'muon': same | of_muon, 'soap': same | of_soap}
    circumstances = {'command': '', 'date': '', 'processor': '', 'versions': {}}
    text, _, by_rate = optimizers.table({'sizes': {'s': measured}} | circumstances).partition('val_loss after')
    assert rows(text)['AdamW'] == ['2^-5', '4.000 ± 0.000', '1', '1.00 ± 0.00', '1', '2.00']
    spread = 0.125 * 2**0.5  # of 0.75 and 0.5, as the root of the sum of squares over n - 1
    of_both = 1.2 * 0.125 * (4 / 3) ** 0.5  # of two times 0.9 and two times 0.6
    assert rows(text)['Muon'] == [
        '2^-5',
        '3.000 ± 0.000',
        f'0.62 ± {spread:.2f}',
        '1.20 ± 0.00',
        f'0.75 ± {of_both:.2f}',
        '1.50',
    ]
    assert rows(text)['SOAP'][2:5] == ['1 of 2 seeds reach it', '1.20 ± 0.00', '']
    assert rows(by_rate)['s, Muon'] == ['3.000']


@pytest.mark.slow  # compiles two steps
def test_the_best_rate_is_inside_the_rates_and_a_result_is_continued(optimizers, monkeypatch, tmp_path):
    monkeypatch.setattr(optimizers, 'SIZES', {'tiny': optimizers.Size(TINY, steps=4)})
    monkeypatch.setattr(
        optimizers, 'SHARED', ['data.vocab_size=300', 'batch={tokens: 256, sequence_length: 32}', 'eval.batches=1']
    )
    monkeypatch.setattr(optimizers, 'TIMED_STEPS', 1)
    monkeypatch.setattr(optimizers, 'PAIRS', 1)
    losses = {-9: 3.0, -8: 2.0, -7: 1.5, -6: 1.7, -5: float('nan'), -4: float('nan')}

    def results():
        (path,) = tmp_path.glob('*.json')
        return path, json.loads(path.read_text())['sizes']['tiny']

    arguments = ['optimizers.py', '--seeds', '1', '--out', str(tmp_path)]
    monkeypatch.setattr(sys, 'argv', [*arguments, '--optimizers', 'adamw', '--picture', str(tmp_path / 'curves.png')])
    train = optimizers.Trainer.train

    def train_other_seeds(trainer, rate, seed, points):
        return train(trainer, rate, seed, points) if seed else [(4, losses[round(math.log2(rate))])]

    monkeypatch.setattr(optimizers.Trainer, 'train', train_other_seeds)
    optimizers.main()
    path, measured = results()
    assert list(measured['adamw']['loss_by_rate']) == ['2^-9', '2^-8', '2^-7', '2^-6']  # the last one was added
    assert measured['adamw']['best_rate'] == '2^-7'
    assert [step for step, _ in measured['adamw']['curves'][0]] == [1, 2, 3, 4]
    assert measured['adamw']['state_bytes'] > 2 * measured['adamw']['weight_bytes']
    assert (tmp_path / 'curves.png').stat().st_size > 0

    losses[-6] = 1.0  # the rates of Muon begin there
    losses[-7] = 1.2
    monkeypatch.setattr(sys, 'argv', [*arguments, '--optimizers', 'muon', '--from', str(path)])
    optimizers.main()
    assert results()[1]['adamw'] == measured['adamw']
    assert results()[1]['muon']['best_rate'] == '2^-6'
    assert set(rows(path.with_suffix('.md').read_text())) >= {'AdamW', 'Muon', 'tiny, AdamW', 'tiny, Muon'}


def test_the_table_of_the_documentation_is_that_of_the_newest_result(optimizers):
    newest = max((BENCHMARKS / 'results').glob('optimizers-*.json'))
    text = optimizers.table(json.loads(newest.read_text()))
    assert newest.with_suffix('.md').read_text() == text
    table = [line for line in text.partition('val_loss after')[0].splitlines() if line.startswith('|')]
    documentation = (DOCS / 'research.md').read_text().splitlines()
    assert [line for line in table if line not in documentation] == []
