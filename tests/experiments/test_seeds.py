"""`pretrax train CONFIG --seeds N`, and the means over seeds."""

import json
import subprocess

import numpy as np
import pytest

from launched import PATIENCE, PRETRAX, environment, write_run
from pretrax.errors import UserError
from pretrax.experiments.training import train_seeds
from pretrax.observe.metrics import read_metrics


def test_options_that_seeds_cannot_pass_on_are_refused(tmp_path):
    with pytest.raises(UserError, match='take no --dry-run'):
        train_seeds(str(write_run(tmp_path)), [], 2, ['--dry-run'])


def test_seeds_are_no_islands_of_one_federation(tmp_path):
    bucket = tmp_path / 'bucket'
    with pytest.raises(UserError, match=r'set federation\.bucket=null'):
        train_seeds(str(write_run(tmp_path)), [f'federation.bucket={bucket}', f'run_dir={tmp_path}/run'], 2)
    assert not bucket.exists()


@pytest.mark.slow
def test_each_seed_is_a_run_and_the_mean_is_of_them(tmp_path):
    config = write_run(
        tmp_path, steps=6, seed=3, eval={'every': 3, 'batches': 1}, data={'name': 'slow', 'vocab_size': 32}
    )
    command = [PRETRAX, 'train', str(config), '--seeds', '2', f'run_dir={tmp_path}/run']
    for _ in range(2):  # the second time nothing is left to do
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        assert 'seed 3  seed 4' in done.stdout
        assert 'not in the mean' not in done.stdout
    lines = [read_metrics(tmp_path / f'run-seed-{seed}' / 'metrics.jsonl') for seed in (3, 4)]
    losses = [{line['step']: line['loss'] for line in run if 'loss' in line} for run in lines]
    assert losses[0] != losses[1]
    assert [line['step'] for line in lines[0] if 'loss' in line] == list(range(1, 7))
    means = [json.loads(line) for line in (tmp_path / 'run-seeds' / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in means] == list(range(1, 7))
    for line in means:
        both = [run[line['step']] for run in losses]
        assert line['loss'] == pytest.approx(np.mean(both))
        assert line['loss_low'] < min(both) <= max(both) < line['loss_high'], 'two seeds say little'
    assert 'val_loss_low' in means[2]
    # A seed that other code has trained is not mixed with the first one, and not left out silently.
    facts = tmp_path / 'run-seed-4' / 'environment.json'
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {'git': {'commit': 'another', 'changed': False}}))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert 'WARNING: seed 4: not in the mean, since its code is not that of seed 3' in done.stdout
