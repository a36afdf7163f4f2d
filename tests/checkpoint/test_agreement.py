"""Exchanges between processes: what they cost with many processes, and that the coordinator keeps nothing."""

import collections
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from many_processes import Processes
from pretrax.checkpoint import Checkpoints
from pretrax.checkpoint.agreement import agree, broadcast, decide, from_process_0, gather, together
from pretrax.checkpoint.directory import Directory
from pretrax.checkpoint.manifest import DamagedError, read_manifest
from pretrax.errors import UserError
from side_by_side import coordinator_address, run_side_by_side

SAVES = """
import sys
import jax
from pretrax.checkpoint import Checkpoints
from pretrax.jax_compat import coordination_client
from pathlib import Path

directory, address, index, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.distributed.initialize(address, 2, index)
mesh = jax.make_mesh((2,), ('d',))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('d'))
table = jax.make_array_from_callback((64, 8), sharding, lambda index: jax.numpy.ones((64, 8))[index])
state = {'weights': {'table': table}}
with Checkpoints(directory, 2) as checkpoints:
    checkpoints.continue_from(0)
    for step in range(1, n + 1):
        checkpoints.save(step, state, {})
        checkpoints.wait()
        if step == n and index == 0:
            print(sum(key.startswith('pretrax/') for key, _ in coordination_client().key_value_dir_get('pretrax/')))
"""


@pytest.mark.slow
def test_no_keys_are_left_in_the_coordinator_by_saves(tmp_path):
    """It kept a key for each process and file of each save, about 1 MB at 9,000 files."""
    left = []
    for n in (2, 8):
        command = ['python', '-c', SAVES, str(tmp_path / str(n)), coordinator_address()]
        environment = {**os.environ, 'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': '1'}
        both = run_side_by_side([[*command, str(index), str(n)] for index in range(2)], [environment] * 2)
        assert [process.returncode for process in both] == [0, 0], [process.stderr for process in both]
        left.append(int(both[0].stdout.splitlines()[-1]))
    assert left[0] == left[1] <= 4


@pytest.mark.parametrize('problems', [{}, {3: 'the disk is full', 7: 'no memory'}])
def test_an_exchange_takes_as_many_requests_with_fifty_thousand_processes_as_with_a_hundred(problems, monkeypatch):
    used = []
    for n in (100, 50_000):
        processes = Processes(n, monkeypatch)
        for _ in range(2):
            for index in range(1, n):
                with processes.turn(index):
                    assert gather('save', problems.get(index, '')) == []
            answer = agree('save', '')
            assert answer == ('the disk is full (process 3)' if problems else '')
            for index in range(1, n):
                with processes.turn(index):
                    assert broadcast('save', '') == answer
        others = max(processes.coordinator.requests[index] for index in range(1, n))
        used.append((processes.coordinator.requests[0], others, len(processes.coordinator.values)))
    assert used[0] == used[1]
    assert used[0][2] == 1  # the last answer, which another process may still have to read


def saved_by_process_0(n, directory, monkeypatch):
    """The requests of process 0 for one save by n processes, each of which writes one file."""
    processes = Processes(n, monkeypatch)
    state = {'weights': {'table': jnp.ones((4, 2))}}

    def arrive(key):
        assert key.endswith('/complete')
        for index in range(1, n):
            with processes.turn(index):
                assert from_process_0('save', arrive) == ''
                gather('save', json.dumps(['', {f'state/table/{index}': {'size': 1, 'xxh3': '0' * 32}}]))

    processes.coordinator.wait = arrive
    with Checkpoints(directory, 2) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
    assert len(read_manifest(directory, 1).files) >= n
    assert len(processes.coordinator.values) < 5
    return processes.coordinator.requests[0]


def test_a_save_takes_process_0_as_many_requests_with_many_processes_as_with_few(tmp_path, monkeypatch):
    few, many = (saved_by_process_0(n, tmp_path / str(n), monkeypatch) for n in (10, 5_000))
    assert few == many < 20


@pytest.mark.parametrize('others', [1, 2_000])
def test_a_process_looks_at_no_file_that_others_write(others, tmp_path, monkeypatch):
    """Otherwise a shared disk would serve as many requests as processes times files."""
    Processes(others + 1, monkeypatch).coordinator.process = 1
    directory = Directory(tmp_path, 'token', lambda: None)
    directory.prepare(1)
    partial = tmp_path / 'token.partial/1.partial'
    for index in range(others):
        (partial / str(index)).write_bytes(b'')
    monkeypatch.setattr('pretrax.checkpoint.directory.copy_to_host', lambda state: [('state/x/0', np.ones(3))])
    directory.write(1, {})
    calls = collections.Counter()
    for name in ('scandir', 'listdir', 'stat', 'lstat', 'mkdir', 'open'):
        actual = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _name=name, _do=actual, **k: (calls.update([_name]), _do(*a, **k))[1])
    directory.finish(1)
    monkeypatch.undo()
    assert calls == {'mkdir': 2}  # the file is opened in another way
    assert (partial / 'state/x/0').stat().st_size == 24


class RefusedError(Exception):
    pass


@pytest.mark.parametrize(
    ('error', 'elsewhere'),
    [(RefusedError('no'), RefusedError), (DamagedError('no'), UserError), (KeyError('no'), UserError)],
)
def test_an_error_of_process_0_is_raised_in_all_processes(error, elsewhere, monkeypatch):
    processes = Processes(2, monkeypatch)

    def work():
        assert processes.coordinator.process == 0
        raise error

    with pytest.raises(type(error)):
        from_process_0('work', work, [RefusedError])
    with processes.turn(1), pytest.raises(elsewhere, match='no') as raised:
        from_process_0('work', work, [RefusedError])
    assert raised.type is elsewhere


@pytest.mark.parametrize('where', [0, 1])
def test_an_error_of_any_process_is_raised_in_all_of_them(where, monkeypatch):
    """The first process is asked last: the others wait for it."""
    processes, raised = Processes(2, monkeypatch), []

    def work(index):
        with pytest.raises(RefusedError, match='no') as caught, together('work', UserError, RefusedError):
            if index == where:
                raise RefusedError('no')
        raised.append(str(caught.value))

    def answer(key):
        with processes.turn(0):
            work(0)

    processes.coordinator.wait = answer
    with processes.turn(1):
        work(1)
    assert raised == ['no (process 1)' if where else 'no'] * 2


def test_process_0_decides_from_the_values_of_all_processes(monkeypatch):
    processes = Processes(3, monkeypatch)
    for index in (1, 2):
        with processes.turn(index):
            gather('value', json.dumps(10**index))
    assert decide('value', 1, sum) == 111
    with processes.turn(1):
        assert json.loads(broadcast('value', '')) == 111
