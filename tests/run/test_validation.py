"""Evaluation: the loss on held-out tokens, for each source of a mixture and for all."""

import jax
import numpy as np
import pytest

import reference
from pretrax import config_from_values, pretrain
from pretrax.errors import UserError
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.results import TASKS, run_tasks
from pretrax.evaluate.task import Settings, Task, choose
from pretrax.run import validation
from runs import Quiet, lines_of


def test_validation_loss_is_the_mean_over_held_out_tokens(values):
    """Of two batches, the second of which is not full, computed again by the reference from the final weights."""
    values['batch'] = {'tokens': 1024, 'sequence_length': 16}
    values['eval'] = {'every': 2, 'batches': 2}
    result = pretrain(config_from_values({**values, 'steps': 2}), progress=Quiet())
    source, arch = result.run.source, result.run.recipe.model.arch
    weights = jax.device_get(result.state.weights)
    nll = jax.jit(reference.nll, static_argnums=2)
    total = count = 0.0
    for index in range(2):
        batch = source.validation(index, slice(0, 64), 64)
        assert np.any(batch.mask.sum(axis=1) == 0) == (index == 1)
        total += float(nll(weights, batch, arch)) * batch.mask.sum()
        count += batch.mask.sum()
    (line,) = lines_of(values, 'val_loss')
    np.testing.assert_allclose(line['val_loss'], total / count, rtol=1e-5)
    bits = total / count / np.log(2) / source.validation_bytes_per_token
    np.testing.assert_allclose(line['val_bits_per_byte'], bits, rtol=1e-5)
    assert result.validation | {'time': line['time']} == line


def test_tasks_are_metrics_and_a_failing_one_stops_nothing(small, monkeypatch):
    """The same numbers as from the final weights outside of the run; steps without a validation loss have tasks too."""

    def fails(settings):
        raise RuntimeError('nothing works')

    monkeypatch.setattr(validation, 'TASKS', {**TASKS, 'bad': Task('bad', '', fails)})
    small['eval'] = {'every': 4, 'batches': 1, 'tasks': ['bad', 'copying', 'cloze'], 'tasks_every': 3, 'tasks_limit': 2}
    progress = Quiet()
    result = pretrain(config_from_values(small), progress=progress)
    assert sum('task bad failed' in said for said in progress.said) == 2
    lines = lines_of(small, 'task/cloze/logprob')
    assert [line['step'] for line in lines] == [3, 6]
    assert ['val_loss' in line for line in lines] == [False, True]
    run = result.run
    model = LanguageModel(run.recipe.model, result.state.weights, run.source.tokenizer, length=16)
    expected = run_tasks(model, choose(['copying', 'cloze'], TASKS), Settings(limit=2), pytest.fail).flat()
    assert {key: value for key, value in lines[-1].items() if key.startswith('task')} == expected


def test_an_unknown_task_is_refused_before_training(small):
    with pytest.raises(UserError, match='did you mean cloze'):
        pretrain(config_from_values(small | {'eval': {'tasks': ['clozes']}}), progress=Quiet())
    assert not lines_of(small)


def test_each_source_of_a_mixture_has_its_own_validation_loss(small, documents):
    """Against the same run with one source at a time held out; the whole is their mean by weight."""
    shared = {'tokenizer': 'bytes', 'validation': 0.2}
    half = documents.with_name('half.jsonl')
    half.write_text(''.join(documents.read_text().splitlines(keepends=True)[:30]))
    sources = [
        {'name': 'all', 'weight': 3, 'text': str(documents)},
        {'name': 'half', 'weight': 1, 'text': str(half)},
    ]
    small |= {'eval': {'every': 2, 'batches': 2}, 'steps': 2, 'data': {**shared, 'mixture': sources}}
    small['mesh'] = {'r': 8, 'd': 1, 't': 1}  # the vocabulary of bytes is no multiple of d
    progress = Quiet()
    result = pretrain(config_from_values(small), progress=progress)
    (line,) = lines_of(small, 'val_loss')
    mean = 0.75 * line['val_loss/all'] + 0.25 * line['val_loss/half']
    assert line['val_loss'] == pytest.approx(mean, rel=1e-12)
    assert any('mixture: all: 75.0% of the rows' in said for said in progress.said)

    table, bias = jax.device_get((result.state.weights.table, result.state.weights.bias))
    for name, (_, held_out) in result.run.source.validation_parts.items():
        top = bottom = 0.0
        for index in range(2):
            batch = held_out(index, slice(0, 8), 8)
            logits = table[batch.tokens] + bias
            chosen = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
            top += ((np.log(np.exp(logits).sum(axis=-1)) - chosen) * batch.mask).sum()
            bottom += batch.mask.sum()
        np.testing.assert_allclose(line[f'val_loss/{name}'], top / bottom, rtol=1e-5)
