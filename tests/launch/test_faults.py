"""Processes of a run that are killed, stopped and fail: it goes on, with the losses of one that is left alone.

`benchmarks/soak.py` does the same for longer.
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from launched import Launched, undisturbed, write_run


def standbys(launcher):
    """The processes that wait, by their ids."""
    found = set()
    for child in Path(f'/proc/{launcher}/task/{launcher}/children').read_text().split():
        with contextlib.suppress(OSError):
            if b'PRETRAX_STANDBY=waits' in Path(f'/proc/{child}/environ').read_bytes().split(b'\0'):
                found.add(int(child))
    return found


@pytest.mark.slow
def test_killed_and_hung_processes_do_not_change_the_losses(tmp_path, capsys):
    config = write_run(tmp_path, checkpoint={'every': 7, 'keep': 100})
    four = ('-n', '4', '--retries', '0')
    with Launched(config, tmp_path / 'alone', *four) as alone:
        alone.until_step(1, 3)
        alone.process.send_signal(signal.SIGUSR1)
        assert alone.wait() == 0, alone.said
    asked_for = set(alone.checkpoints()) - {*range(7, 100, 7), 100}
    assert len(asked_for) == 1, 'one was asked for with SIGUSR1, at a step on which all processes agree'

    killed = []
    with Launched(config, tmp_path / 'hurt', *four, forked=False) as hurt:
        for attempt, (process, how) in enumerate([(3, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)], 1):
            hurt.until_checkpoint(attempt)
            if attempt == 1:
                waiting = hurt.until(lambda: len(found := standbys(hurt.process.pid)) == 4 and found, 'four standbys')
            killed.append(time.time())
            os.kill(hurt.pid(process), how)
        hurt.until_checkpoint(4)
        assert set(hurt.events('started')[1]['processes']) == waiting
        hurt.process.send_signal(signal.SIGTERM)
        assert hurt.wait() == 0, hurt.said
    ended = hurt.events('ended')
    assert [event['why'] for event in ended] == [
        'killed: process 3 (SIGKILL)', 'killed: process 0 (SIGKILL)', 'no sign of life: process 1',
        'stopped on request',
    ]  # fmt: skip
    for before, after in zip(ended, hurt.events('began')[1:], strict=False):
        assert before['step'] == after['step'] > 0, 'from the newest checkpoint'
    stacks = (hurt.run_dir / 'stacks' / 'process-2.txt').read_text()
    assert 'Fatal Python error: Aborted' in stacks, 'of a process that noticed the one that hangs'

    # Asked to stop, all four end after the same step.
    stopped = max(hurt.checkpoints())
    assert f'Stopped at step {stopped} of 100. The checkpoint is complete.' in hurt.said
    for process in (1, 2, 3):
        output = (hurt.run_dir / 'output' / f'process-{process}.txt').read_text()
        assert f'Stopped at step {stopped} of 100.' in output
    reference = alone.losses()
    assert hurt.losses() == {step: reference[step] for step in range(1, stopped + 1)}

    recovered = [line for line in hurt.said.splitlines() if line.startswith('training again, ')]
    assert len(recovered) == 3
    with capsys.disabled():
        print('', *hurt.recoveries(killed), sep='\n')


@pytest.mark.nightly
def test_two_processes_killed_at_random_reach_the_loss_of_an_undisturbed_run(tmp_path):
    config = write_run(tmp_path)
    two = ('-n', '2', '--retries', '9')
    reference = undisturbed(config, tmp_path / 'alone', 2)
    draw = random.Random(0)
    with Launched(config, tmp_path / 'hurt', *two) as hurt:
        for attempt in range(1, 6):
            hurt.until_step(attempt, draw.randint(5, 12))
            os.kill(hurt.pid(draw.randrange(2)), signal.SIGKILL)
        assert hurt.wait() == 0, hurt.said
    assert [event['code'] for event in hurt.events('ended')] == [-9] * 5 + [0]
    assert hurt.losses() == reference
    assert len(reference) == 100
    assert hurt.said.count('compiled the step in ') == 6, 'a CPU program of two devices cannot be loaded'


@pytest.mark.nightly
def test_the_run_continues_with_one_process_if_the_other_is_lost_repeatedly(tmp_path):
    """The same tokens, and the losses of two but for the order of sums."""
    config = write_run(tmp_path, steps=40)
    with Launched(config, tmp_path / 'run', '-n', '2', '--elastic') as run:
        run.until_checkpoint(1)
        for attempt in (1, 2, 3):  # in the second and third before any step is done
            run.until(lambda attempt=attempt: len(run.events('started')) >= attempt, f'attempt {attempt}')
            os.kill(run.pid(1), signal.SIGKILL)
            run.until(lambda attempt=attempt: len(run.events('ended')) >= attempt, f'the end of attempt {attempt}')
        assert run.wait() == 0, run.said
    assert [len(event['processes']) for event in run.events('started')] == [2, 2, 2, 1]
    went_on = run.events('began')[-1]['step']
    assert 5 <= went_on < 40

    reference = undisturbed(config, tmp_path / 'one', 1, '--devices-per-process', '1')
    assert run.losses() == pytest.approx(reference, rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('kind', 'code', 'told'),
    [
        ('RuntimeError', 1, 'a batch raised RuntimeError: batch 6 is bad'),
        ('UserError', 2, 'process 1 | batch 6 is bad'),
    ],
)
def test_an_error_in_one_process_ends_the_others_immediately(tmp_path, kind, code, told):
    # Without states nothing is tried again; with such heartbeats, waiting for them would be seen.
    checkpoint = {'every': 1000, 'memory': {'every': 0}}
    config = write_run(tmp_path, faults={'heartbeat_seconds': 10000}, checkpoint=checkpoint)
    with Launched(config, tmp_path / 'run', '-n', '2', '--retries', '0', FAIL=f'1:6:{kind}') as run:
        assert run.wait() == code, run.said
    assert told in run.said
    assert len(run.events('started')) == 1
    output = (run.run_dir / 'output' / 'process-1.txt').read_text()
    assert ('the traceback is in' in output) == (kind == 'RuntimeError')
