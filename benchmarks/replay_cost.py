"""Measures what a replay of a step (`faults.replay`) costs, in steps of CPU time.

    taskset -c 0 uv run python benchmarks/replay_cost.py

A decoder of 5 million weights trains over d=2 on one core. Steps take turns with replays: one with rotated data, and
one without, as a run alternates them. CPU time hardly depends on other programs of the machine.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == '__main__':  # before JAX is imported
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false'

import jax
from result_files import circumstances, write_result

from pretrax import config_from_values
from pretrax.run.clock import Clock
from pretrax.run.compiled_step import compile_step
from pretrax.run.replay import Replay
from pretrax.run.setup import prepare
from pretrax.run.start import initial_state

STEPS = 2  # of a turn
EVERY = (100, 1000)  # values of faults.replay.every in the table


def values(directory: str) -> dict[str, Any]:
    """The configuration of the run."""
    return {
        'name': 'cost', 'run_dir': f'{directory}/run', 'steps': 10**6, 'mesh': {'d': 2},
        'model': {'family': 'llama', 'n_layers': 4, 'd_model': 256, 'attention': {'n_heads': 4}},
        'data': {'name': 'synthetic', 'vocab_size': 4096}, 'batch': {'tokens': 1024, 'sequence_length': 256},
        'optimizer': {'learning_rate': 1e-3}, 'faults': {'replay': {'every': 1}},
    }  # fmt: skip


def cpu_seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - began


def measured(turns: int) -> dict[str, Any]:
    """Medians over turns, of CPU seconds and of replays in steps."""
    with tempfile.TemporaryDirectory() as directory:
        run = prepare(config_from_values(values(directory)), report=lambda line: None)
        clock = Clock(Path(directory), writes=False, step=0, description={})
        replay = Replay(run, clock, print, print)
        with jax.set_mesh(run.mesh):
            state, batch = initial_state(run, print), run.batch(0)
            weights = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
            step = compile_step(run, state, None)
            for _ in range(3):  # the first one compiles
                replay.check(1, state, batch)
            taken: dict[str, list[float]] = {'step': [], 'rotated': [], 'not rotated': []}

            def train() -> Any:
                nonlocal state
                metrics = None
                for _ in range(STEPS):
                    state, metrics = step(state, batch)
                return metrics

            train()
            for _ in range(turns):
                taken['step'].append(cpu_seconds(train) / STEPS)
                for _ in range(2):
                    name = 'not rotated' if replay.replays % 2 else 'rotated'
                    taken[name].append(cpu_seconds(lambda: replay.check(1, state, batch)))
            if replay.differences:
                raise SystemExit('a replay differed')
    kinds = ('rotated', 'not rotated')
    in_steps = {
        kind: statistics.median(a / b for a, b in zip(taken[kind], taken['step'], strict=True)) for kind in kinds
    }
    return {
        'weights': weights,
        'turns': turns,
        'seconds': {name: round(statistics.median(seconds), 4) for name, seconds in taken.items()},
        'steps': {name: round(steps, 3) for name, steps in (in_steps | {'mean': sum(in_steps.values()) / 2}).items()},
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    mean, seconds = result['steps']['mean'], result['seconds']
    lines = [
        f'# Cost of replays, {result["date"]}', '',
        f'`{result["command"]}` on one core of {result["processor"]}: {result["weights"]:,} weights, d=2.',
        f'Medians of {result["turns"]} turns, in CPU time.', '',
        '| | CPU seconds | steps |', '|---|---|---|',
        f'| step | {seconds["step"]:.3f} | 1 |',
        f'| replay without rotated data | {seconds["not rotated"]:.3f} | {result["steps"]["not rotated"]:.2f} |',
        f'| replay with rotated data | {seconds["rotated"]:.3f} | {result["steps"]["rotated"]:.2f} |',
        f'| mean of both, which take turns | | {mean:.2f} |',
        *(f'| share of the time with faults.replay.every={every} | | {mean / every:.2%} |' for every in EVERY),
    ]  # fmt: skip
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--turns', type=int, default=15)
    parser.add_argument('--directory', type=Path, default=Path(__file__).parent / 'results')
    asked = parser.parse_args()
    if len(os.sched_getaffinity(0)) > 1:
        raise SystemExit('run it on one core: taskset -c 0 uv run python benchmarks/replay_cost.py')
    write_result(circumstances() | measured(asked.turns), table, asked.directory, 'replay-cost')


if __name__ == '__main__':
    main()
