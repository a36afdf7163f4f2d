"""Real processes agree on rounds through buckets that fail and through a shared directory, whenever they are killed."""

import collections
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name('bare_island.py')
NAMES = 'abc'
CLOCKS = (0.0, 1e9, -1e9)  # seconds


class Islands:
    """Processes, one for each name, which are started again after they were killed."""

    def __init__(self, place, rounds, environment=None, patience=1.0):
        self.arguments = [str(len(NAMES)), str(rounds), str(patience)]
        self.place, self.environment = place, {**os.environ, **(environment or {})}
        self.running, self.outputs = {}, dict.fromkeys(NAMES, '')

    def start(self, name):
        clock = str(CLOCKS[NAMES.index(name)])
        command = [sys.executable, str(PROGRAM), self.place, name, *self.arguments, clock]
        self.running[name] = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def kill(self, name):
        process = self.running.pop(name)
        process.kill()
        self.outputs[name] += process.communicate()[0]

    def wait(self):
        for name, process in list(self.running.items()):
            output, errors = process.communicate(timeout=300)
            self.outputs[name] += output
            assert process.returncode == 0, errors[-2000:]
            assert output.endswith('ended\n'), (output, errors[-2000:])

    def stop(self):
        for process in self.running.values():
            process.kill()
            process.communicate()

    def seen(self):
        """{round: the sets of members that islands have printed}"""
        found = collections.defaultdict(set)
        for output in self.outputs.values():
            for line in output.splitlines():
                if line.startswith('round '):
                    number, *members = line.split()[1:]
                    found[int(number)].add(tuple(sorted(members)))
        return found


@pytest.fixture
def islands():
    """islands(place, rounds, environment, patience) -> Islands, which are started"""
    started = []

    def start(*arguments):
        started.append(Islands(*arguments))
        for name in NAMES:
            started[-1].start(name)
        return started[-1]

    yield start
    for each in started:
        each.stop()


def check(islands, rounds, read):
    """All have seen the same members, and no batch counts twice. `read` returns the content of an object."""
    seen, batches = islands.seen(), collections.Counter()
    for number in range(1, rounds + 1):
        closing = json.loads(read(f'rounds/{number}/closed.json'))
        assert seen[number] <= {tuple(sorted(closing['members']))}
        for name in closing['members']:
            contribution = json.loads(read(f'rounds/{number}/{name}.json'))
            batches.update((name, batch) for batch in range(contribution['first_batch'], contribution['last_batch']))
    assert max(batches.values()) == 1
    table = json.loads(read('federation.json'))
    assert sorted(table['islands'].values()) == [0, 1, 2]
    for name in NAMES:
        assert json.loads(read(f'islands/{name}/state.json'))['state'] == 'finished'


def listings(bucket):
    """The requests that list objects."""
    return [path for method, path in bucket.requests if method == 'GET' and re.search(r'list-type|/o(\?|$)', path)]


def test_islands_agree_through_a_bucket_that_fails(bucket, islands):
    bucket.fail_often(1)
    run = islands(f'{bucket.url}/deep/federation', 4, bucket.environment)
    run.wait()
    check(run, 4, lambda key: bucket.content(f'deep/federation/{key}'))
    assert listings(bucket) == []


def test_islands_that_are_killed_agree(tmp_path, islands):
    run, rng = islands(str(tmp_path / 'federation'), 12), random.Random(2)
    for _ in range(9):
        name = rng.choice(NAMES)
        for _ in range(rng.randrange(1, 3)):
            if run.running[name].poll() is None:
                run.outputs[name] += run.running[name].stdout.readline()
        run.kill(name)
        run.start(name)
    run.wait()
    check(run, 12, lambda key: (tmp_path / 'federation' / key).read_bytes())


@pytest.mark.slow
def test_islands_that_are_killed_agree_through_a_bucket_that_fails(bucket, islands):
    bucket.fail_often(3)
    run, rng = islands(f'{bucket.url}/federation', 15, bucket.environment), random.Random(4)
    for _ in range(20):
        name = rng.choice(NAMES)
        if run.running[name].poll() is None:
            run.outputs[name] += run.running[name].stdout.readline()
        run.kill(name)
        run.start(name)
    run.wait()
    check(run, 15, lambda key: bucket.content(f'federation/{key}'))
    assert listings(bucket) == []


def test_a_dead_island_costs_one_patience(tmp_path, islands):
    """The others close a round without it once, and then wait for it no more."""
    run = islands(str(tmp_path), 6, None, 2.0)
    assert [run.running[name].stdout.readline() for name in NAMES] == ['joined\n'] * 3
    run.kill('c')
    for name in 'ab':
        run.outputs[name] += run.running[name].communicate(timeout=300)[0]
    closings = [json.loads((tmp_path / 'rounds' / str(n) / 'closed.json').read_bytes()) for n in range(1, 7)]
    assert sum('c' in closing['left_out'] for closing in closings) <= 1
