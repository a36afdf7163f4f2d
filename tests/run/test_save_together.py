"""Several processes save together: when one cannot write, none hangs, all say so, and the next save is whole."""

import json
from pathlib import Path

import pytest

from pretrax.checkpoint import steps_in, verify
from pretrax.observe.metrics import read_metrics
from run.test_processes import run_together

# The second process may write no file of more than a few bytes while the steps 4 to 7 are fetched.
SICK = """
import os, resource, signal
from pretrax.config import register
from pretrax.data.batches.synthetic import SyntheticSource
from bigram import Bigram

register('model', 'bigram')(lambda request: Bigram(request.vocab_size))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

class Sick(SyntheticSource):
    def batch(self, step, rows, batch_rows):
        if os.environ.get('JAX_PROCESS_ID') == '1':
            limit = 100 if step in (4, 5, 6, 7) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return super().batch(step, rows, batch_rows)

register('data', 'sick')(lambda request: Sick(request, 96, 17))
"""


@pytest.mark.slow
def test_a_process_that_cannot_write_is_told_by_all_and_hangs_none(tmp_path):
    (tmp_path / 'sick.py').write_text(SICK)
    values = {
        'name': 'together', 'model': {'name': 'bigram'}, 'data': {'name': 'sick'},
        'plugins': [str(tmp_path / 'sick.py')],
        'batch': {'tokens': 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2}, 'steps': 12,
        'schedule': {'name': 'constant'}, 'mesh': {'r': 1, 'd': 2, 't': 1}, 'log': {'every': 1}, 'eval': {'every': 0},
        'checkpoint': {'every': 1, 'keep': 99}, 'precision': {'compute': 'f32'},
    }  # fmt: skip
    config = tmp_path / 'run.yaml'
    config.write_text(json.dumps(values))
    printed = run_together(config, tmp_path / 'run', 12, 2, devices=2)
    directory = tmp_path / 'run' / 'checkpoints'
    steps = steps_in(directory)
    assert steps[-1] == 12
    assert 1 in steps
    assert len(steps) < 12
    for step in steps:
        verify(directory, step)
    refused = [line for line in printed[0].splitlines() if 'no checkpoint could be written' in line]
    assert len(refused) == 12 - len(steps)  # each attempt once, by the process that speaks
    assert all('File too large' in line and '(process 1)' in line for line in refused), '\n'.join(refused)
    assert [line['step'] for line in read_metrics(Path(tmp_path / 'run' / 'metrics.jsonl'))] == list(range(1, 13))
