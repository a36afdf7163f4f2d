"""Compares a run whose processes are killed and stopped at random with an undisturbed run.

    uv run python benchmarks/faults.py                     # 4 processes, one killed about every 20 seconds

For each kill it prints the time until it was detected and until training resumed. At the end it prints whether every logged
loss is the same number in both runs, and exits with 1 if not. The moments of the kills come from the seed; the run may be
starting, training, or writing a checkpoint.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from pretrax.machine.cores import usable_cores
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics

PRETRAX = [sys.executable, '-c', 'from pretrax.cli import main; main()']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('--processes', type=int, default=4)
    parser.add_argument('--steps', type=int, default=3000)
    parser.add_argument('--seconds', type=float, default=20.0, help='mean time between kills')
    parser.add_argument('--kills', type=int, default=1000, help='largest number of kills')
    parser.add_argument(
        '--hangs', type=float, default=0.25, help='fraction of processes to stop (SIGSTOP) instead of killing'
    )
    parser.add_argument('--heartbeat', type=int, default=5, help='seconds')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--directory', type=Path, help='a new directory for both runs (default: a temporary one)')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(compare(options, options.directory or Path(temporary)))


def compare(options: argparse.Namespace, directory: Path) -> int:
    """Makes both runs and prints the comparison. Returns the exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / 'run.yaml'
    config.write_text(json.dumps(small_run(options)))
    print(f'{machine.processor()}, {usable_cores()} cores; {machine.busy():.0%} used by other programs')
    began = time.time()
    with launched(config, directory / 'undisturbed', options) as undisturbed:
        code = undisturbed.wait()
    if code:
        raise SystemExit(f'the undisturbed run failed with exit code {code}: see {directory / "undisturbed.txt"}')
    print(f'undisturbed: {options.steps} steps in {time.time() - began:.0f} s')

    began = time.time()
    with launched(config, directory / 'killed', options) as killed:
        kills = kill_at_random(killed, directory / 'killed', options)
        code = killed.wait()
    print(f'killed {len(kills)} times: {options.steps} steps in {time.time() - began:.0f} s, exit code {code}')
    report(kills, directory / 'killed')
    before, after = (losses(directory / name) for name in ('undisturbed', 'killed'))
    other = [step for step in before if before[step] != after.get(step)]
    print(f'final loss: {before[options.steps]!r} undisturbed, {after.get(options.steps)!r} killed')
    print(
        f'losses equal: {len(before) - len(other)} of {len(before)}{f", first difference at step {other[0]}" if other else ""}'
    )
    print(f'goodput: {read_metrics(directory / "killed" / "metrics.jsonl")[-1]["goodput"]:.3f}')
    return 1 if other or code else 0


def small_run(options: argparse.Namespace) -> dict:
    return {
        'name': 'faults', 'steps': options.steps,
        'model': {'family': 'llama', 'n_layers': 2, 'd_model': 64, 'n_heads': 4},
        'data': {'name': 'synthetic', 'vocab_size': 512},
        'batch': {'tokens': 12 * 128, 'sequence_length': 128},
        'optimizer': {'learning_rate': 1e-3}, 'precision': {'compute': 'f32'},
        'checkpoint': {'every': 25}, 'log': {'every': 1}, 'eval': {'every': 0},
        'faults': {'heartbeat_seconds': options.heartbeat},
    }  # fmt: skip


@contextlib.contextmanager
def launched(config: Path, run_dir: Path, options: argparse.Namespace):
    """Starts a run under the launcher; its output goes to a file next to the run directory."""
    with run_dir.with_suffix('.txt').open('w') as output:
        process = subprocess.Popen(
            [*PRETRAX, 'launch', 'local', str(config), f'run_dir={run_dir}', f'--processes={options.processes}',
             '--devices-per-process=1', '--retries=20'],
            stdout=output, stderr=subprocess.STDOUT, env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def kill_at_random(launcher: subprocess.Popen, run_dir: Path, options: argparse.Namespace) -> list[dict]:
    """Kills and stops processes until the run is done. Returns the kills."""
    draw, kills = random.Random(options.seed), []
    while len(kills) < options.kills:
        try:
            launcher.wait(options.seconds * draw.uniform(0.5, 1.5))
            break
        except subprocess.TimeoutExpired:
            pass
        events = read_attempts(run_dir)
        if not events or events[-1]['event'] == 'ended':
            continue  # between two attempts there is no process to kill
        [*_, started] = (event for event in events if event['event'] == 'started')
        process = draw.randrange(options.processes)
        # A process that stops before it has joined is detected only after JAX's five minutes for slow starts.
        joined = events[-1]['event'] != 'started'
        how = signal.SIGSTOP if joined and draw.random() < options.hangs else signal.SIGKILL
        kills.append({'time': time.time(), 'process': process, 'how': how.name, 'during': events[-1]['event']})
        with contextlib.suppress(ProcessLookupError):
            os.kill(started['processes'][process], how)
    return kills


def report(kills: list[dict], run_dir: Path) -> None:
    """Prints a line for each kill, and the longest times."""
    events = read_attempts(run_dir)
    doing = {'started': 'starting', 'began': 'compiling', 'stepped': 'training'}
    print(f'{"process":>8} {"how":>8} {"while":>10} {"detected after":>15} {"training again after":>21}')
    detected, recovered = [], []
    for kill, following in zip(kills, [*kills[1:], {'time': float('inf')}], strict=True):
        later = [event for event in events if event['time'] > kill['time']]
        found = {
            name: next(
                (event.get('noticed', event['time']) - kill['time'] for event in later if event['event'] == name), None
            )
            for name in ('ended', 'stepped')
        }
        if found['stepped'] is not None and kill['time'] + found['stepped'] > following['time']:
            found['stepped'] = None  # killed again before it trained
        shown = [f'{value:.1f} s' if value is not None else '-' for value in found.values()]
        print(f'{kill["process"]:>8} {kill["how"]:>8} {doing[kill["during"]]:>10} {shown[0]:>15} {shown[1]:>21}')
        detected += [found['ended']] if found['ended'] is not None else []
        recovered += [found['stepped']] if found['stepped'] is not None else []
    if detected and recovered:
        print(f'longest: detected after {max(detected):.1f} s, training again after {max(recovered):.1f} s')


def losses(run_dir: Path) -> dict[int, float]:
    return {line['step']: line['loss'] for line in read_metrics(run_dir / 'metrics.jsonl')}


if __name__ == '__main__':
    main()
