"""The moving average of the weights: its formula, where it lies, and what a run does with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigram import Bigram
from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.train import optimizer
from pretrax.train.state import abstract_state, init_state
from pretrax.train.step import Recipe, make_step
from pretrax.weights.averaged import write_average
from pretrax.weights.trained import open_trained
from runs import Quiet, StoppedAt, lines_of
from small import LLAMA, mesh_of, random_batch, transformer

DECAY = 0.7


def recipe(model=None, decay=DECAY):
    return Recipe(model or Bigram(), optimizer.adamw(), lambda step: jnp.float32(0.1), 0.0, (), 1.0, 1, ema_decay=decay)


def test_the_average_follows_its_recurrence_and_skipped_steps_leave_it():
    """d = min(decay, (1 + n) / (10 + n)), in double precision; batch 5 has a loss that is not a number."""
    batches = [random_batch(8, number) for number in range(30)]
    batches[5] = dataclasses.replace(batches[5], mask=batches[5].mask * np.nan)
    with jax.set_mesh(mesh_of()):
        state, step = init_state(recipe(), 0), make_step(recipe())
        expected = jax.tree.map(np.float64, jax.device_get(state.weights))
        n = 0
        for batch in batches:
            before = jax.device_get(state.ema)
            state, _ = step(state, batch)
            if batch is batches[5]:
                assert np.array_equal(before.table, state.ema.table)
                continue
            n += 1
            d = min(DECAY, (1 + n) / (10 + n))
            expected = jax.tree.map(lambda a, w, d=d: d * a + (1 - d) * w, expected, jax.device_get(state.weights))
            np.testing.assert_allclose(state.ema.table, expected.table, atol=1e-6)
    assert n == 29
    assert d == DECAY  # the decay is reached
    assert not np.allclose(state.ema.table, state.weights.table, atol=1e-3)


def test_the_average_is_sharded_as_the_weights():
    with jax.set_mesh(mesh_of(2, 2, 2)):
        model = transformer(LLAMA, mesh_of(2, 2, 2))
        like, without = abstract_state(recipe(model)), abstract_state(recipe(model, None))
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)  # noqa: E731
    assert of(like.ema) == of(like.weights)
    assert without.ema is None


@pytest.mark.slow
def test_a_run_keeps_evaluates_resumes_and_writes_its_average(values, tmp_path, capsys):
    settings = values | {
        'optimizer': {'learning_rate': 1e-2, 'ema_decay': 0.8}, 'eval': {'every': 3, 'batches': 1},
        'checkpoint': {'every': 3},
    }  # fmt: skip
    whole = pretrain(config_from_values(settings), progress=Quiet())
    resumed = settings | {'run_dir': str(tmp_path / 'resumed')}
    pretrain(config_from_values(resumed), progress=StoppedAt(4))
    again = pretrain(config_from_values(resumed), progress=Quiet())
    for a, b in zip(jax.tree.leaves(whole.state.ema), jax.tree.leaves(again.state.ema), strict=True):
        assert np.array_equal(a, b)
    evaluated = lines_of(settings, 'val_loss_ema')
    assert [line['step'] for line in evaluated] == [3, 6]
    assert all(line['val_loss_ema'] != line['val_loss'] for line in evaluated)

    out = str(tmp_path / 'average')
    with pytest.raises(SystemExit) as end:
        main(['checkpoint', 'average', settings['run_dir'], '--ema', '--out', out])
    assert end.value.code in (0, None)
    assert 'moving average of the weights of' in capsys.readouterr().out
    opened = open_trained(out)
    for a, b in zip(jax.tree.leaves(opened.weights()), jax.tree.leaves(whole.state.ema), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    losses = pretrain(
        config_from_values(
            settings
            | {'run_dir': str(tmp_path / 'from'), 'init_from': out, 'steps': 1, 'schedule': {'name': 'constant'}}
        ),
        progress=Quiet(),
    )
    assert losses.metrics['loss'] > 0


def test_a_run_without_an_average_says_how_to_get_one(small, tmp_path):
    pretrain(config_from_values(small | {'steps': 2, 'schedule': {'name': 'constant'}}), progress=Quiet())
    with pytest.raises(UserError, match=r'no moving average of the weights\ntrain with optimizer.ema_decay'):
        write_average([small['run_dir']], str(tmp_path / 'out'), 1, ema=True)


def test_the_predicted_memory_counts_the_average(values):
    from pretrax.run.setup import memory_of_run, prepare

    config = config_from_values(values | {'optimizer': {'learning_rate': 1e-2, 'ema_decay': 0.9}})
    run, without = prepare(config, lambda text: None), prepare(config_from_values(values), lambda text: None)
    with_average, memory = memory_of_run(run), memory_of_run(without)
    assert with_average is not None
    assert memory is not None
    assert with_average.moments / memory.moments == pytest.approx(3 / 2, rel=1e-4)  # AdamW: two, and the average
