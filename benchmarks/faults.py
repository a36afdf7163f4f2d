"""A run of several processes that are killed and stopped at random, beside the same run left alone.

    uv run python benchmarks/faults.py                     # 4 processes, one killed about every 20 seconds

Prints for each kill how long it took until it was noticed and until training went on, and at the end whether every logged
loss of the two runs is the same number. Exits with 1 if one is not. The moments are drawn from the seed, whatever the run
is doing then: starting, training, writing a checkpoint.
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
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics

PRETRAX = [sys.executable, '-c', 'from pretrax.cli import main; main()']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('--processes', type=int, default=4)
    parser.add_argument('--steps', type=int, default=3000)
    parser.add_argument('--seconds', type=float, default=20.0, help='between two kills, on average')
    parser.add_argument('--kills', type=int, default=1000, help='at most')
    parser.add_argument('--hangs', type=float, default=0.25, help='the share that is stopped (SIGSTOP), not killed')
    parser.add_argument('--heartbeat', type=int, default=5, help='seconds')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--directory', type=Path, help='a new one for both runs (default: a temporary one)')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(compare(options, options.directory or Path(temporary)))


def compare(options: argparse.Namespace, directory: Path) -> int:
    """Both runs, the tables, and the exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / 'run.yaml'
    config.write_text(json.dumps(small_run(options)))
    print(f'{machine.processor()}, {machine.cores()} cores; {machine.busy():.0%} in use by others')
    began = time.time()
    with launched(config, directory / 'alone', options) as alone:
        code = alone.wait()
    if code:
        raise SystemExit(f'the run left alone ended with code {code}: see {directory / "alone.txt"}')
    print(f'left alone: {options.steps} steps in {time.time() - began:.0f} s')

    began = time.time()
    with launched(config, directory / 'hurt', options) as hurt:
        kills = hurt_it(hurt, directory / 'hurt', options)
        code = hurt.wait()
    print(f'killed {len(kills)} times: {options.steps} steps in {time.time() - began:.0f} s, exit code {code}')
    report(kills, directory / 'hurt')
    before, after = (losses(directory / name) for name in ('alone', 'hurt'))
    other = [step for step in before if before[step] != after.get(step)]
    print(f'final loss: {before[options.steps]!r} alone, {after.get(options.steps)!r} killed')
    print(
        f'losses equal: {len(before) - len(other)} of {len(before)}{f", first other at step {other[0]}" if other else ""}'
    )
    print(f'goodput: {read_metrics(directory / "hurt" / "metrics.jsonl")[-1]["goodput"]:.3f}')
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
    """A run under the launcher; its output goes to a file beside it."""
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


def hurt_it(launcher: subprocess.Popen, run_dir: Path, options: argparse.Namespace) -> list[dict]:
    """Kills and stops processes until the run is done; what was done to it."""
    draw, kills = random.Random(options.seed), []
    while len(kills) < options.kills:
        try:
            launcher.wait(options.seconds * draw.uniform(0.5, 1.5))
            break
        except subprocess.TimeoutExpired:
            pass
        events = read_attempts(run_dir)
        if not events or events[-1]['event'] == 'ended':
            continue  # between two attempts there is nobody to kill
        [*_, started] = (event for event in events if event['event'] == 'started')
        process = draw.randrange(options.processes)
        # One that stops before it has joined the others is missed only after JAX's five minutes for slow starts.
        joined = events[-1]['event'] != 'started'
        how = signal.SIGSTOP if joined and draw.random() < options.hangs else signal.SIGKILL
        kills.append({'time': time.time(), 'process': process, 'how': how.name, 'during': events[-1]['event']})
        with contextlib.suppress(ProcessLookupError):
            os.kill(started['processes'][process], how)
    return kills


def report(kills: list[dict], run_dir: Path) -> None:
    """A line for each kill, and the medians."""
    events = read_attempts(run_dir)
    doing = {'started': 'starting', 'began': 'compiling', 'stepped': 'training'}
    print(f'{"process":>8} {"how":>8} {"while":>10} {"noticed after":>14} {"trains again after":>19}')
    noticed, recovered = [], []
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
        print(f'{kill["process"]:>8} {kill["how"]:>8} {doing[kill["during"]]:>10} {shown[0]:>14} {shown[1]:>19}')
        noticed += [found['ended']] if found['ended'] is not None else []
        recovered += [found['stepped']] if found['stepped'] is not None else []
    if noticed and recovered:
        print(f'longest: noticed after {max(noticed):.1f} s, trains again after {max(recovered):.1f} s')


def losses(run_dir: Path) -> dict[int, float]:
    return {line['step']: line['loss'] for line in read_metrics(run_dir / 'metrics.jsonl')}


if __name__ == '__main__':
    main()
