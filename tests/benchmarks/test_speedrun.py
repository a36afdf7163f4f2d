"""benchmarks/speedrun.py: what it refuses, and the leaderboard that is committed."""

import json
import math
import shutil

import pytest

from benchmark_scripts import BENCHMARKS, benchmark_script
from pretrax.config import load
from pretrax.errors import UserError

ENTRIES = sorted(path for path in (BENCHMARKS / 'speedrun' / 'entries').iterdir() if path.is_dir())


@pytest.fixture(scope='module')
def speedrun():
    return benchmark_script('speedrun')


@pytest.fixture
def entry(tmp_path):
    """A copy of an entry of the leaderboard."""
    return shutil.copytree(ENTRIES[0], tmp_path / 'entry')


def test_the_leaderboard_is_that_of_its_entries(speedrun, tmp_path):
    speedrun.publish(BENCHMARKS / 'speedrun' / 'entries', tmp_path / 'leaderboard.md')
    assert (tmp_path / 'leaderboard.md').read_text() == (BENCHMARKS / 'speedrun' / 'leaderboard.md').read_text()


def test_the_score_is_the_loss_of_the_last_line_per_byte(speedrun, entry):
    last = json.loads((entry / 'entry' / 'metrics.jsonl').read_text().splitlines()[-1])
    held_out = json.loads((entry / 'result.json').read_text())['entry']['held_out']
    bits = last['val_loss'] * held_out['targets'] / math.log(2)
    assert speedrun.verify(entry)['entry']['bits_per_byte'] == pytest.approx(bits / held_out['predicted_bytes'])


def lines_of(entry, change):
    path = entry / 'entry' / 'metrics.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (lambda lines: lines[-1].update(time=lines[0]['time'] + 601), 'took'),
        (lambda lines: lines[-1].update(val_loss=1.0), 'do not belong together'),
        (lambda lines: lines.pop(), 'not those of one run to its end'),
        (lambda lines: lines[3].update(time=0.0), 'not those of one run to its end'),
    ],
)
def test_metrics_that_break_a_rule_are_refused(speedrun, entry, change, said):
    lines_of(entry, change)
    with pytest.raises(UserError, match=said):
        speedrun.verify(entry)


def test_an_entry_that_resumed_is_refused(speedrun, entry):
    path = entry / 'entry' / 'attempts.jsonl'
    path.write_text(path.read_text() * 2)
    with pytest.raises(UserError, match='began 2 times'):
        speedrun.verify(entry)


def test_sides_that_had_unequal_shares_of_the_machine_are_refused(speedrun, entry):
    result = json.loads((entry / 'result.json').read_text())
    result['entry']['cores_used'] *= 1.5
    (entry / 'result.json').write_text(json.dumps(result))
    with pytest.raises(UserError, match='unfair'):
        speedrun.verify(entry)


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (['data.text=docs'], 'the text of the speedrun is data.text=stdlib'),
        (['data.validation=0.1'], 'may not change data.validation'),
        (['init_from=runs/other'], 'remove init_from'),
    ],
)
def test_configurations_that_break_a_rule_are_refused(speedrun, changes, said):
    with pytest.raises(UserError, match=said):
        speedrun.follow_rules(load(speedrun.REFERENCE, changes))


def test_another_tokenizer_optimizer_and_model_are_allowed(speedrun):
    speedrun.follow_rules(load(speedrun.REFERENCE, ['data.vocab_size=512', 'optimizer.name=lion', 'model.n_layers=2']))


def test_steps_are_timed_while_both_sides_train(speedrun, tmp_path):
    """One side begins 10 s earlier, and is twice as fast as long as it is alone."""
    alone, together = [0.5 * number for number in range(21)], [10 + 1.0 * number for number in range(1, 11)]
    for side, times in (('reference', alone + together), ('entry', [10 + 1.5 * number for number in range(10)])):
        (tmp_path / side).mkdir()
        lines = [{'step': step, 'time': 1.8e9 + time} for step, time in enumerate(times, 1)]
        (tmp_path / side / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    timed = speedrun.seconds_per_step({side: tmp_path / side for side in speedrun.SIDES})
    assert timed == pytest.approx({'reference': 1.0, 'entry': 1.5})
