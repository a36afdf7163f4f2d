"""Full memory: real errors of XLA become a message with what is alive and what to change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax import config_from_values, pretrain
from pretrax.errors import MOST_LINES, UserError
from pretrax.run.compiled_step import compile_step
from pretrax.run.logged_program import LoggedProgram
from pretrax.run.out_of_memory import explaining_full_memory, is_full_memory, knobs
from pretrax.run.setup import prepare_and_report
from runs import BIGRAM, Quiet, small_values, write_documents


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('full')
    values = small_values(write_documents(folder), folder)
    (folder / 'run').mkdir()
    return prepare_and_report(config_from_values(values), lambda text: None, False)[0]


def fill():
    """An array that no machine has memory for: XLA's own error."""
    return jnp.ones((1 << 50,), jnp.int8).block_until_ready()


def test_a_full_device_is_explained_with_what_is_alive_and_what_to_change(run):
    with pytest.raises(UserError) as caught, explaining_full_memory(run, 'compiling the step'):
        fill()
    lines = str(caught.value).splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[0].startswith('out of memory on a device while compiling the step')
    assert lines[1].startswith('  JAX: RESOURCE_EXHAUSTED')
    weights = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * 4 for leaf in jax.tree.leaves(run.like.weights))
    assert f'weights {weights / 1000:.3g} kB' in lines[2]
    assert f'optimizer {2 * weights / 1000:.3g} kB' in lines[2]  # two moments per weight, and a counter of 4 bytes
    assert any(line.startswith('  batch.micro=1 (') for line in lines)
    text = (run.config.run_dir / 'out_of_memory.txt').read_text()
    assert 'weights.layers.up  float32[1, 16, 64]' in text
    assert 'attention_out' in text  # an activation, by the name that the model gives it


def test_other_arrays_that_are_alive_are_named_by_shape(run):
    leaked = jnp.ones((123, 457))
    with pytest.raises(UserError), explaining_full_memory(run, 'compiling the step'):
        fill()
    text = (run.config.run_dir / 'out_of_memory.txt').read_text()
    assert 'float32[123, 457]' in text.partition('other arrays that are alive')[2]
    del leaked


def test_other_errors_pass(run):
    assert not is_full_memory(ValueError('RESOURCE_EXHAUSTED: a message is larger than 4 MB'))
    for error in (ValueError('no'), jax.errors.JaxRuntimeError('INTERNAL: no')):
        with pytest.raises(type(error), match='no'), explaining_full_memory(run, 'compiling the step'):
            raise error


def test_the_knobs_save_what_the_formula_of_memory_says_largest_first(run):
    found = knobs(run)
    assert [one.saved for one in found] == sorted((one.saved for one in found), reverse=True)
    assert 'batch.micro=1' in {one.change for one in found}


class Full:
    """A compiled program for which there is no memory."""

    def __call__(self, state, batch):
        return fill()

    def memory_analysis(self):
        return None  # as of some backends


def test_training_that_fills_the_memory_ends_with_the_explanation(tmp_path, monkeypatch):
    values = small_values(write_documents(tmp_path), tmp_path) | {'model': BIGRAM}

    def compile_larger(*arguments):
        return dataclasses.replace(compile_step(*arguments), call=Full())

    monkeypatch.setattr('pretrax.run.loop.compile_step', compile_larger)
    with pytest.raises(UserError, match='out of memory on a device while training'):
        pretrain(config_from_values(values), progress=Quiet())
    assert (tmp_path / 'run' / 'out_of_memory.txt').exists()


class LateFull(Full):
    """A compiled step whose metrics do not come, because memory is full when the device runs it."""

    def __call__(self, state, batch):
        return state, {'skipped_in_a_row': Late()}


class Late:
    def is_ready(self):
        return True

    def __int__(self):
        return int(fill())


def test_a_step_that_fills_the_memory_while_its_metrics_are_read_is_explained_too(tmp_path, monkeypatch):
    values = small_values(write_documents(tmp_path), tmp_path) | {'model': BIGRAM}

    def compile_larger(*arguments):
        return dataclasses.replace(compile_step(*arguments), call=LateFull())

    monkeypatch.setattr('pretrax.run.loop.compile_step', compile_larger)
    with pytest.raises(UserError, match='out of memory on a device while training'):
        pretrain(config_from_values(values), progress=Quiet())


def test_layer_statistics_that_fill_the_memory_are_named(tmp_path, monkeypatch):
    values = small_values(write_documents(tmp_path), tmp_path) | {'model': BIGRAM, 'log': {'layers': 1}}
    monkeypatch.setattr(LoggedProgram, '_compile', lambda *_: fill())
    with pytest.raises(UserError, match=r'while computing the layer statistics \(log\.layers\)'):
        pretrain(config_from_values(values), progress=Quiet())
