"""How long a run needs to notice a lost process or machine, and to train again, on each engine that runs on this
machine.

    uv run python benchmarks/recovery.py                  # all engines whose programs are installed
    uv run python benchmarks/recovery.py local slurm      # some of them

A small run trains in two processes, and makes a checkpoint every 100 steps. Half way between two checkpoints, it
loses one by SIGKILL, by SIGSTOP and, where the engine has machines, with its machine. For each loss: the seconds
until the launcher has noticed, and until a new step is done, and the steps that were trained again. A second run
does the same without states in memory and, except on Slurm, without standbys. At the end, the losses of all steps are
compared with those of a run that nobody disturbed; the exit code is 1 if one differs. Slurm is a cluster of four
nodes in namespaces of this machine, ssh goes to servers on addresses of the loopback, and Ray is a local cluster:
the delays of a network are not in these numbers, and compilation is that of a tiny model.
"""

import argparse
import contextlib
import functools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from result_files import circumstances, write_result

from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics

TESTS = Path(__file__).parents[1] / 'tests'
sys.path.append(str(TESTS))

import boxes  # type: ignore[import-not-found]  # noqa: E402 - of the tests
from launched import write_run  # type: ignore[import-not-found]  # noqa: E402

PATIENCE = 300.0  # seconds
STEPS = 1000000  # more than it has time for
EVERY = 100  # steps between two checkpoints
# Changes of the configuration, for both runs of an engine.
SIDES = {'standbys, memory': 'checkpoint.memory.every=1', 'neither': 'checkpoint.memory.every=0'}
# What an engine alone would wait before it acts, by default.
OWN_TIMEOUTS = {
    'local': 'JAX heartbeat 100 s (pretrax sets 20 s, here 3 s)',
    'ssh': 'TCP keepalive 2 h; ServerAliveInterval is off by default (pretrax sets 5 s, three times)',
    'slurm': 'SlurmdTimeout 300 s, here 10 s; requeued job: CommunicationParameters, MinJobAge',
    'ray': 'health checks: 5 s after start, every 3 s, 5 failures',
}
LOSSES = ('process killed', 'process hangs', 'machine lost')


class Engine:
    """Runs of one engine.

    Args:
        directory: for the configuration and the runs.
        side: one of `SIDES`.
    """

    name = ''
    without: tuple[str, ...] = ()  # options that switch its standbys off
    machines = False  # whether it can lose one

    def __init__(self, directory: Path, side: str):
        changes: dict[str, Any] = {'checkpoint': {'every': EVERY, 'keep': 100}}
        changes['faults'] = {'heartbeat_seconds': 3, 'hang_seconds': 20}
        self.config = write_run(directory, steps=STEPS, **changes)
        self.directory = directory
        self.words = [SIDES[side], *(self.without if side == 'neither' else ())]

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """The engine itself runs inside this context."""
        yield

    def launch(self, run: Path) -> subprocess.Popen[bytes] | None:
        """Starts a run. Returns its launcher, if that runs as long as it does."""
        raise NotImplementedError

    def stop(self, run: Path) -> None:
        """Ends the run."""

    def lose_machine(self) -> None:
        raise NotImplementedError

    def restore_machine(self) -> None:
        """Brings the lost machine back, once its loss is noticed."""


def environment() -> dict[str, str]:
    """Of all processes: a CPU with one device, and the plugins of the tests."""
    return {
        'PYTHONPATH': str(TESTS), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0',
    }  # fmt: skip


class Local(Engine):
    name, without = 'local', ('--no-standbys',)

    def launch(self, run: Path) -> subprocess.Popen[bytes]:
        return self.start('local', run, '-n', '2', '--devices-per-process', '1')

    def start(self, engine: str, run: Path, *options: str) -> subprocess.Popen[bytes]:
        """A launcher that runs as long as its run."""
        command = [sys.executable, '-m', 'pretrax', 'launch', engine, str(self.config), f'run_dir={run}']
        with run.with_suffix('.txt').open('ab') as output:
            return subprocess.Popen(
                [*command, *self.words, *options, '--retries', '9'], env=os.environ | environment(),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=self.directory,
            )  # fmt: skip


class OverSsh(Local):
    name, machines = 'ssh', True

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        (self.directory / 'boxes').mkdir()
        with boxes.boxes(self.directory / 'boxes', 2, environment()) as self.boxes:
            yield

    def launch(self, run: Path) -> subprocess.Popen[bytes]:
        ssh = f'ssh -F {self.boxes.config}'
        return self.start('ssh', run, '--hosts', 'box1,box2', '--ssh', ssh, '--devices-per-node', '1')

    def lose_machine(self) -> None:
        self.boxes.cut_power('box2')

    def restore_machine(self) -> None:
        self.boxes.start('box2')


class OnSlurm(Engine):
    name, machines = 'slurm', True

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        from slurm_cluster import slurm_cluster  # type: ignore[import-not-found]

        with slurm_cluster() as self.cluster:
            yield

    def launch(self, run: Path) -> None:
        self.run = run
        command = [
            sys.executable,
            '-m',
            'pretrax',
            'launch',
            'slurm',
            str(self.config),
            *self.words,
            f'run_dir={run}',
            '--nodes',
            '2',
        ]
        self.cluster.run(*command, '--retries', '9', env=os.environ | environment(), cwd=self.directory)

    def stop(self, run: Path) -> None:
        command = [sys.executable, '-m', 'pretrax', 'launch', 'stop', str(run)]
        self.cluster.run(*command, env=os.environ | environment())
        self.cluster.until(lambda: not self.cluster.run('squeue', '-h').strip(), 'the end of the job')

    def lose_machine(self) -> None:
        self.lost = int(started(self.run)[-1]['processes'][1].removeprefix('node'))
        self.cluster.unplug(self.lost)

    def restore_machine(self) -> None:
        self.cluster.plug_in(self.lost)


class OnRay(Local):
    name, machines = 'ray', True

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        from ray_nodes import ray_nodes  # type: ignore[import-not-found]

        with ray_nodes(2, environment()) as self.cluster:
            yield

    def launch(self, run: Path) -> subprocess.Popen[bytes]:
        return self.start('ray', run, '--workers', '2', '--address', self.cluster.address, '--wait')

    def lose_machine(self) -> None:
        self.cluster.remove(self.cluster.nodes[-1])

    def restore_machine(self) -> None:
        self.cluster.add()


ENGINES: list[type[Engine]] = [Local, OverSsh, OnSlurm, OnRay]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_attempts(run) if event['event'] == name]


def started(run: Path) -> list[dict[str, Any]]:
    return events(run, 'started')


def until[T](done: Callable[[], T], what: str, run: Path, launcher: subprocess.Popen[bytes] | None) -> T:
    """Waits until `done()` returns something, and returns it.

    Raises:
        RuntimeError: the launcher has ended, or it takes longer than `PATIENCE`. The message has the end of the output.
    """
    end = time.monotonic() + PATIENCE
    while True:
        has_ended = launcher is not None and launcher.poll() is not None
        if found := done():
            return found
        if has_ended or time.monotonic() > end:
            said = [path.read_text()[-3000:] for path in [*run.parent.glob('*.txt'), *run.glob('slurm*.txt')]]
            reason = 'the launcher has ended' if has_ended else f'nothing in {PATIENCE:.0f} s'
            raise RuntimeError(f'no sign of {what}: {reason}\n' + '\n'.join(said))
        time.sleep(0.05)


def measure(
    kind: type[Engine], side: str, times: int, directory: Path
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Loses processes and machines. Returns what was lost with its times, and the loss of every step."""
    engine = kind(directory, side)
    run, found = directory / 'run', []
    with engine.ready():
        launcher = engine.launch(run)
        seen = functools.partial(until, run=run, launcher=launcher)
        try:
            losses = [loss for loss in LOSSES if loss != 'machine lost' or engine.machines]
            for loss in losses * times:
                seen(lambda: len(events(run, 'stepped')) >= len(started(run)) > 0, 'a step')
                newest = (checkpoints(run) or [0])[-1]
                newest = seen(lambda newest=newest: [step for step in checkpoints(run) if step > newest], 'a save')[0]
                seen(lambda newest=newest: newest_step(run) >= newest + EVERY // 2, 'half an interval')
                at, step = time.time(), newest_step(run)
                if loss == 'machine lost':
                    engine.lose_machine()
                else:
                    os.kill(boxes.training(run, 1), signal.SIGKILL if loss == 'process killed' else signal.SIGSTOP)
                noticed = seen(lambda at=at: times_noticed(run, at), f'notice: {loss}')
                if loss == 'machine lost':
                    engine.restore_machine()
                again = seen(lambda at=at: after(run, 'stepped', at), loss)
                found.append({
                    'engine': engine.name, 'kept': side, 'lost': loss, 'noticed': round(noticed[0] - at, 2),
                    'trains again': round(again[0]['time'] - at, 2),
                    'steps lost': max(0, step - after(run, 'began', at)[-1]['step']),
                })  # fmt: skip
                print(found[-1], flush=True)
        finally:
            if launcher is None:
                engine.stop(run)
            else:
                launcher.terminate()
                launcher.wait(60)
    return found, losses_of(run)


def after(run: Path, name: str, at: float) -> list[dict[str, Any]]:
    return [event for event in events(run, name) if event['time'] > at]


def times_noticed(run: Path, at: float) -> list[float]:
    """When the launcher knew of a loss at this time; none until it does."""
    ended = [event['noticed'] for event in after(run, 'ended', at)]
    return ended or [event['time'] for event in after(run, 'released', at) + after(run, 'started', at)]


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / 'checkpoints').glob('[0-9]*') if path.name.isdecimal())


def newest_step(run: Path) -> int:
    return max(losses_of(run), default=0)


def losses_of(run: Path) -> dict[int, float]:
    return {line['step']: line['loss'] for line in read_metrics(run / 'metrics.jsonl')}


def undisturbed(steps: int, directory: Path) -> dict[int, float]:
    """The loss of every step of a run of this length that loses no process."""
    engine = Local(directory, 'neither')
    with engine.start(
        'local', directory / 'alone', '-n', '2', '--devices-per-process', '1', f'steps={steps}'
    ) as launcher:
        if launcher.wait():
            raise RuntimeError((directory / 'alone.txt').read_text()[-3000:])
    return losses_of(directory / 'alone')


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f'# Recovery, {result["date"]}', '',
        f'`{result["command"]}` on {result["cores"]} cores of {result["processor"]}.',
        'Seconds, median of the losses; the losses of all steps equal those of an undisturbed run.',
        f'Programs in the queue of the cores, averaged over the last five minutes of the measurement: '
        f'{result["load"]}.', '',
        '| engine | lost | kept | noticed after | trains again after | steps lost | what the engine alone would wait |',
        '|---|---|---|---|---|---|---|',
    ]  # fmt: skip
    keys = dict.fromkeys((row['engine'], row['lost'], row['kept']) for row in result['losses'])
    for engine, lost, kept in sorted(keys, key=lambda key: (key[0], key[1])):
        rows = [row for row in result['losses'] if (row['engine'], row['lost'], row['kept']) == (engine, lost, kept)]
        medians = [f'{statistics.median(row[key] for row in rows):.1f}' for key in ('noticed', 'trains again')]
        steps = f'{statistics.median(row["steps lost"] for row in rows):.0f}'
        lines.append(f'| {engine} | {lost} | {kept} | {" | ".join(medians)} | {steps} | {OWN_TIMEOUTS[engine]} |')
    return '\n'.join(lines) + '\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('engines', nargs='*', choices=[[], *(engine.name for engine in ENGINES)], help='default: all')
    parser.add_argument('--times', type=int, default=3, help='how often each is lost')
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'results')
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    steps: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory(prefix='recovery-') as scratch:
        for kind in ENGINES:
            if asked.engines and kind.name not in asked.engines:
                continue
            for number, side in enumerate(SIDES):
                (directory := Path(scratch) / f'{kind.name}-{number}').mkdir()
                losses, steps[f'{kind.name}, {side}'] = measure(kind, side, asked.times, directory)
                found += losses
        reference = undisturbed(max(map(len, steps.values())), Path(scratch))
    differ = [name for name, losses in steps.items() if losses != {step: reference[step] for step in losses}]
    if differ:
        print(f'the losses differ from those of an undisturbed run: {", ".join(differ)}')
        return 1
    write_result(
        circumstances() | {'load': round(os.getloadavg()[1], 1), 'losses': found},
        table,
        asked.out,
        '-'.join(['recovery', *asked.engines]),
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
