"""An island of two processes under `pretrax launch local`, in a federation with an island of one process."""

import contextlib
import json
import os
import signal

import pytest

from launched import Launched, write_run
from runs import lines_of

STEPS, EVERY = 24, 4


class Two:
    """Islands a, of two processes, and b. Each round has both of them, or is not closed."""

    def __init__(self, directory, stack, bucket=None, environment=None, steps=STEPS):
        self.directory, self.stack, self.environment = directory, stack, environment or {}
        self.bucket = bucket or str(directory / 'bucket')
        directory.mkdir(exist_ok=True)
        federation = {'bucket': self.bucket, 'islands': 2, 'wait_for': 2, 'every': EVERY, 'encoding': 'f32',
                      'patience': 3600, 'keep': 2}  # fmt: skip
        memory = {'every': EVERY, 'memory': {'every': 1}}
        self.config = write_run(directory, steps=steps, checkpoint=memory, federation=federation)

    def start(self, name):
        count, environment = ('2', self.environment) if name == 'a' else ('1', {})
        options = f'name={name}', '-n', count, '--retries=20'
        return self.stack.enter_context(Launched(self.config, self.directory / name, *options, **environment))

    def until_round(self, launched, number):
        launched.until(lambda: f'round {number}:' in launched.said, f'round {number}')


@pytest.fixture
def two(tmp_path):
    """two(name, **options) -> Two"""
    with contextlib.ExitStack() as stack:
        yield lambda name, *given, **options: Two(tmp_path / name, stack, *given, **options)


def losses_of(launched):
    return [(line['step'], line['loss']) for line in lines_of({'run_dir': launched.run_dir})]


def closings(directory):
    """Of each round the members, with the digests of what they learned and their tokens."""
    found = {}
    while (path := directory / 'bucket' / 'rounds' / str(len(found) + 1) / 'closed.json').exists():
        members = json.loads(path.read_bytes())['members']
        found[len(found) + 1] = {name: (one['learned'], one['tokens']) for name, one in members.items()}
    return found


def state_of(directory, name):
    return json.loads((directory / 'bucket' / 'islands' / name / 'state.json').read_bytes())['state']


@pytest.mark.slow
def test_kills_of_one_or_of_all_processes_of_an_island_change_no_bit(two):
    whole, killed = two('whole'), two('killed')
    a, b = whole.start('a'), whole.start('b')
    assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
    losses = losses_of(a)
    a, b = killed.start('a'), killed.start('b')
    killed.until_round(a, 1)
    os.kill(a.pid(1), signal.SIGKILL)  # its launcher starts both again
    a.until(lambda: len(a.events('stepped')) > 1, 'the second attempt')
    os.kill(a.pid(0), signal.SIGKILL)
    a.until(lambda: len(a.events('stepped')) > 2, 'the third attempt')
    a.until(a.checkpoints, 'a checkpoint')  # the memory of a launcher ends with it
    a.process.kill()
    for process in (0, 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(a.pid(process), signal.SIGKILL)
    a.process.wait()
    a = killed.start('a')
    assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
    assert list(closings(whole.directory)) == list(range(1, STEPS // EVERY + 1))
    assert closings(killed.directory) == closings(whole.directory)
    assert state_of(killed.directory, 'a') == state_of(killed.directory, 'b') == 'finished'
    assert losses_of(a) == losses


@pytest.mark.slow
def test_an_island_of_two_processes_that_is_asked_to_stop_while_it_waits_saves_and_says_so(two):
    both = two('both')
    a = both.start('a')

    a.until((both.directory / 'bucket' / 'rounds' / '1' / 'a').exists, 'numbers; not yet a contribution')
    a.process.terminate()
    assert a.wait() == 0, a.said
    assert state_of(both.directory, 'a') == 'stopped'
    a, b = both.start('a'), both.start('b')
    assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
    found = closings(both.directory)
    assert list(found) == list(range(1, STEPS // EVERY + 1))
    assert {tuple(sorted(members)) for members in found.values()} == {('a', 'b')}
    assert state_of(both.directory, 'a') == 'finished'


@pytest.mark.slow
def test_an_island_of_two_processes_trains_on_while_its_bucket_is_out_of_reach(two, s3):
    with s3.another_proxy() as way:
        both = two('both', f'{s3.url}/two', way.environment, steps=100)
        a, b = both.start('a'), both.start('b')
        both.until_round(a, 1)
        with way.down():
            a.until(lambda: 'Training continues' in a.said, 'the outage')
            outage = a.step()
            a.until(lambda: a.step() > outage + EVERY, 'steps without the bucket')
        assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
    assert 'is reached again' in a.said
    rounds = [json.loads(s3.content(key)) for key in s3.keys('two/rounds/') if key.endswith('/closed.json')]
    missed = [closing for closing in rounds if closing['step'] == outage]
    assert [sorted(closing['members']) for closing in missed] == [['a', 'b']]
    assert not any(closing['left_out'] or closing['rejected'] for closing in rounds)
