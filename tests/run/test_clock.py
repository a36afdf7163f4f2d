"""The clock: checkpoints by minutes, and goodput."""

import json
from pathlib import Path

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import read_description, steps_in
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics
from runs import Quiet


def test_checkpoints_are_also_saved_by_minutes(small):
    values = small | {'checkpoint': {'every': 100, 'minutes': 1e-9, 'keep': 9}}
    pretrain(config_from_values(values), progress=Quiet())
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [1, 2, 3, 4, 5, 6]


def test_goodput_counts_kept_steps_over_all_time(small):
    values = small | {'checkpoint': {'every': 2}}
    pretrain(config_from_values(values | {'steps': 4, 'schedule': {}}), progress=Quiet())
    run = Path(small['run_dir'])
    kept = read_description(run / 'checkpoints', 4)['productive_seconds']
    attempts = [json.loads(line) for line in (run / 'attempts.jsonl').read_text().splitlines()]
    attempts[0]['time'] -= 1000  # as if it had begun long before
    (run / 'attempts.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in attempts))
    pretrain(config_from_values(values | {'steps': 6, 'schedule': {}}), progress=Quiet())
    last = read_metrics(run / 'metrics.jsonl')[-1]
    assert kept / 1100 < last['goodput'] < (kept + 100) / 1000
    events = [(event['event'], event['step']) for event in read_attempts(run)]
    assert events == [('began', 0), ('stepped', 1), ('began', 4), ('stepped', 5)]
