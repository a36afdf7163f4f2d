"""Checkpoints in buckets, on real servers: whole when their manifest exists, whatever fails on the way."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from checkpoint.test_store import DESCRIPTION, recipe, restored, saved, state_on
from preloaded import programs
from pretrax.checkpoint import (
    Checkpoints,
    CheckpointWeights,
    DamagedError,
    Keep,
    SaveError,
    check_sizes,
    find_checkpoint,
    read_description,
    restore,
    restore_newest,
    steps_in,
    verify,
)
from pretrax.checkpoint import bucket as bucket_module
from pretrax.checkpoint.manifest import place_of
from pretrax.errors import UnavailableError
from pretrax.storage import BucketPath
from pretrax.storage.index import read_entries
from pretrax.storage.lease import HeldError, Lease
from pretrax.train.state import abstract_state
from side_by_side import coordinator_address, run_side_by_side
from small import mesh_of

PREFIX = 'runs/a/checkpoints/'
ATTEMPT = re.compile(r'(?<=\d)/[0-9a-f]{8}-\d+/')


@pytest.fixture
def directory(bucket):
    return BucketPath(bucket.url) / 'runs/a/checkpoints'


def newest(directory, say=lambda text: None):
    with jax.set_mesh(mesh_of()):
        return restore_newest(directory, abstract_state(recipe()), say)


def writes(server):
    """The keys that were written or deleted, in order."""
    found = []
    for method, path in server.requests:
        if method in ('PUT', 'POST', 'DELETE') and PREFIX in path:
            key = path[path.index(PREFIX) + len(PREFIX) :].partition('&')[0].partition('?')[0]
            found.append((method == 'DELETE', ATTEMPT.sub('/', key)))
    return found


def stored(server, file):
    """The key of a file of a checkpoint, such as '2/manifest.json'."""
    step, _, rest = file.partition('/')
    return f'{PREFIX}{read_entries(BucketPath(f"{server.url}/{PREFIX}"))[step]}/{rest}'


def harm(server, key, how):
    key = stored(server, key)
    content = server.content(key)
    if how == 'delete':
        server.delete(key)
    elif how == 'cut':
        server.put(key, content[:-1])
    elif how == 'extend':
        server.put(key, content + b'x')
    else:
        server.put(key, bytes([content[0] ^ 1]) + content[1:])


def test_a_state_is_restored_bit_exactly_on_any_mesh(directory, monkeypatch):
    """In objects of at most 10 kB, so that a shard has several."""
    monkeypatch.setattr(bucket_module, '_LARGEST', 10_000)
    state = state_on(mesh_of(2, 2, 2))
    saved(directory, state)
    for mesh in ((1, 1, 1), (2, 2, 2), (1, 4, 1)):
        back = restored(directory, 2, mesh_of(*mesh))
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), back, state)
        assert all(jax.tree.leaves(same)), same
    assert verify(directory, 2) == check_sizes(directory, 2)
    assert read_description(directory, 2) == DESCRIPTION
    assert find_checkpoint(directory.parent) == find_checkpoint(directory / '2') == (directory, 2)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float8_e4m3fn', 'uint32', 'bool'])
def test_arrays_are_zarr_that_tensorstore_reads(dtype, s3):
    """Also scalars, and with every dtype that a state may have."""
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    sharding = jax.sharding.NamedSharding(mesh_of(1, 4, 2), jax.sharding.PartitionSpec('d', 't'))
    values = np.arange(8 * 6).reshape(8, 6).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    state = {'weights': {'table': jax.device_put(values, sharding), 'scale': jax.numpy.asarray(values[1, 1])}}
    saved(directory, state)
    for name, expected in (('table', values), ('scale', values[1, 1])):
        kvstore = place_of(directory, 2).kvstore(f'/state/weights.{name}/')
        array = ts.open({'driver': 'zarr', 'kvstore': kvstore.spec().to_json()}).result()
        np.testing.assert_array_equal(array.read().result(), expected)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, restore(directory, 2, like), state)))


def test_steps_that_reuse_the_memory_of_a_state_do_not_change_what_is_uploaded(s3):
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jax.device_put(
        np.zeros((64, 8), np.float32),
        jax.sharding.NamedSharding(mesh_of(1, 4, 2), jax.sharding.PartitionSpec('d', 't')),
    )
    s3.fault(match='2/.*/state', delay=0.5)
    like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    with Checkpoints(directory, 3) as checkpoints:
        array = step(array)
        checkpoints.save(2, {'weights': array}, DESCRIPTION)
        for _ in range(5):
            array = step(array)
    assert np.all(restore(directory, 2, {'weights': like})['weights'] == 1)


def test_the_index_names_a_checkpoint_when_it_is_whole_and_until_it_is_removed(bucket, directory):
    saved(directory, state_on(mesh_of(2, 2, 2), steps=0), steps=(2, 4), keep=1)
    assert steps_in(directory) == [4]
    events = writes(bucket)
    for step in ('2', '4'):
        written = [key for is_deleted, key in events if not is_deleted and key.startswith(f'{step}/')]
        assert written.count(f'{step}/manifest.json') == 1
        assert written[-1] == f'{step}/manifest.json'
        assert len(written) > 10
    first = [event for event in events if event[0] or event[1] in ('4/manifest.json', 'index.json')]
    published = first.index((False, '4/manifest.json'))
    assert first[published + 1 : published + 3] == [(False, 'index.json')] * 2, 'published, and then removed'
    assert all(is_deleted and key.startswith('2/') for is_deleted, key in first[published + 3 :])
    assert all(key.startswith((f'{PREFIX}4/', f'{PREFIX}index.json')) for key in bucket.keys(PREFIX))


def test_the_rule_which_checkpoints_to_keep_holds_in_a_bucket(s3):
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    state = state_on(mesh_of(), steps=0)
    with Checkpoints(directory, Keep(last=1, every=4, best=1)) as checkpoints:
        for step, loss in [(1, 3.0), (2, 1.0), (4, 2.0), (5, 2.5), (6, 2.5)]:
            checkpoints.save(step, state, DESCRIPTION | {'val_loss': loss})
    assert steps_in(directory) == [2, 4, 6]


KILLED = """
import os
import sys
from checkpoint.test_store import saved, state_on
from pretrax.storage import BucketPath
from pretrax.storage.index import read_entries
from small import mesh_of

state = state_on(mesh_of(), steps=0)
print(os.getpid(), flush=True)
sys.stdin.readline()
saved(BucketPath(sys.argv[1]), state, steps=(2, 4))
"""


def test_a_process_that_is_killed_during_an_upload_leaves_no_checkpoint(bucket, directory):
    match = '4/.*/state/weights.table' if bucket.scheme == 's3' else '4/.*/manifest.json'
    process = subprocess.Popen(
        [programs() / 'python', '-c', KILLED, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, 'PYTHONPATH': str(Path(__file__).parents[1])},
    )  # fmt: skip

    def kill(method, path):
        if method in ('PUT', 'POST'):
            os.kill(number, signal.SIGKILL)
            process.wait()

    number = int(process.stdout.readline())
    bucket.fault(match=match, act=kill, cut_after=0, times=float('inf'))
    with process:
        process.stdin.close()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    bucket.faults.clear()
    assert any(key.startswith(f'{PREFIX}4/') for key in bucket.keys(PREFIX)), 'something was uploaded'
    assert steps_in(directory) == [2]
    assert newest(directory)[0] == 2
    Checkpoints(directory, 3).close()
    assert all(key.startswith((f'{PREFIX}2/', f'{PREFIX}index.json')) for key in bucket.keys(PREFIX))


def test_a_bucket_that_is_out_of_reach_fails_a_save_and_the_next_one_succeeds(bucket, directory):
    state = state_on(mesh_of(2, 2, 2), steps=0)
    with Checkpoints(directory, 3) as checkpoints:
        checkpoints.continue_from(0)
        checkpoints.save(2, state, DESCRIPTION)
        checkpoints.wait()
        with bucket.down():
            checkpoints.save(4, state, DESCRIPTION)
            assert not checkpoints._writing.done(), 'a step waits for the copy off the devices alone'
            with pytest.raises(SaveError, match=r'no checkpoint could be written to .*does not answer'):
                checkpoints.wait()
        assert newest(directory)[0] == 2
        smaller = state_on(mesh_of(), steps=0)  # has other chunks
        checkpoints.save(4, smaller, DESCRIPTION)
        checkpoints.wait()
    assert steps_in(directory) == [2, 4]
    verify(directory, 4)


def test_a_failed_upload_leaves_nothing_in_the_next_checkpoint(bucket, directory):
    """Some objects of the failed save are written; the next save of the same step has other chunks."""
    with Checkpoints(directory, 3) as checkpoints:
        bucket.fault(match='2/.*/state/weights.table/0.0', status=500, times=float('inf'))
        checkpoints.save(2, state_on(mesh_of(1, 4, 2), steps=0), DESCRIPTION)
        with pytest.raises(SaveError, match='HTTP 500'):
            checkpoints.wait()
        bucket.faults.clear()
        leftovers = set(bucket.keys())
        assert leftovers
        checkpoints.save(2, state_on(mesh_of(), steps=0), DESCRIPTION)
    assert leftovers - set(bucket.keys())
    verify(directory, 2)


def test_a_save_and_a_restore_survive_throttling_and_broken_connections(bucket, directory):
    state = state_on(mesh_of(2, 2, 2), steps=0)
    faults = [{'status': 500}, {'status': 503}, {'status': 429}, {'cut_after': 0}, {'lose_answer': True}]
    for fault in faults:
        bucket.fault(**fault, times=2, match='2/')
    saved(directory, state)
    assert not any(fault.times for fault in bucket.faults)
    for fault in faults:
        bucket.fault(**fault, times=2, match='2/.*/state')
    step, back, _ = newest(directory)
    assert not any(fault.times for fault in bucket.faults)
    assert step == 2
    assert np.array_equal(back.weights.table, state.weights.table)


def test_damage_is_detected_and_the_previous_checkpoint_restored(s3):
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    saved(directory, state_on(mesh_of(), steps=0), steps=(2, 4))
    for key in ('4/state/weights.table/0.0', '4/state/weights.table/.zarray', '4/manifest.json'):
        at = stored(s3, key)
        original = s3.content(at)
        for how in ('flip', 'cut', 'extend', 'delete'):
            harm(s3, key, how)
            said = []
            assert newest(directory, said.append)[0] == 2
            if (how, key) != ('delete', '4/manifest.json'):  # which deletes the checkpoint
                assert len(said) == 1, said
                assert said[0].startswith(f'WARNING: the checkpoint {directory / "4"}')
                with pytest.raises(DamagedError):
                    verify(directory, 4)
            s3.put(at, original)
    verify(directory, 4)


def test_packed_files_are_read_from_a_bucket_and_damage_to_them_is_detected(s3, monkeypatch):
    monkeypatch.setattr('pretrax.checkpoint.state_files._MANY', 1)
    directory, state = BucketPath(s3.url) / 'runs/a/checkpoints', state_on(mesh_of(2, 2, 2), steps=0)
    saved(directory, state, steps=(2, 4))
    assert [key.rpartition('/')[2] for key in sorted(s3.keys()) if '/state/' in key] == ['packed.0.0'] * 2
    verify(directory, 4)
    step, back, _ = newest(directory)
    assert step == 4
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, state)))
    rows = [CheckpointWeights(directory, 4).read('table', row, row + 1) for row in (0, 99)]
    assert np.array_equal(np.concatenate(rows), np.asarray(state.weights.table)[[0, 99]])
    original = s3.content(at := stored(s3, '4/state/packed.0.0'))
    for how in ('flip', 'cut', 'delete'):
        harm(s3, '4/state/packed.0.0', how)
        assert newest(directory)[0] == 2
        with pytest.raises(DamagedError):
            verify(directory, 4)
        s3.put(at, original)


def test_large_objects_are_read_in_parts_and_damage_to_them_is_detected(s3, monkeypatch):
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    monkeypatch.setattr('pretrax.checkpoint.chunks.REQUEST', 20_000)
    monkeypatch.setattr('pretrax.checkpoint.files.REQUEST', 20_000)
    state = state_on(mesh_of(), steps=0)
    saved(directory, state)
    assert np.array_equal(newest(directory)[1].weights.table, state.weights.table)
    at = stored(s3, '2/state/weights.table/0.0')
    original = s3.content(at)
    assert len(original) > 40_000
    for how in ('flip', 'cut', 'extend'):
        harm(s3, '2/state/weights.table/0.0', how)
        with pytest.raises(DamagedError, match=r'weights.table/0.0'):
            restored(directory, 2, mesh_of())
        s3.put(at, original)
    verify(directory, 2)


@pytest.mark.slow
def test_an_outage_is_not_taken_for_damage(bucket, directory):
    """Going back to an older checkpoint would lose work; the start fails, and the same command tries again."""
    saved(directory, state_on(mesh_of(), steps=0), steps=(2, 4))
    bucket.fault(match='4/.*/manifest.json', status=500, times=float('inf'))
    with pytest.raises(UnavailableError, match=r'does not answer .*\nrun the same command again'):
        newest(directory)
    bucket.faults.clear()
    bucket.fault(match='4/.*/state/weights.table/0.0', status=403, times=float('inf'))
    with pytest.raises(PermissionError):
        newest(directory)
    bucket.faults.clear()
    assert newest(directory)[0] == 4
    with bucket.down(), pytest.raises(UnavailableError, match=r'is not writable: .*does not answer'):
        Checkpoints(directory, 3)


def test_a_restore_reads_each_object_once_and_only_what_is_needed(bucket, directory):
    saved(directory, state_on(mesh_of(2, 2, 2), steps=0))
    bucket.requests.clear()
    restored(directory, 2, mesh_of(1, 4, 1))
    read = [path for method, path in bucket.requests if method == 'GET' and '/state/' in path and 'prefix=' not in path]
    assert len(read) == len(set(read)) == len(check_sizes(directory, 2).files)

    bucket.requests.clear()
    mesh = mesh_of(2, 2, 2)
    with jax.set_mesh(mesh):
        restore(directory, 2, {'weights': abstract_state(recipe()).weights})
    read = {path for method, path in bucket.requests if method == 'GET' and '/state/' in path and 'prefix=' not in path}
    assert read
    assert all('state/weights.' in path for path in read)


def test_weights_are_read_in_pieces_and_verified(s3, monkeypatch):
    """Each object once, although every row needs a part of several."""
    monkeypatch.setattr(bucket_module, '_LARGEST', 5000)
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    state = state_on(mesh_of(2, 2, 2), steps=0)
    saved(directory, state)
    weights = CheckpointWeights(directory, 2)
    s3.requests.clear()
    rows = [weights.read('table', row, row + 1) for row in range(100)]
    assert np.array_equal(np.concatenate(rows), state.weights.table)
    chunks = [
        path for method, path in s3.requests if method == 'GET' and 'weights.table/' in path and '.zarray' not in path
    ]
    assert len(chunks) == len(set(chunks)) >= 8
    harm(s3, '2/state/weights.bias/0', 'flip')
    with pytest.raises(DamagedError, match=r'weights.bias/0 differs from what was written'):
        CheckpointWeights(directory, 2).read('bias')


def test_a_rollback_and_a_replacement_work_in_a_bucket(s3):
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    first = state_on(mesh_of(), steps=0)
    second = jax.tree.map(lambda x: x + 1, first)
    with Checkpoints(directory, 9) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, first, DESCRIPTION)
        checkpoints.roll_back_to(2)
        assert steps_in(directory) == [2]
        checkpoints.save(4, first, DESCRIPTION)
    harm(s3, '4/state/weights.table/0.0', 'flip')
    with Checkpoints(directory, 9) as checkpoints:
        checkpoints.continue_from(newest(directory)[0])
        s3.requests.clear()
        checkpoints.save(4, second, DESCRIPTION)
        checkpoints.wait()
    events = writes(s3)
    assert [event for event in events if event[1] in ('4/manifest.json', 'index.json')] == [
        (False, '4/manifest.json'), (False, 'index.json')
    ]  # fmt: skip
    assert np.array_equal(restored(directory, 4, mesh_of()).weights.table, second.weights.table)
    assert json.loads(s3.content(stored(s3, '4/manifest.json')))['step'] == 4


TOGETHER = """
import sys
import jax
import numpy as np
from pretrax.checkpoint import Checkpoints, SaveError, restore
from pretrax.storage import BucketPath
from pretrax.storage.index import read_entries

directory, address, index = BucketPath(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, 2, index)
mesh = jax.make_mesh((4,), ('d',))
values = np.arange(512.0, dtype=np.float32).reshape(64, 8)

def array(*axes):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

state = {'weights': {'table': array('d'), 'bias': array()}}
with Checkpoints(directory, 3) as checkpoints:
    checkpoints.continue_from(0)
    for step in (2, 4, 6):
        try:
            checkpoints.save(step, state, {})
            checkpoints.wait()
        except SaveError as error:
            print(step, error)
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
restored = restore(directory, 6, like)
for shard in restored['weights']['table'].addressable_shards:
    assert np.array_equal(shard.data, values[shard.index])
"""


@pytest.mark.slow
def test_two_processes_upload_their_own_shards_and_agree_on_a_failure(s3):
    """The second process cannot upload a part of step 4."""
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    s3.fault(match='4/.*/state/weights.table/3.0', status=500, times=float('inf'))
    environment = {**os.environ, 'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': '2'}
    command = ['python', '-c', TOGETHER, str(directory), coordinator_address()]
    both = run_side_by_side([[*command, str(index)] for index in range(2)], [environment] * 2)
    assert [process.returncode for process in both] == [0, 0], [process.stderr for process in both]
    printed = [''.join(line for line in p.stdout.splitlines(True) if '[Gloo]' not in line) for p in both]
    assert all(text.startswith('4 no checkpoint could be written') for text in printed), printed
    assert all('HTTP 500' in text and '(process 1)' in text and text.count('\n') == 1 for text in printed), printed
    assert steps_in(directory) == [2, 6]
    for step in (2, 6):
        verify(directory, step)
    uploaded = [key for is_deleted, key in writes(s3) if key.startswith('2/') and not is_deleted]
    chunks = [f'weights.table/{i}.0' for i in range(4)]
    files = ['weights.bias/.zarray', 'weights.bias/0.0', 'weights.table/.zarray', *chunks]
    assert sorted(uploaded) == ['2/manifest.json', *(f'2/state/{file}' for file in sorted(files))]


STOPPED = """
import os
import sys
import jax
from checkpoint.test_store import DESCRIPTION, state_on
from pretrax.checkpoint import Checkpoints
from pretrax.storage import BucketPath
from pretrax.storage.lease import HeldError, Lease
from small import mesh_of

run = BucketPath(sys.argv[1])
state = jax.tree.map(lambda x: x + 7, state_on(mesh_of(2, 2, 2), steps=0))
print(os.getpid(), flush=True)
sys.stdin.readline()
with Lease(run / 'lock', 1.0).held() as lease:
    with Checkpoints(run / 'checkpoints', 1, confirm=lease.confirm) as checkpoints:
        checkpoints.save(10, state, DESCRIPTION)
"""


@pytest.mark.slow
def test_a_process_that_is_stopped_during_an_upload_changes_no_byte_of_its_successor(s3, monkeypatch):
    """SIGSTOP during the upload of step 10; its successor, on another mesh, writes step 10; SIGCONT."""
    directory = BucketPath(s3.url) / 'runs/a/checkpoints'
    monkeypatch.setattr('pretrax.storage.lease.has_ended', lambda process: False)  # as on another machine
    process = subprocess.Popen(
        [programs() / 'python', '-c', STOPPED, str(directory.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, 'PYTHONPATH': str(Path(__file__).parents[1])},
    )  # fmt: skip
    uploaded, stopped = itertools.count(), threading.Event()

    def stop(method, path):
        if method == 'PUT' and next(uploaded) == 6 and not stopped.is_set():
            os.kill(number, signal.SIGSTOP)
            stopped.set()

    try:
        number = int(process.stdout.readline())
        s3.fault(match='10/.*/state', method='PUT', act=stop, times=float('inf'))
        process.stdin.write('\n')
        process.stdin.flush()
        assert stopped.wait(120)
        s3.faults.clear()
        lock = directory.parent / 'lock'
        mine = state_on(mesh_of(), steps=0)
        with contextlib.ExitStack() as taken:
            for _ in range(5):  # a renewal may have been under way
                with contextlib.suppress(HeldError):
                    lease = taken.enter_context(Lease(lock, 60, lambda text: None).held())
                    break
            checkpoints = taken.enter_context(Checkpoints(directory, 1, confirm=lease.confirm))
            checkpoints.save(10, mine, DESCRIPTION)
            checkpoints.wait()
            place = place_of(directory, 10)
            before = {name: (place / name).read_bytes() for name in place.files()}
            os.kill(number, signal.SIGCONT)
            _, complaint = process.communicate(timeout=120)
            assert 'held by process' in complaint
            assert process.returncode != 0
            assert place_of(directory, 10) == place
            assert {name: (place / name).read_bytes() for name in place.files()} == before
            assert np.array_equal(restored(directory, 10, mesh_of()).weights.table, mine.weights.table)
            checkpoints.save(20, mine, DESCRIPTION)
        assert {key.removeprefix(PREFIX).partition('/')[0] for key in s3.keys(PREFIX)} == {'20', 'index.json'}
    finally:
        process.kill()
