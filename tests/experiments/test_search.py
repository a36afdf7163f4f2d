"""`pretrax search`: trials that end in every way, kills of the searcher and of trials, and a search of real runs."""

import contextlib
import io
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from former import flat
from launched import BASE, PATIENCE, PRETRAX, environment, write_run
from pretrax.errors import UnavailableError, UserError
from pretrax.experiments import training, trial_job
from pretrax.experiments.base_file import RunOptions
from pretrax.experiments.search import JOURNAL, Searcher, _Optimizers
from pretrax.experiments.search_file import Space, read_search
from pretrax.launch.record import read_record
from pretrax.observe.metrics import read_metrics
from pretrax.system.launchers import has_ended
from pretrax.system.locks import holder_of

# In the place of `pretrax train`: its loss is the distance of the learning rate from 0.03. The seed says what goes
# wrong.
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
        monkeypatch.setattr('pretrax.experiments.search._LOOK', 0.01)
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


class FakeScheduler(Fake):
    """The same with jobs: `pretrax launch slurm` starts the program as a process
    that continues without the searcher.
    """

    def __init__(self, place, monkeypatch):
        super().__init__(place, monkeypatch)
        self.problem = None  # the error of a scheduler that does not answer
        monkeypatch.setattr(trial_job, 'engine_of', lambda record: self)
        monkeypatch.setattr(trial_job, 'pretrax_command', self.command)
        monkeypatch.setattr(training, '_LOOK_AT_ENGINE', 0.02)
        self.refusal = place / 'refusal'  # what the scheduler says to all jobs
        self.requests = place / 'requests'  # to stop
        self.requests.write_text('')

    def searcher(self, out='out', **values):
        return super().searcher(out, **({'launch': ['slurm']} | values))

    def command(self, *words):
        if words[0] == 'train':
            return super().command(*words)
        if words[:2] == ('launch', 'stop'):
            return [sys.executable, '-S', '-c', STOP, str(self.requests), words[2]]
        return [sys.executable, '-S', '-c', SUBMIT, str(self.refusal), *super().command(*words[2:3])]

    def is_running(self, record):
        if self.problem is not None:
            raise self.problem
        return not has_ended(record.facts)

    def status(self, record):
        return f'job {record.job} has ended'

    def running(self, number):
        path = self.place / 'out' / 'runs' / str(number)
        return (path / 'launch.json').is_file() and self.is_running(read_record(path))

    def until(self, done):
        until = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < until, self.said
            time.sleep(0.01)

    @contextlib.contextmanager
    def meanwhile(self, *conditions_and_actions):
        """Waits for each condition, and does then what follows it, in another thread."""

        def act():
            for condition, action in zip(conditions_and_actions[::2], conditions_and_actions[1::2], strict=True):
                self.until(condition)
                action()

        thread = threading.Thread(target=act)
        thread.start()
        yield
        thread.join()

    def close(self):
        """Ends the jobs that are left."""
        for path in self.place.glob('out/runs/*/launch.json'):
            if not has_ended((record := read_record(path.parent)).facts):
                os.kill(int(record.job), signal.SIGKILL)


# Submits a job: the words are the program of the job, which has the configuration as its last word.
SUBMIT = """
import json, os, pathlib, re, subprocess, sys, time
if '--dry-run' in sys.argv:
    print('WARNING: a disk of this machine', file=sys.stderr)
    sys.exit(0)
sys.argv.remove('--unchecked')
refusal = pathlib.Path(sys.argv[1])
if refusal.exists():
    print(refusal.read_text())
    sys.exit(2)
run = pathlib.Path(re.search('^run_dir: ([^ ]+)', pathlib.Path(sys.argv[-1]).read_text(), re.M)[1].strip())
run.mkdir(parents=True, exist_ok=True)
job = subprocess.Popen(sys.argv[2:], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
fields = pathlib.Path(f'/proc/{job.pid}/stat').read_text().rpartition(')')[2].split()
place = {'boot': pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip(), 'container': os.readlink('/proc/self/ns/pid')}
facts = place | {'pid': str(job.pid), 'started': fields[19]}
(run / 'launch.json').write_text(json.dumps({'engine': 'slurm', 'job': str(job.pid), 'nodes': 1, 'facts': facts}))
with open(run / 'attempts.jsonl', 'a') as events:
    events.write(json.dumps({'time': time.time(), 'event': 'began', 'step': 0}) + '\\n')
"""
STOP = """
import json, os, pathlib, signal, sys, time
with open(sys.argv[1], 'a') as requests:
    requests.write(pathlib.Path(sys.argv[2]).name + ' ')
os.kill(int(json.loads((pathlib.Path(sys.argv[2]) / 'launch.json').read_text())['job']), signal.SIGTERM)
time.sleep(0.6)  # as an engine does that answers when the job has ended
with open(sys.argv[1], 'a') as requests:
    requests.write('answered')
"""


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    started = FakeScheduler(tmp_path, monkeypatch)
    yield started
    started.close()


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


@pytest.mark.parametrize('sampler', ['tpe', 'cmaes', pytest.param('random', marks=pytest.mark.slow)])
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


@pytest.mark.filterwarnings('ignore:os.fork:RuntimeWarning')  # the child starts no computation
def test_a_trial_whose_searcher_was_killed_is_taken_up_again(fake, monkeypatch):
    with fake.searcher(trials=2) as searcher:
        monkeypatch.setattr('pretrax.experiments.search.Searcher._tell', lambda *_: os._exit(9))
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


def test_ctrl_c_leaves_jobs_and_the_next_search_finds_them_and_stops_the_poor_one(scheduler):
    scheduler.pause = 0.4
    scheduler.starts.write_text('')
    grid = {'parameters': {'optimizer.learning_rate': [0.03, 1e-4]}, 'sampler': 'grid', 'trials': None, 'at_once': 2}
    for found in (0, 2):
        del scheduler.said[:]
        with scheduler.searcher(**grid) as searcher, scheduler.meanwhile(
            lambda found=found: scheduler.running(0) and scheduler.running(1) and len(scheduler.said) == 1 + found,
            lambda: os.kill(os.getpid(), signal.SIGINT),
        ):  # fmt: skip
            assert not searcher.run()
        assert scheduler.running(0)
        assert scheduler.running(1)
    assert sorted(scheduler.started) == ['0', '1'], 'each is submitted once'
    first = (scheduler.place / 'out' / 'configs' / 'search-0.yaml').read_text()
    assert f'learning_rate: {searcher.trials()[0]["values"]["optimizer.learning_rate"]}' in first, (
        'a waiting job reads it'
    )

    trial = training.Training(
        searcher._space.config({}, **searcher._names(1)), scheduler.place / 'out', RunOptions(launch=['slurm'])
    )
    assert not trial.is_over()
    trial.stop(leave_jobs=True)
    assert trial.is_over(), 'it is left to itself'
    trial.stop()  # Optuna has found meanwhile that it is poor
    assert not trial.is_over()
    scheduler.until(trial.is_over)
    assert not scheduler.running(1)
    assert scheduler.requests.read_text() == '1 answered', 'a second request would end it before it has saved'
    assert trial.steps_done < BASE['steps']
    assert (trial.run_dir / 'checkpoints' / str(trial.steps_done)).is_dir()


def test_what_the_engine_refuses_ends_the_search_and_no_trial(scheduler):
    scheduler.refusal.write_text("there is no partition 'smal' in this Slurm\n  did you mean: --partition small")
    with pytest.raises(
        UserError, match=r"(?s)trial 0 cannot be launched: there is no partition 'smal'.*small\nthe same"
    ):
        scheduler.run()
    scheduler.refusal.unlink()
    trials = scheduler.run(trials=2)
    assert [trial['state'] for trial in trials] == ['done', 'done']


def test_an_engine_that_does_not_answer_is_asked_again(scheduler):
    scheduler.pause = 0.05
    scheduler.starts.write_text('')
    with scheduler.searcher(trials=1) as searcher, scheduler.meanwhile(
        lambda: scheduler.running(0), lambda: setattr(scheduler, 'problem', UnavailableError('no answer')),
        lambda: scheduler.said[1:], lambda: setattr(scheduler, 'problem', None),
    ):  # fmt: skip
        assert searcher.run()
    assert scheduler.said[1] == 'WARNING: search-0: no answer; asking again'
    assert scheduler.started == ['0']


def test_a_job_that_ends_by_a_mistake_is_not_submitted_again(scheduler, monkeypatch):
    ended = {'time': 0, 'event': 'ended', 'code': 2, 'why': 'process 0 ended because of a mistake'}
    monkeypatch.setattr(trial_job, 'read_attempts', lambda run_dir: [ended] if scheduler.started else [])
    (trial,) = scheduler.run(trials=1, parameters={'seed': [2, 3]}, sampler='grid', seed=1)
    assert (trial['state'], scheduler.started) == ('failed', ['0'])
    assert trial['why'].startswith('process 0 ended because of a mistake; see ')


def test_jobs_that_leave_nothing_in_the_run_directory_end_the_search(scheduler, monkeypatch):
    monkeypatch.setattr(trial_job, 'read_attempts', lambda run_dir: [])
    with pytest.raises(UserError, match=r'job \d+ has ended\nit left nothing in .*runs/0: do its machines see'):
        scheduler.run(trials=1, parameters={'seed': [2, 3]}, sampler='grid', seed=1)
    assert scheduler.started == ['0', '0']


def test_other_settings_need_another_directory(fake):
    fake.run(trials=1)
    with pytest.raises(UserError, match=r'other settings: parameters.optimizer.learning_rate.high'):
        fake.searcher(parameters={'optimizer.learning_rate': {'low': 1e-4, 'high': 0.5, 'log': True}})
    with fake.searcher(trials=4, at_once=2), pytest.raises(UserError, match='another process works here'):
        fake.searcher()


def test_a_search_that_began_with_flat_keys_of_the_model_goes_on(fake, monkeypatch):
    with fake.searcher('other') as searcher:
        own, base = json.loads(searcher._space.identity)
    former = json.dumps([own, base | {'model': flat(base['model'])}], sort_keys=True)
    assert base['model']['attention']['n_heads'] == 2
    with monkeypatch.context() as patch:
        patch.setattr(Space, 'identity', former)
        fake.run(trials=1)
    assert len(fake.run(trials=2)) == 2


def test_nothing_but_an_optimizer_is_unpickled(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'made'),)

    with pytest.raises(UserError, match='not part of a search'):
        _Optimizers(io.BytesIO(pickle.dumps(Harmful()))).load()
    assert not (tmp_path / 'made').exists()


@pytest.mark.nightly
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
