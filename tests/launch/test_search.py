"""`pretrax search`: trials that end in every way, kills of the searcher and of trials, and a search of real runs."""

import io
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from launched import BASE, PATIENCE, PRETRAX, environment, write_run
from pretrax.errors import UserError
from pretrax.launch import training
from pretrax.launch.search import JOURNAL, Searcher, _Optimizers
from pretrax.launch.search_file import read_search
from pretrax.machine.locks import holder_of
from pretrax.observe.metrics import read_metrics

pytestmark = pytest.mark.filterwarnings('ignore:os.fork:RuntimeWarning')

# In the place of `pretrax train`: its loss is the distance of the learning rate from 0.03. The seed says what goes wrong.
PROGRAM = """
import json, math, os, pathlib, re, signal, sys, time
text = pathlib.Path(sys.argv[-1]).read_text()
value = lambda key: re.search('^ *' + key + ': ([^ ]+)', text, re.M)[1]
run, rate, steps, seed = pathlib.Path(value('run_dir')), float(value('learning_rate')), int(value('steps')), value('seed')
with open('STARTS', 'a') as starts:
    starts.write(run.name + ' ')
if seed == '2':
    sys.exit(2)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
saved = run / 'checkpoints'
saved.mkdir(parents=True, exist_ok=True)
step = max([int(path.name) for path in saved.iterdir()], default=0)
lines = [line for line in (run / 'metrics.jsonl').read_text().splitlines()][:step] if step else []
(run / 'metrics.jsonl').write_text(''.join(line + '\\n' for line in lines))
while step < steps and not stopped:
    step += 1
    if seed == '1' and step == 3 and not (saved / '2').exists():
        (saved / '2').mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    loss = abs(math.log10(rate / 0.03)) + 1 / step
    line = {'step': step, 'val_loss': loss} if seed != '3' else {'step': step, 'val_loss': None, 'nonfinite': {'val_loss': 'nan'}}
    with open(run / 'metrics.jsonl', 'a') as file:
        file.write(json.dumps(line) + '\\n')
    time.sleep(PAUSE)
(saved / str(step)).mkdir(exist_ok=True)
"""
RATES = {'optimizer.learning_rate': {'low': 1e-4, 'high': 1.0, 'log': True}}


class Fake:
    """Searches in a directory, with the program above in the place of training."""

    def __init__(self, place, monkeypatch):
        self.place, self.said = place, []
        (place / 'base.yaml').write_text(json.dumps(BASE | {'eval': {'every': 1}}))
        self.starts = place / 'starts'
        self.pause = 0.0
        monkeypatch.setattr(training, '_LOOK', 0.01)
        monkeypatch.setattr('pretrax.launch.search._LOOK', 0.01)
        monkeypatch.setattr(training, 'pretrax_command', self.command)

    def command(self, *words):
        program = PROGRAM.replace('STARTS', str(self.starts)).replace('PAUSE', str(self.pause))
        return [sys.executable, '-S', '-c', program, *words]

    def searcher(self, out='out', **values):
        search = {'base': 'base.yaml', 'parameters': RATES, 'trials': 3} | values
        (self.place / 'search.yaml').write_text(json.dumps(search))
        return Searcher(read_search(self.place / 'search.yaml'), self.place / out, self.said.append)

    def run(self, out='out', **values):
        self.starts.write_text('')
        with self.searcher(out, **values) as searcher:
            assert searcher.run()
            return searcher.trials()

    @property
    def started(self):
        return self.starts.read_text().split()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return Fake(tmp_path, monkeypatch)


def test_trials_end_in_every_way_and_a_killed_one_is_continued(fake):
    parameters = {'seed': [0, 1, 2, 3]}
    trials = fake.run(sampler='grid', parameters=parameters, trials=None, retries=1)
    by_seed = {trial['values']['seed']: trial for trial in trials}
    assert {seed: trial['state'] for seed, trial in by_seed.items()} == {
        0: 'done',
        1: 'done',
        2: 'failed',
        3: 'diverged',
    }
    assert sorted(fake.started).count(str(by_seed[1]['number'])) == 2
    assert by_seed[0]['value'] == by_seed[1]['value'] == pytest.approx(abs(math.log10(0.01 / 0.03)) + 1 / 9)
    assert fake.run(sampler='grid', parameters=parameters, trials=None) == trials
    assert fake.started == [], 'the same command repeats no trial'


def test_asha_stops_poor_trials_and_the_best_goes_to_the_end(fake):
    fake.pause = 0.05
    rates = [0.03, 1.0, 0.0001, 0.02, 0.9]
    trials = fake.run(
        parameters={'optimizer.learning_rate': rates}, sampler='grid', asha={'first': 2, 'reduction': 2}, trials=None
    )
    states = {trial['values']['optimizer.learning_rate']: trial for trial in trials}
    assert states[0.03]['state'] == 'done'
    stopped = [trial for trial in trials if trial['state'] == 'pruned']
    assert stopped
    assert all(trial['steps'] < BASE['steps'] for trial in stopped)
    assert {0.03, 0.02}.isdisjoint(trial['values']['optimizer.learning_rate'] for trial in stopped[:1])
    place = fake.place / 'out' / 'runs' / str(stopped[0]['number'])
    assert [int(path.name) for path in (place / 'checkpoints').iterdir()] == [stopped[0]['steps']], 'it has saved'


@pytest.mark.parametrize('sampler', ['tpe', 'cmaes', 'random'])
def test_a_search_in_two_parts_chooses_the_same_values_as_one(fake, sampler):
    values = {'sampler': sampler, 'parameters': RATES | {'schedule.warmup': {'low': 1, 'high': 9}}, 'seed': 5}
    whole = fake.run('whole', trials=5, **values)
    fake.run('parts', trials=2, **values)
    with (fake.place / 'parts' / JOURNAL).open('ab') as journal:
        journal.write(b'{"op_code": 5, "wor')
    parts = fake.run('parts', trials=5, **values)
    assert [trial['values'] for trial in parts] == [trial['values'] for trial in whole]
    assert len({trial['values']['optimizer.learning_rate'] for trial in whole}) == 5
    assert fake.started == ['2', '3', '4']


def test_a_trial_whose_searcher_was_killed_is_taken_up_again(fake, monkeypatch):
    with fake.searcher(trials=2) as searcher:
        monkeypatch.setattr('pretrax.launch.search.Searcher._tell', lambda *_: os._exit(9))
        child = os.fork()
        if child == 0:
            searcher.run()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    fake.__init__(fake.place, monkeypatch)
    trials = fake.run(trials=2)
    assert [trial['state'] for trial in trials] == ['done', 'done']
    assert fake.started == ['1'], 'trial 0 had finished: only its end was missing'


def test_other_settings_need_another_directory(fake):
    fake.run(trials=1)
    with pytest.raises(UserError, match=r'other settings: parameters.optimizer.learning_rate.high'):
        fake.searcher(parameters={'optimizer.learning_rate': {'low': 1e-4, 'high': 0.5, 'log': True}})
    with fake.searcher(trials=4, at_once=2), pytest.raises(UserError, match='another process works here'):
        fake.searcher()


def test_nothing_but_an_optimizer_is_unpickled(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'made'),)

    with pytest.raises(UserError, match='not part of a search'):
        _Optimizers(io.BytesIO(pickle.dumps(Harmful()))).load()
    assert not (tmp_path / 'made').exists()


@pytest.mark.slow
def test_killing_the_searcher_and_a_trial_loses_and_repeats_nothing(tmp_path):
    write_run(tmp_path, steps=40, eval={'every': 5, 'batches': 1}, data={'name': 'slow', 'vocab_size': 32})
    search = {
        'base': 'run.yaml', 'parameters': {'optimizer.learning_rate': {'low': 0.01, 'high': 1.0, 'log': True}},
        'trials': 2, 'at_once': 2,
    }  # fmt: skip
    (tmp_path / 'search.yaml').write_text(json.dumps(search))
    out = tmp_path / 'out'

    def start(directory=out):
        return subprocess.Popen(
            [PRETRAX, 'search', 'search.yaml', '--out', str(directory)], cwd=tmp_path, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def until(done, process):
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def checkpoints(number):
        place = out / 'runs' / str(number) / 'checkpoints'
        return [int(path.name) for path in place.iterdir() if path.name.isdecimal()] if place.is_dir() else []

    process = start()
    until(lambda: max(checkpoints(0), default=0) >= 10, process)
    holder = holder_of(out / 'runs' / '0')
    assert holder is not None
    os.kill(int(holder.split()[1]), signal.SIGKILL)  # a trial
    until(lambda: max(checkpoints(0), default=0) >= 20, process)
    process.kill()  # the searcher
    process.communicate()
    again = start()
    said, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, said
    assert 'trial 0 continues after step' in said
    plain = start(tmp_path / 'undisturbed')
    expected, _ = plain.communicate(timeout=PATIENCE)
    assert plain.returncode == 0, expected
    for number in range(2):
        lines = read_metrics(out / 'runs' / str(number) / 'metrics.jsonl')
        wanted = read_metrics(tmp_path / 'undisturbed' / 'runs' / str(number) / 'metrics.jsonl')
        assert [line['step'] for line in lines if 'loss' in line] == list(range(1, 41)), 'each step is there once'
        for key in ('loss', 'val_loss'):
            assert [line.get(key) for line in lines] == [line.get(key) for line in wanted]
    assert sorted(path.name for path in (out / 'runs').iterdir()) == ['0', '1']
    assert (out / 'best.yaml').is_file()
    assert '"name": "trial 0 done"' in (out / 'report.html').read_text()
