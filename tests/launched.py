"""Runs of several processes for tests that kill some of them: `pretrax launch local`, a small model, and its record."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from preloaded import programs
from pretrax.checkpoint import steps_in
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics

PRETRAX = Path(sys.executable).with_name('pretrax')
PATIENCE = 300  # seconds for what takes a few on a quiet machine

# A bigram model, and batches that take a moment, as of a slow disk: so a process is killed in the middle of its work.
# FAIL='<process>:<step>:<exception>' raises in one process, once.
PLUGIN = """
import os, pathlib, time
from pretrax.config import register
from pretrax.data.batches.synthetic import SyntheticSource
from pretrax.errors import UserError
from bigram import Bigram

@register('model', 'bigram')
def bigram(request):
    return Bigram(request.vocab_size)

class Slow(SyntheticSource):
    def batch(self, step, rows, batch_rows):
        time.sleep(0.02)
        process, at, kind = os.environ.get('FAIL', '-1:-1:').split(':')
        if (os.environ.get('JAX_PROCESS_ID'), step) == (process, int(at)):
            raise {'UserError': UserError, 'RuntimeError': RuntimeError}[kind]('batch {} is bad'.format(step))
        return super().batch(step, rows, batch_rows)

@register('data', 'slow')
def slow(request, *, vocab_size: int = 96):
    return Slow(request, vocab_size, 20)
"""


# What the sweeps of the tests change.
BASE = {
    'name': 'base', 'steps': 9, 'model': {'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}}, 'seed': 7,
    'data': {'name': 'synthetic', 'vocab_size': 96}, 'batch': {'tokens': 64, 'sequence_length': 16},
    'optimizer': {'learning_rate': 1e-2}, 'schedule': {'name': 'constant'},
}  # fmt: skip


def write_run(directory: Path, **changes) -> Path:
    """The configuration of a small run."""
    (directory / 'plugin.py').write_text(PLUGIN)
    config = directory / 'run.yaml'
    values = {
        'name': 'run', 'steps': 100, 'plugins': ['plugin.py'], 'model': {'name': 'bigram'}, 'data': {'name': 'slow'},
        'batch': {'tokens': 192, 'sequence_length': 16}, 'optimizer': {'learning_rate': 0.1},
        'schedule': {'name': 'constant'}, 'checkpoint': {'every': 5, 'keep': 100}, 'precision': {'compute': 'f32'},
        'faults': {'heartbeat_seconds': 3}, 'log': {'every': 1}, 'eval': {'every': 0},
    }  # fmt: skip
    config.write_text(json.dumps(values | changes))
    return config


def environment(**changes) -> dict[str, str]:
    """Of a user: without the eight devices of the tests, but with their plugins."""
    kept = dict(os.environ)
    kept['XLA_FLAGS'] = '--xla_backend_optimization_level=0'
    return kept | {'PYTHONPATH': str(Path(__file__).parent), 'JAX_PLATFORMS': 'cpu'} | changes


class Training:
    """What can be seen of a run from outside, whatever launched it. A subclass has `until(done, what)`."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    def until(self, done, what: str):
        """What `done()` returns once that is something."""
        raise NotImplementedError

    def events(self, name: str) -> list[dict]:
        return [event for event in read_attempts(self.run_dir) if event['event'] == name]

    def pid(self, process: int) -> int:
        """Of a process in the attempt that runs."""
        return self.events('started')[-1]['processes'][process]

    def until_checkpoint(self, attempt: int) -> None:
        """Waits until an attempt, counted from 1, has written one."""
        began = self.until(lambda: self.events('began')[attempt - 1 :], f'attempt {attempt}')[0]['step']
        self.until(lambda: max(self.checkpoints(), default=0) > began, f'a checkpoint after {began}')

    def until_step(self, attempt: int, more: int) -> int:
        """Waits until an attempt, counted from 1, has done so many steps after its first; returns the newest step."""
        first = self.until(lambda: self.events('stepped')[attempt - 1 :], f'attempt {attempt}')[0]['step']
        self.until(lambda: self.step() >= first + more, f'step {first + more}')
        return self.step()

    def step(self) -> int:
        return max((line['step'] for line in read_metrics(self.run_dir / 'metrics.jsonl')), default=0)

    def losses(self) -> dict[int, float]:
        lines = read_metrics(self.run_dir / 'metrics.jsonl')
        assert [line['step'] for line in lines] == list(range(1, len(lines) + 1)), 'each step is there once'
        return {line['step']: line['loss'] for line in lines}

    def checkpoints(self) -> list[int]:
        return steps_in(self.run_dir / 'checkpoints')

    def recoveries(self, faults: Iterable[float]) -> list[str]:
        """A line for each fault, which the end of an attempt follows:
        when it was noticed, and when the run trained again.
        """
        ends = zip(faults, self.events('ended'), self.events('stepped')[1:], strict=False)
        return [
            f'{end["why"]}: noticed after {end["noticed"] - at:.1f} s, trains again after {again["time"] - at:.1f} s'
            for at, end, again in ends
        ]


class Launched(Training):
    """A run under `pretrax launch local`.

    Forked processes do not stop with SIGSTOP.
    """

    def __init__(
        self, config: Path, run_dir: Path, *options: str, engine: str = 'local', forked: bool = True, **changes: str
    ):
        super().__init__(run_dir)
        self._output = run_dir.with_suffix('.txt')
        with self._output.open('w') as output:
            self.process = subprocess.Popen(
                [programs() / 'pretrax' if forked else PRETRAX, 'launch', engine, str(config),
                 f'run_dir={run_dir}', *options],
                env=environment(**changes), stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.terminate()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self._output.read_text()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def until(self, done, what: str):
        """What `done()` returns once that is something."""
        until = time.monotonic() + PATIENCE
        while not (found := done()):
            assert self.process.poll() is None, f'it ended before {what}:\n{self.said}'
            assert time.monotonic() < until, f'no sign of {what}:\n{self.said}'
            time.sleep(0.02)
        return found


def undisturbed(config: Path, run_dir: Path, processes: int, *changes: str) -> dict[int, float]:
    """Trains in processes of this machine, without a fault. Returns the loss of each step."""
    with Launched(config, run_dir, '-n', str(processes), *changes) as run:
        assert run.wait() == 0, run.said
    return run.losses()
