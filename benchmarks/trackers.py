"""Measures what trackers cost, as a fraction of the step of the quickstart's model.

    uv run --extra tensorboard --extra trackio --extra mlflow --extra wandb python benchmarks/trackers.py

A process for each tracker logs LINES lines as the quickstart does, one every PAUSE seconds. It measures the processor
time of the process with the tracker and without it, and how long `MetricsLog.write` takes, which is what a step waits.
The processor time of a step is measured by training the quickstart's model. Processor time does not depend on how busy
the machine is. W&B's own process is measured too. The results go to results/trackers.json.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from machine import processor

RESULTS = pathlib.Path(__file__).parent / 'results' / 'trackers.json'
CHOICES: dict[str, str | bool] = {'tensorboard': True, 'trackio': 'benchmark', 'mlflow': True, 'wandb': 'benchmark'}
PACKAGES = {'tensorboard': 'tensorboardX', 'trackio': 'trackio', 'mlflow': 'mlflow-skinny', 'wandb': 'wandb'}
LINES, PAUSE = 200, 0.05
EVERY = 10  # steps between lines, the default of log.every
NUMBERS = 20  # per line


def measure(key: str) -> dict[str, float]:
    """Processor time of a line, in seconds, with one tracker; with key '' without a tracker."""
    from pretrax.observe.metrics import MetricsLog
    from pretrax.observe.trackers import open_trackers

    directory = pathlib.Path.cwd()
    trackers = open_trackers({key: CHOICES[key]} if key else {}, directory=directory, name='benchmark', config={})
    waits: list[float] = []
    before = 0.0
    with MetricsLog(directory / 'metrics.jsonl', trackers) as log:
        for step in range(LINES + 20):
            if step == 20:  # after the first lines, for which packages are imported and files created
                before = time.process_time()
            line = {'step': step, **{f'metric_{number}': number / (step + 1) for number in range(NUMBERS)}}
            start = time.perf_counter()
            log.write(line)
            waits.append(time.perf_counter() - start)
            time.sleep(PAUSE)
        used = time.process_time() - before
        others = _time_of_children()
    return {'processor': used / LINES, 'wait': statistics.median(waits[20:]), 'others': others / LINES}


def _time_of_children() -> float:
    """Processor time of the processes that this one has started and that still run, in seconds."""
    found = 0.0
    for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
        try:
            fields = path.read_text().rpartition(')')[2].split()
        except OSError:
            continue  # it has ended
        parent, group, ours = int(fields[1]), int(fields[2]), os.getpid()
        if parent == ours or (group == os.getpgrp() and path.parent.name != str(ours)):
            found += (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')
    return found


def step_time() -> float:
    """Processor time of a step of the quickstart's model, in seconds."""
    from pretrax import config_from_values, pretrain
    from pretrax.observe.progress import Progress

    class Times(Progress):
        def __init__(self):
            super().__init__()
            self.times: list[tuple[int, float]] = []

        def message(self, text: str) -> None:
            pass

        def update(self, metrics: Mapping[str, Any]) -> None:
            self.times.append((metrics['step'], time.process_time()))

    progress = Times()
    values = {
        'name': 'benchmark',
        'steps': 40,
        'model': {'family': 'llama', 'n_layers': 4, 'd_model': 128, 'attention': {'n_heads': 4, 'n_kv_heads': 2}},
        'data': {'name': 'synthetic', 'vocab_size': 2048},
        'batch': {'tokens': 4096, 'sequence_length': 256},
        'optimizer': {'name': 'adamw', 'learning_rate': 6e-3},
        'eval': {'every': 0},
        'log': {'every': EVERY},
    }
    pretrain(config_from_values(values), progress=progress)
    (first, began), (last, ended) = progress.times[1], progress.times[-1]
    return (ended - began) / (last - first)


def in_a_process(key: str) -> dict[str, float] | None:
    """What `measure` or `step_time` finds in a new process and directory; None if a package is missing."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {'TRACKIO_DIR': directory, 'WANDB_MODE': 'offline', 'JAX_PLATFORMS': 'cpu'}
        command = [sys.executable, os.path.abspath(__file__), '--measure', key]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, start_new_session=True
        )
    if done.returncode:
        print(f'{key}: {done.stderr.strip().splitlines()[-1]}')
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    key = parser.parse_args().measure
    if key is not None:
        print(json.dumps({'step': step_time()} if key == 'step' else measure(key)))
        return
    step, alone = in_a_process('step'), in_a_process('')
    assert step is not None
    assert alone is not None
    rows = {}
    print(f'a step: {1000 * step["step"]:.0f} ms of processor time; a line every {EVERY} steps')
    print(f'{"":12} {"ms a line":>10} {"of a step":>10} {"a step waits":>13}')
    for key in ['', *CHOICES]:
        found = alone if not key else in_a_process(key)
        if found is None:
            continue
        cost = found['processor'] + found['others'] - (alone['processor'] if key else 0.0)
        rows[key or 'metrics.jsonl'] = {'line': cost, 'share': cost / EVERY / step['step'], 'wait': found['wait']}
        share = f'{100 * cost / EVERY / step["step"]:.3f} %'
        print(f'{key or "metrics.jsonl":12} {1000 * cost:10.2f} {share:>10} {1e6 * found["wait"]:10.0f} µs')
    versions = {}
    for package in ('jax', *PACKAGES.values()):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    result = {
        'date': datetime.now(UTC).date().isoformat(),
        'command': 'python benchmarks/trackers.py',
        'processor': processor(),
        'cores': len(os.sched_getaffinity(0)),
        'versions': versions,
        'step': step['step'],
        'rows': rows,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
