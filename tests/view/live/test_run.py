"""A watched run: its state, what it warns of, and what those who watch are sent."""

import json
import math
import shutil

import pytest

from live_server import WrittenRun
from pretrax.observe.metrics import read_metrics
from pretrax.system.locks import lock_directory
from pretrax.view.live import curves as live_curves
from pretrax.view.live import follow
from pretrax.view.live import run as live_run
from pretrax.view.live.run import WatchedRun


class Watcher:
    """A run, and what a page knows of it from its events."""

    def __init__(self, path):
        self.run, self.info, self.curves, self.samples = WatchedRun(path, 'tiny'), {}, {}, []

    def poll(self):
        self.run._state_timer._next = self.run._config_timer._next = 0.0
        more = True
        while more:
            events, more = self.run.poll(), self.run.more
            for kind, data in events:
                json.dumps(data, allow_nan=False)
                getattr(self, f'_{kind}')(data)
        return self.info

    def _run(self, data):
        self.info = data

    def _samples(self, data):
        self.samples = data['samples']

    def _curves(self, data):
        for key, change in data['keys'].items():
            known = self.curves.get(key, [])
            assert change['start'] <= len(known)
            self.curves[key] = known[: change['start']] + list(zip(change['step'], change['value'], strict=True))
        for key in set(self.curves) - set(data.get('only', self.curves)):
            del self.curves[key]

    def equals(self, path):
        """Whether the curves have what `read_metrics` reads."""
        records = read_metrics(path) if path.exists() else []
        keys = {key for record in records for key in record} - {'step'}
        numbers = {
            key: [
                (record['step'], record[key] if math.isfinite(record[key]) else None)
                for record in records
                if isinstance(record.get(key), int | float)
            ]
            for key in keys
        }
        return self.curves == {key: points for key, points in numbers.items() if points}


@pytest.fixture
def written(tmp_path):
    return WrittenRun(tmp_path / 'tiny')


def test_a_page_has_what_the_file_has_after_each_change(written):
    file, watcher = written.directory / 'metrics.jsonl', Watcher(written.directory)
    for change in (
        lambda: written.train(5),
        lambda: written.train(3, loss=math.nan),
        lambda: written.train(2, val_loss=3.5),
        lambda: written.begin(4),
        lambda: written.train(30),
        lambda: file.write_bytes(file.read_bytes() + b'{"step": 35, "lo'),
        lambda: written.begin(35),
        lambda: file.unlink(),
        lambda: written.train(2, val_loss=math.inf),
    ):
        change()
        watcher.poll()
        assert watcher.equals(file)
    assert watcher.info['step'] == 37


def test_somebody_who_comes_later_knows_the_same(written):
    watcher, late = Watcher(written.directory), Watcher(written.directory)
    written.train(20, loss=math.nan)
    watcher.poll()
    written.begin(10)
    written.sample('Once', ' more')
    watcher.poll()
    for kind, data in watcher.run.snapshot():
        getattr(late, f'_{kind}')(data)
    assert (late.curves, late.info, late.samples) == (watcher.curves, watcher.info, watcher.samples)


def test_a_long_file_that_is_replaced_is_shown_when_it_was_read_to_its_end(written, monkeypatch):
    from pretrax.view.live import follow as follow

    monkeypatch.setattr(follow, 'CHUNK', 300)
    watcher = Watcher(written.directory)
    written.train(40)
    watcher.poll()
    written.begin(30)
    while (
        watcher.run.more
        or watcher.run._new_curves is not None
        or not watcher.equals(written.directory / 'metrics.jsonl')
    ):
        for kind, data in watcher.run.poll():
            if kind == 'curves' and 'only' in data:
                assert data['keys']['loss'] == {
                    'start': 30, 'per_point': 1, 'step': [], 'value': [], 'low': [], 'high': [], 'nonfinite': [],
                }  # fmt: skip
            getattr(watcher, f'_{kind}')(data)
        assert len(watcher.curves['loss']) in (40, 30)


def test_the_state_of_a_run_from_its_first_to_its_last_moment(tmp_path):
    path = tmp_path / 'tiny'
    watcher = Watcher(path)
    assert watcher.poll()['state'] == 'waiting'
    written = WrittenRun(path, steps=20)
    with lock_directory(path, pytest.fail):
        written.train(5)
        assert watcher.poll()['state'] == 'running'
        assert (watcher.info['step'], watcher.info['steps']) == (5, 20)
    assert watcher.poll()['state'] == 'lost'
    written.begin(3)
    written.train(17)
    written.end('finished')
    assert watcher.poll()['state'] == 'finished'
    assert watcher.info['restarts'] == 1
    assert [one['outcome'] for one in watcher.info['attempts']] == ['lost', 'finished']
    shutil.rmtree(path)
    assert watcher.poll()['state'] == 'removed'
    assert watcher.curves == {}
    WrittenRun(path).train(2)
    assert watcher.poll()['step'] == 2


def test_the_end_of_a_run_is_as_far_as_its_last_lines_say(written):
    with lock_directory(written.directory, pytest.fail):
        written.train(40)
        watcher = Watcher(written.directory)
        end = written.started + 100  # one step a second, 100 steps
        assert watcher.poll()['ends'] == pytest.approx(end, rel=0, abs=1e-3)


def test_a_run_without_a_line_for_long_is_stalled(written, monkeypatch):
    now = written.started + 10
    with lock_directory(written.directory, pytest.fail):
        written.train(10)
        watcher = Watcher(written.directory)
        monkeypatch.setattr(live_run.time, 'time', lambda: now + live_run.LEAST_SILENCE - 1)
        assert not watcher.poll()['stalled']
        monkeypatch.setattr(live_run.time, 'time', lambda: now + live_run.LEAST_SILENCE + 1)
        assert watcher.poll()['stalled']
        assert 'stalled: no new line for much longer than usual' in watcher.info['warnings']


def test_warnings_name_what_is_wrong(written):
    written.train(3, loss=math.nan, skipped_steps=2)
    with (written.directory / 'metrics.jsonl').open('a') as file:
        file.write('this is no line\n')
    written.end('rolled back', from_step=3)
    watcher = Watcher(written.directory)
    assert watcher.poll()['warnings'] == [
        'loss was nan at step 3',
        '2 steps skipped',
        'rolled back 1 times, last to step 3',
        '1 lines of metrics.jsonl are not lines of metrics',
    ]


def test_a_file_that_cannot_be_read_is_a_warning_until_it_can(written):
    written.train(3)
    watcher = Watcher(written.directory)
    watcher.poll()
    file = written.directory / 'samples.jsonl'
    file.mkdir()
    assert watcher.poll()['warnings'] == [f'cannot be read: {file}: Not a file']
    file.rmdir()
    assert watcher.poll()['warnings'] == []


def test_the_newest_samples_are_kept(written):
    watcher = Watcher(written.directory)
    for number in range(live_run.SAMPLES + 5):
        written.sample('<b>Once</b>', f' {number}')
    watcher.poll()
    assert len(watcher.samples) == live_run.SAMPLES
    assert watcher.samples[-1] == {'step': 0, 'prompt': '<b>Once</b>', 'text': f' {live_run.SAMPLES + 4}'}


@pytest.mark.slow
def test_a_run_of_a_million_lines_takes_little_memory(tmp_path):
    import tracemalloc

    path = tmp_path / 'long'
    path.mkdir()
    with (path / 'metrics.jsonl').open('w') as file:
        for step in range(1_000_000):
            file.write(
                f'{{"step": {step}, "time": {1.7e9 + step}, "tokens": {step * 512}, "loss": {3 + 1 / (step + 1)}}}\n'
            )
    run = WatchedRun(path, 'long')
    tracemalloc.start()
    run.poll()
    while run.more:
        run.poll()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.curves.lines == 1_000_000
    assert size < 10 << 20
    assert len(run.curves.by_key['loss'].points.steps) <= live_curves.MOST_POINTS


@pytest.mark.parametrize(('file', 'content'), [
    ('metrics.jsonl', ''.join(f'{{"step": {n}, "loss": 1.0, "time": {(-1) ** n * 1.7e308}}}\n' for n in range(1, 9))),
    ('metrics.jsonl', f'{{"step": 1, "loss": {"9" * 400}}}\n'),
    ('config.yaml', f'steps: {"9" * 400}\n'),
    ('attempts.jsonl', '{"time": NaN, "event": "began", "step": 0}\n{"time": 1e999, "event": "stopped"}\n'),
    ('attempts.jsonl', f'{{"time": {"9" * 400}, "event": "began", "step": NaN}}\n'),
    ('samples.jsonl', '{"step": NaN, "prompt": "a", "text": "b"}\n'),
])  # fmt: skip
def test_numbers_that_json_does_not_have_do_not_end_watching(written, file, content):
    written.train(3)
    (written.directory / file).write_text(content)
    watcher = Watcher(written.directory)  # which refuses NaN and infinity
    watcher.poll()
    for _, data in watcher.run.snapshot():
        json.dumps(data, allow_nan=False)
    assert watcher.info['warnings'] == (['loss was inf at step 1'] if '"loss": 9' in content else [])


def test_what_goes_wrong_with_a_run_is_its_problem_alone(written, monkeypatch):
    def fail(_):
        raise RuntimeError('unexpected')

    written.train(3)
    watcher = Watcher(written.directory)
    monkeypatch.setattr(live_run, 'parse_columns', fail)
    assert watcher.poll()['warnings'] == ['cannot be read: RuntimeError: unexpected']
    monkeypatch.undo()
    written.train(2)
    assert watcher.poll()['warnings'] == []
    assert watcher.equals(written.directory / 'metrics.jsonl')


def test_a_file_that_cannot_be_read_to_its_end_is_not_asked_again_at_once(written, monkeypatch):
    monkeypatch.setattr(follow, 'CHUNK', 100)
    written.train(20)
    run = WatchedRun(written.directory, 'tiny')
    run.poll()
    assert run.more
    with monkeypatch.context() as broken:

        def fail(*_):
            raise OSError(5, 'Input/output error', 'metrics.jsonl')

        broken.setattr(follow.os, 'pread', fail)
        run.poll()
        assert not run.more
        assert run.info()['warnings'] == ['cannot be read: metrics.jsonl: Input/output error']
    while run.poll() or run.more:
        pass
    assert run.info()['lines'] == 20
