"""What the trackers of a run receive besides numbers: samples, and the validation loss of each source."""

import types

from pretrax.observe.trackers.base import Table
from pretrax.run import run_log


class Recorder:
    name = 'recorder'

    def __init__(self):
        self.shown = []

    def resume(self, step):
        return {}

    def log(self, lines):
        pass

    def show(self, step, key, content):
        self.shown.append((step, key, content))

    def close(self, succeeded):
        pass


def test_samples_and_a_table_of_sources_go_to_the_trackers(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(run_log, 'open_trackers', lambda *_, **__: [recorder])
    monkeypatch.setattr(run_log, 'Environment', lambda *_: None)
    monkeypatch.setattr(run_log, 'RunNotices', lambda *_: types.SimpleNamespace(close=dict))
    sample = types.SimpleNamespace(prompts=('def ', 'class '))
    log = types.SimpleNamespace(trackers=dict)
    run = types.SimpleNamespace(name='run', written={}, log=log)
    with run_log.RunLog(run, tmp_path, 0, print) as written:
        written.write({'step': 5, 'val_loss': 2.0, 'val_loss/code': 1.5, 'val_loss/text': 2.5})
        written.write({'step': 6, 'val_loss': 2.0})
        written.sample(6, sample.prompts, ['def f():', 'class A:'])
    assert recorder.shown == [
        (5, 'validation', Table(('source', 'loss in nats per token'), [('code', 1.5), ('text', 2.5)])),
        (6, 'samples', 'def f():\n\nclass A:'),
    ]
    assert '"prompt": "class ", "text": "class A:"' in (tmp_path / 'samples.jsonl').read_text()
