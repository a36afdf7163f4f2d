"""The launcher notifies of a training that was killed, and not of one that has said how it ended."""

import json
import sys

import pytest

from pretrax.config import from_values
from pretrax.launch.restarts import Outcome
from pretrax.observe.attempts import note
from pretrax.observe.notices import LaunchNotices

COMMAND = 'import sys; open(sys.argv[1], "a").write(sys.stdin.read() + "\\n")'
KILLED = Outcome(-9, 'killed: process 0 (SIGKILL)', 20, (0,))


@pytest.fixture
def notices(tmp_path):
    config = from_values({
        'name': 'run',
        'run_dir': str(tmp_path),
        'steps': 50,
        'model': {'d_model': 8, 'n_layers': 1, 'attention': {'n_heads': 1}},
        'data': {'name': 'synthetic', 'vocab_size': 16},
        'batch': {'tokens': 64, 'sequence_length': 16},
        'optimizer': {'learning_rate': 0.1},
        'log': {'notify': {'command': [sys.executable, '-c', COMMAND, str(tmp_path / 'events')]}},
    })  # fmt: skip
    return LaunchNotices(config, pytest.fail)


@pytest.mark.parametrize(('events', 'outcome', 'sent'), [
    (['started', 'began'], KILLED, True),
    ([], KILLED, True),
    (['started', 'began', 'failed', 'ended', 'started', 'began'], KILLED, True),
    (['started', 'began', 'failed'], Outcome(1, 'process 0 failed with exit code 1', 20), False),
    (['started', 'began', 'stopped'], Outcome(75, 'exit code 75', 20), False),
    (['started', 'began', 'finished'], Outcome(0, 'done', 50), False),
    (['started'], Outcome(0, 'done', 50), False),
])  # fmt: skip
def test_one_notification_for_each_end(notices, tmp_path, events, outcome, sent):
    for event in events:
        note(tmp_path, event)
    notices.attempt_ended(tmp_path, outcome.code, outcome.step, outcome.why, starts_again=True)
    notices.close()
    assert (tmp_path / 'events').exists() == sent
    if sent:
        event = json.loads((tmp_path / 'events').read_text())
        assert (event['event'], event['step'], event['steps']) == ('failed', 20, 50)
        assert event['text'] == (
            'run failed at step 20 of 50: killed: process 0 (SIGKILL); starting again from the newest checkpoint'
        )
