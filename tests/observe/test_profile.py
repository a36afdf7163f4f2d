"""Traces of a run's steps: they are there, have the steps and no others, and a run too short for one says so."""

import contextlib
import dataclasses
import gzip
import json
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pretrax import config_from_values, pretrain
from pretrax.observe.profile import profiled
from runs import BIGRAM, Quiet, small_values, write_documents


def executions(path):
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
    return len([event for event in events if event.get('name') == 'one call'])


class Seconds:
    """A clock that a test moves."""

    interruptions = done = 0

    def __init__(self):
        self.now, self.works = 0.0, []

    def seconds_of_done(self):
        return self.now

    @contextlib.contextmanager
    def paused(self, work, step):
        self.interruptions += 1
        self.works.append((work, step))
        yield


class Metrics(NamedTuple):
    clock: Seconds

    def read(self):
        pass


@dataclasses.dataclass
class Options:
    profile: int = 0
    profile_on_slow: float | None = None


class State(NamedTuple):
    step: jax.Array
    weights: jax.Array


def follow(tmp_path, options, times):
    """Makes steps that take these seconds. Returns the traces by the number
    of their first step, and what was reported.
    """
    clock, said = Seconds(), []

    @jax.jit
    def square(state):
        return State(state.step + 1, state.weights @ state.weights)

    def step_by_name(state):
        with jax.profiler.TraceAnnotation('one call'):
            return square(state)

    state = State(jnp.int32(100), jnp.eye(8))  # of a run that was resumed after step 100
    with profiled(step_by_name, options, tmp_path, said.append, Metrics(clock)) as step:
        for seconds in times:
            state = step(state)
            clock.now, clock.done = clock.now + seconds, clock.done + 1
    traced, found = [], {}
    for path in (tmp_path / 'profile').rglob('perfetto_trace.json.gz'):
        about = json.loads((path.parent / 'steps.json').read_text())
        assert executions(path) == about['last_step'] - about['first_step'] + 1
        found[about['first_step']] = about | {'path': path}
        traced += [('trace', about['first_step'] - 1), ('trace', about['last_step'])]
    assert [work for work in clock.works if found] == sorted(traced), (
        'the clock stops while a trace is started or written'
    )
    return found, said


@pytest.mark.parametrize(('calls', 'traced'), [(7, 2), (4, 1)])
def test_the_steps_after_the_third_are_traced_and_the_trace_is_reported(tmp_path, calls, traced):
    found, said = follow(tmp_path, Options(profile=2), [1.0] * calls)
    (about,) = found.values()
    assert (about['first_step'], about['last_step'], about['reason']) == (104, 103 + traced, 'log.profile')
    assert about['memory']['by_owner'] == {'weights': 8 * 8 * 4, 'step': 4}
    assert said == [
        f'profile: calls 4 to {3 + traced} of the step are in {about["path"]}; '
        f'print it: pretrax trace {tmp_path}; or open it at https://ui.perfetto.dev'
    ]


def test_the_steps_after_a_slow_one_are_traced_a_few_times_and_not_at_once_again(tmp_path, monkeypatch):
    monkeypatch.setattr('pretrax.observe.profile.MOST_SLOW', 2)
    times = [1.0] * 340
    for number in (15, 25, 130, 300):  # the second is too early, and the last one too many
        times[number - 1] = 3.5
    found, said = follow(tmp_path, Options(profile_on_slow=3.0), times)
    assert sorted(found) == [116, 231]  # the 15th step is slow, which is known when the 16th begins
    assert [found[first]['last_step'] for first in (116, 231)] == [118, 233]
    assert '3.5 s, 3.5 times the usual time' in found[116]['reason']
    assert said[0] == 'profile: call 15 of the step took 3.5 s, 3.5 times the usual time; the next ones are traced'
    assert len(said) == 4


def test_without_slow_steps_nothing_is_traced(tmp_path):
    assert follow(tmp_path, Options(profile_on_slow=3.0), [1.0, 9.0, 9.0] + [1.0] * 20) == ({}, [])


def test_a_trace_that_cannot_be_started_does_not_stop_training(tmp_path):
    jax.profiler.start_trace(tmp_path / 'other')  # by the user, say
    try:
        found, said = follow(tmp_path, Options(profile=1), [1.0] * 6)
    finally:
        jax.profiler.stop_trace()
    assert not found
    assert said[0].startswith('WARNING: profile: cannot trace:')


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


def test_the_time_of_writing_a_trace_is_not_that_of_a_step(tmp_path, monkeypatch):
    """A trace that takes 2 s to start and to write makes no step slower, and none faster than it was."""
    for name in ('start_trace', 'stop_trace'):
        monkeypatch.setattr(jax.profiler, name, slowly(getattr(jax.profiler, name)))
    values = small_values(write_documents(tmp_path), tmp_path)
    values |= {'model': BIGRAM, 'steps': 8, 'schedule': {}, 'log': {'every': 1, 'profile': 2}}
    result = pretrain(config_from_values(values), progress=Quiet())
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    seconds = [result.run.size.tokens / line['tokens_per_second'] for line in lines if 'tokens_per_second' in line]
    assert len(seconds) == 8
    assert max(seconds) < 2
    pauses = [json.loads(line) for line in (tmp_path / 'run' / 'pauses.jsonl').read_text().splitlines()]
    traces = [pause for pause in pauses if pause['work'] == 'trace']
    assert [pause['step'] for pause in traces] == [3, 5]
    assert min(pause['seconds'] for pause in traces) > 2


def slowly(function):
    def slow(*arguments, **named):
        time.sleep(2)
        return function(*arguments, **named)

    return slow
