"""SIGKILL at any moment: no directory looks like a checkpoint that is none, and what follows equals a run left alone.

More than fifty kills, each followed by a restart from what the killed process left: before each kind of change that a
save or a removal makes to the directory, between changes by their number, and at random moments, in which threads
write. `nursery.py` makes the processes.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pretrax.checkpoint import DamagedError, steps_in, verify
from pretrax.checkpoint.memory_pieces import newest_in
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics
from runs import BIGRAM

NURSERY = Path(__file__).with_name('nursery.py')
VALUES = {
    'name': 'killed', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96},
    'batch': {'tokens': 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2},
    'schedule': {'name': 'constant'}, 'mesh': {'r': 1, 'd': 1, 't': 1}, 'precision': {'compute': 'f32'},
    'log': {'every': 1}, 'eval': {'every': 0}, 'checkpoint': {'every': 3, 'keep': 2},
}  # fmt: skip

# What a save and the removal of an old checkpoint change, in this order; the process dies before it.
CHANGES = [
    r'os.mkdir .*\.partial$', r'os.mkdir .*/state$', r'os.mkdir .*/state/[^/]+$', r'open .*/_METADATA',
    r'open .*/\.zarray', r'open .*/0\.0$',
    r'open .*manifest.json', r'os.rename .*\.partial$', r'os.rename .*/\d+$', r'os.remove manifest.json',
    r'os.rmdir .*\.table',
    r'os.rmdir state', r'os.rmdir .*\.deleting', r'os.rmdir .*\.partial',
]  # fmt: skip


@pytest.fixture
def nursery(tmp_path):
    """order(values, event, seconds, memory) -> how the process ended."""
    environment = os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'}
    process = subprocess.Popen(
        [sys.executable, NURSERY, str(tmp_path / 'cache')], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment | {'PYTHONPATH': str(NURSERY.parents[1])}, start_new_session=True,
    )  # fmt: skip

    def order(values, event=None, seconds=None, memory=None):
        order = {'values': values, 'event': event, 'seconds': seconds, 'memory': memory}
        process.stdin.write(json.dumps(order) + '\n')
        process.stdin.flush()
        return int(process.stdout.readline())

    with process:
        yield order
        process.stdin.close()
        process.wait()


@pytest.mark.slow
def test_whenever_it_is_killed_a_run_goes_on_as_if_it_had_not_been(nursery, tmp_path):
    values = VALUES | {'run_dir': str(tmp_path / 'killed')}
    directory, moments = tmp_path / 'killed' / 'checkpoints', random.Random(0)
    kills = [{'event': pattern} for pattern in CHANGES]
    kills += [{'event': number} for number in range(2, 96, 3)]
    kills += [{'seconds': moments.uniform(0, 0.3)} for _ in range(8)]
    moments.shuffle(kills)
    assert len(kills) >= 50
    seen, newest = [], 0
    for kill in kills:
        (directory / '0.partial').mkdir(parents=True, exist_ok=True)  # something to remove, whatever came before
        assert nursery(values | {'steps': newest + 60}, **kill) == -signal.SIGKILL, kill
        steps = steps_in(directory)
        for step in steps:
            try:
                verify(directory, step)
            except DamagedError as error:
                pytest.fail(f'{kill}: {error}')
        assert max(steps, default=0) >= newest, kill  # what was saved stays
        newest = max(steps, default=0)
        seen += metrics(tmp_path / 'killed') if (tmp_path / 'killed' / 'metrics.jsonl').exists() else []

    last = max([newest, *(step for step, _ in seen)]) + 1
    values['steps'] = last
    assert nursery(values) == 0
    assert nursery(values | {'run_dir': str(tmp_path / 'straight')}) == 0
    straight = metrics(tmp_path / 'straight')
    assert [step for step, _ in straight] == list(range(1, last + 1))
    assert metrics(tmp_path / 'killed') == straight
    assert set(seen) <= set(straight)  # also what was lost and trained again
    assert {entry.suffix for entry in directory.iterdir()} == {''}  # nothing half-made stays


@pytest.mark.slow
def test_whenever_it_is_killed_a_run_goes_on_from_its_newest_state_in_memory(nursery, tmp_path):
    """Without a checkpoint: 72 kills before changes of the memory, and at random moments.

    Two steps are lost at most: one may be done while the state of the one before is written.
    """
    values = VALUES | {'run_dir': str(tmp_path / 'killed'), 'checkpoint': {'every': 0, 'memory': {'every': 1}}}
    moments = random.Random(0)
    kills = [{'event': number} for number in range(2, 66)] + [{'seconds': moments.uniform(0, 0.3)} for _ in range(8)]
    moments.shuffle(kills)
    seen, newest, attempts = [], 0, 0
    with tempfile.TemporaryDirectory(dir='/dev/shm') as memory:
        for kill in kills:
            assert nursery(values | {'steps': newest + 60}, memory=memory, **kill) == -signal.SIGKILL, kill
            began = [event['step'] for event in read_attempts(tmp_path / 'killed') if event['event'] == 'began']
            assert began[attempts:] in ([], [newest]), kill
            attempts = len(began)
            lines = metrics(tmp_path / 'killed')
            newest, seen = newest_in(Path(memory)), seen + lines
            assert newest >= max(step for step, _ in lines) - 2, kill
        last = newest + 1
        values['steps'] = last
        assert nursery(values, memory=memory) == 0
    assert nursery(values | {'run_dir': str(tmp_path / 'straight')}) == 0
    straight = metrics(tmp_path / 'straight')
    assert [step for step, _ in straight] == list(range(1, last + 1))
    assert metrics(tmp_path / 'killed') == straight
    assert {line for line in seen if line[0] <= last} <= set(straight)


@pytest.mark.slow
def test_a_killed_run_that_streams_its_text_goes_on_as_if_it_had_not_been(nursery, tmp_path):
    """Also when the file with the places of its blocks is lost."""
    rows = (json.dumps({'text': f'document {number} ' + 'of many ' * (number % 11)}) for number in range(300))
    (tmp_path / 'text.jsonl').write_text('\n'.join(rows))
    data = {'text': str(tmp_path / 'text.jsonl'), 'streaming': True, 'tokenizer': 'bytes', 'shuffle_buffer': 20}
    values = VALUES | {'run_dir': str(tmp_path / 'killed'), 'steps': 400, 'data': data}
    (tmp_path / 'killed' / 'checkpoints' / '0.partial').mkdir(parents=True)
    assert nursery(values, event=200) == -signal.SIGKILL
    assert nursery(values, event=600) == -signal.SIGKILL
    for file in (tmp_path / 'killed' / 'data').glob('stream-*.json'):
        file.unlink()
    newest = max(steps_in(tmp_path / 'killed' / 'checkpoints'))
    values['steps'] = newest + 5
    assert newest > 10
    assert nursery(values) == 0
    assert nursery(values | {'run_dir': str(tmp_path / 'straight')}) == 0
    assert metrics(tmp_path / 'killed') == metrics(tmp_path / 'straight')
    assert len(metrics(tmp_path / 'killed')) == values['steps']


def metrics(run):
    """Step and, to the last bit, what was computed."""
    lines = read_metrics(run / 'metrics.jsonl')
    return [(line['step'], (line['loss'], line['grad_norm'], line['weight_norm'])) for line in lines]
