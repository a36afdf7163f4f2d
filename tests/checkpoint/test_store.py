"""Checkpoints are restored bit-exactly on any mesh, and an incomplete one is never used."""

import concurrent.futures
import os
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from bigram import Bigram
from pretrax.checkpoint import (
    Checkpoints,
    DamagedError,
    Keep,
    read_description,
    restore,
    restore_newest,
    state_files,
    steps_in,
    verify,
)
from pretrax.errors import UserError
from pretrax.train import optimizer
from pretrax.train.state import abstract_state, init_state
from pretrax.train.step import Recipe, make_step
from small import mesh_of, random_batch

DESCRIPTION = {'pretrax': '0.1', 'config': {'steps': 3}}


def recipe(model=None):
    return Recipe(model or Bigram(), optimizer.adamw(), lambda step: 0.01, 0.1, (), 1.0, 1)


def state_on(mesh, steps=2):
    with jax.set_mesh(mesh):
        state, step = init_state(recipe(), 0), make_step(recipe())
        for number in range(steps):
            state, _ = step(state, random_batch(8, number))
    return state


def saved(directory, state, *, steps=(2,), keep=None):
    checkpoints = Checkpoints(directory, keep or 10)
    for step in steps:
        checkpoints.save(step, state, DESCRIPTION)
    checkpoints.close()


def restored(directory, step, mesh, model=None):
    with jax.set_mesh(mesh):
        return restore(directory, step, abstract_state(recipe(model)))


@pytest.fixture(params=['apart', 'packed'])
def small_files(request, monkeypatch):
    """Small files are written one by one, or into packs of up to 10,000 bytes."""
    if request.param == 'packed':
        monkeypatch.setattr(state_files, '_MANY', 1)
        monkeypatch.setattr(state_files, '_PACK', 10_000)
        monkeypatch.setattr(state_files, 'LARGEST_PACKED', 30_000)  # the table on one device is larger
    return request.param


@pytest.mark.parametrize('mesh', [(1, 1, 1), (2, 2, 2), (1, 4, 1)])
def test_state_is_restored_bit_exactly_on_any_mesh(mesh, small_files, tmp_path):
    state = state_on(mesh_of(2, 2, 2))
    saved(tmp_path, state)
    assert any((tmp_path / '2' / 'state').glob('packed.0.*')) == (small_files == 'packed')
    verify(tmp_path, 2)
    back = restored(tmp_path, 2, mesh_of(*mesh))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), back, state)
    assert all(jax.tree.leaves(same)), same
    assert int(back.step) == 2
    assert back.weights.table.sharding.mesh.shape == mesh_of(*mesh).shape
    assert back.optimizer.mu.table.sharding == back.weights.table.sharding


@pytest.mark.parametrize('written_on', [(1, 1, 1), (2, 2, 2)])
def test_orbax_restores_what_was_saved(written_on, small_files, tmp_path):
    """Also on another mesh."""
    import orbax.checkpoint as ocp

    state = state_on(mesh_of(*written_on))
    saved(tmp_path, state)
    with jax.set_mesh(mesh_of(1, 4, 1)):
        like = abstract_state(recipe())
    handler = ocp.PyTreeCheckpointHandler()
    arguments = ocp.args.PyTreeRestore(item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    with ocp.Checkpointer(handler) as checkpointer:
        back = checkpointer.restore(tmp_path / '2' / 'state', args=arguments)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), back, state)))
    assert back.weights.table.sharding == like.weights.table.sharding


def test_each_file_and_the_names_in_each_directory_are_put_on_the_disk(small_files, tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr('os.fsync', lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))
    saved(tmp_path, state_on(mesh_of()))
    assert {path.name for path in tmp_path.rglob('*') if path.stat().st_ino not in synced} == set()
    assert tmp_path.stat().st_ino in synced


def test_description_is_read_without_the_state(tmp_path):
    saved(tmp_path, state_on(mesh_of(), steps=0))
    assert read_description(tmp_path, 2) == DESCRIPTION
    with pytest.raises(UserError, match=r'there is no checkpoint .* now'):
        read_description(tmp_path, 3)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    saved(tmp_path, state_on(mesh_of(), steps=0), steps=(1, 2, 30, 4000), keep=2)
    assert steps_in(tmp_path) == [30, 4000]


def test_saving_a_saved_step_again_changes_nothing(tmp_path):
    first, second = state_on(mesh_of(), steps=0), state_on(mesh_of(), steps=1)
    saved(tmp_path, first)
    saved(tmp_path, second)
    assert np.array_equal(restored(tmp_path, 2, mesh_of()).weights.table, first.weights.table)


def test_reading_creates_no_directory(tmp_path):
    assert steps_in(tmp_path / 'none') == []
    assert restore_newest(tmp_path / 'none', {}, print, print) is None
    assert not (tmp_path / 'none').exists()


def test_incomplete_checkpoint_is_ignored(tmp_path):
    """A process that is killed leaves a directory by another name, which neither listing nor restoring looks at."""
    saved(tmp_path, state_on(mesh_of(), steps=0))
    (tmp_path / '7.partial').mkdir()
    assert steps_in(tmp_path) == [2]
    with pytest.raises(DamagedError, match=r'there is no checkpoint .* now'):
        restored(tmp_path, 7, mesh_of())


@pytest.mark.parametrize('place', ['7.partial', '7.deleting'])
def test_leftovers_of_a_killed_process_are_removed_by_the_next_writer(place, tmp_path):
    saved(tmp_path, state_on(mesh_of(), steps=0))
    (tmp_path / place).mkdir()
    restored(tmp_path, 2, mesh_of())
    assert (tmp_path / place).exists()  # a reader removes nothing
    Checkpoints(tmp_path, 3).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['2']


def test_part_of_a_state_is_restored_in_another_dtype(tmp_path):
    """As the arrays cast by NumPy."""
    state = state_on(mesh_of())
    saved(tmp_path, state)
    like = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, 'bfloat16', sharding=w.sharding), state.weights)
    with jax.set_mesh(mesh_of()):
        back = restore(tmp_path, 2, {'weights': like})['weights']
    assert back.table.dtype == 'bfloat16'
    assert np.array_equal(back.table, np.asarray(state.weights.table).astype('bfloat16'))


@pytest.mark.parametrize(
    ('keep', 'stay'),
    [
        (Keep(last=1), {5}),
        (Keep(last=2, every=2), {2, 4, 5}),
        (Keep(last=1, best=1), {3, 5}),
        (Keep(last=1, best=2), {2, 3, 5}),
        (Keep(last=9), {1, 2, 3, 4, 5}),
    ],
)
def test_keep_chooses_checkpoints(keep, stay):
    reasons = keep.reasons({1: 5.0, 2: 3.0, 3: 2.0, 4: None, 5: 4.0})
    assert {step for step, why in reasons.items() if why} == stay


def test_a_validation_loss_that_is_not_a_number_does_not_drop_the_best(tmp_path):
    state = state_on(mesh_of(), steps=0)
    checkpoints = Checkpoints(tmp_path, Keep(last=1, best=1))
    for step, loss in [(1, 2.0), (2, float('nan')), (3, 3.0)]:
        checkpoints.save(step, state, DESCRIPTION | {'val_loss': loss})
    checkpoints.close()
    assert steps_in(tmp_path) == [1, 3]


def test_best_and_every_second_checkpoint_are_kept_on_disk(tmp_path):
    state = state_on(mesh_of(), steps=0)
    checkpoints = Checkpoints(tmp_path, Keep(last=1, every=4, best=1))
    for step, loss in [(1, 3.0), (2, 1.0), (4, 2.0), (5, 2.5), (6, 2.5)]:
        checkpoints.save(step, state, DESCRIPTION | {'val_loss': loss})
    checkpoints.close()
    assert steps_in(tmp_path) == [2, 4, 6]


def test_a_save_releases_each_array_as_it_is_written_and_waits_until_few_are_left(monkeypatch):
    monkeypatch.setattr(state_files, '_FEW', 0)
    arrays = [np.full(80, i, np.uint8) for i in range(8)]
    alive, gate, waited = [weakref.ref(array) for array in arrays], threading.Event(), threading.Event()
    files = state_files.HostFiles([(str(i), array) for i, array in enumerate(arrays)])
    del arrays

    def write(name, content):
        if name in ('0', '1'):  # a quarter of the bytes
            assert gate.wait(60)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        writing = pool.submit(files.write, write)
        waiting = pool.submit(lambda: (files.wait_until_few(writing.done), waited.set()))
        while sum(array() is not None for array in alive) > 2:
            time.sleep(0.01)
        assert not waited.is_set()
        gate.set()
        assert writing.result().keys() == {str(i) for i in range(8)}
        waiting.result()


def test_a_failed_save_does_not_wait():
    files = state_files.HostFiles([('0', np.zeros(1 << 27, np.uint8))])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: files.write(lambda name, content: 1 / 0))
        files.wait_until_few(writing.done)
        with pytest.raises(ZeroDivisionError):
            writing.result()
