"""A trace of a run's steps: it is there, it has the steps and no others, and a run too short for one says so."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from pretrax import config_from_values, pretrain
from pretrax.observe.profile import profiled
from runs import BIGRAM, Quiet, small_values, write_documents


def executions(path):
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
    return len([event for event in events if event.get('name') == 'one call'])


@pytest.mark.parametrize(('calls', 'traced'), [(7, 2), (4, 1)])
def test_the_steps_after_the_third_are_traced_and_the_trace_is_reported(tmp_path, calls, traced):
    square = jax.jit(lambda x: x @ x)

    def step_by_name(x):
        with jax.profiler.TraceAnnotation('one call'):
            return square(x)

    said, x = [], jnp.eye(8)
    with profiled(step_by_name, 2, tmp_path, said.append) as step:
        for _ in range(calls):
            x = step(x)
    (path,) = tmp_path.rglob('perfetto_trace.json.gz')
    assert executions(path) == traced
    assert said == [f'profile: calls 4 to {3 + traced} of the step are in {path}; open it at https://ui.perfetto.dev']


def test_a_run_writes_a_trace_if_configured(tmp_path):
    values = small_values(write_documents(tmp_path), tmp_path)
    values |= {'model': BIGRAM, 'log': {'every': 1, 'profile': 1}}
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    assert list((tmp_path / 'run' / 'profile').rglob('perfetto_trace.json.gz'))
    assert any(line.startswith('profile: calls 4 to 4 of the step are in') for line in progress.said)
    progress = Quiet()
    pretrain(config_from_values(values | {'steps': 8}), progress=progress)
    assert 'profile: nothing was traced, because the run ended within its first 3 steps' in progress.said
