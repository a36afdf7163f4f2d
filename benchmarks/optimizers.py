"""Compares optimizers at equal tokens, each at its best learning rate: `uv run python benchmarks/optimizers.py`.

Each run trains the quickstart's model at a smaller size, on the same tokens in the same order, and counts the loss on
held-out text after the last step. With one seed, the learning rates of a grid are tried, and the grid is extended until
the best one is not at its edge; then the best one is trained with other seeds. Schedule-Free has a constant rate, as
its paper demands, and the others the same cosine. Everything else, weight decay and clipping too, is equal.

A step is timed in seconds of the processor, in turns, after the training. The result is written to
results/optimizers-DATE.json and .md, and the curves to --picture.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from result_files import circumstances, write_result

from pretrax.config import RunConfig, load
from pretrax.config.registry import build
from pretrax.run.setup import prepare
from pretrax.run.validation import Evaluation
from pretrax.system.software import versions
from pretrax.train.state import init_state
from pretrax.train.step import training_step
from pretrax.view.charts.picture import figure_bytes

MODEL = [
    'model.n_layers=2',
    'model.d_model=64',
    'model.attention.n_heads=2',
    'model.attention.n_kv_heads=1',
    'data.vocab_size=1024',
]
SIZES = [*MODEL, 'batch={tokens: 2048, sequence_length: 128}', 'eval.batches=16', 'mesh.r=1', 'mesh.d=1']
NAMES = {'adamw': 'AdamW', 'muon': 'Muon', 'soap': 'SOAP', 'schedule_free': 'Schedule-Free'}
OPTIONS = {'soap': ', max_precond_dim: 512'}  # the vocabulary has no preconditioner
ROUNDS = 7  # of timing
MOST = 7  # learning rates of an optimizer
RESULTS = Path(__file__).parent / 'results'


def main() -> None:
    """Trains all runs, prints the table and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=150)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--rates', type=int, nargs='+', default=[-8, -7, -6], help='powers of two, ascending')
    parser.add_argument('--at-once', type=int, default=1, help='optimizers that train at the same time')
    parser.add_argument('--out', type=Path, default=RESULTS)
    parser.add_argument('--picture', type=Path, default=None, help='a .png file for the curves')
    chosen = parser.parse_args()
    result: dict[str, Any] = circumstances() | {'versions': versions(), 'steps': chosen.steps}
    with ProcessPoolExecutor(chosen.at_once, multiprocessing.get_context('spawn')) as pool:
        given = chosen.rates, chosen.seeds, chosen.steps
        found = {name: pool.submit(compared, name, *given) for name in NAMES}
        result['optimizers'] = {name: one.result() for name, one in found.items()}
    for name, seconds in timed().items():
        result['optimizers'][name]['seconds_per_step'] = seconds
    write_result(result, table, chosen.out, 'optimizers')
    if chosen.picture is not None:
        picture(result, chosen.picture)


def compared(name: str, powers: list[int], seeds: int, steps: int) -> dict[str, Any]:
    """The losses of an optimizer by learning rate and, at the best one, by seed;
    its speed and the bytes of its state.
    """
    trainer = Trainer(name, steps)
    by_power: dict[int, float] = {}
    todo, best = list(powers), powers[0]
    while todo:
        for power in todo:
            by_power[power] = trainer.train(2.0**power, seed=0)[-1][1]
            print(f'{name} 2^{power}: {by_power[power]:.4f}', flush=True)
        best = min(by_power, key=lambda power: by_power[power] if math.isfinite(by_power[power]) else math.inf)
        beyond = [min(by_power) - 1] * (best == min(by_power)) + [max(by_power) + 1] * (best == max(by_power))
        todo = beyond if len(by_power) < MOST else []
    curves = [trainer.train(2.0**best, seed) for seed in range(1, 1 + seeds)]
    print(f'{name} at 2^{best}: {[curve[-1][1] for curve in curves]}', flush=True)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trainer.run.like.optimizer))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trainer.run.like.weights))
    return {
        'by_rate': {f'2^{power}': by_power[power] for power in sorted(by_power)},
        'best': f'2^{best}',
        'val_loss': [curve[-1][1] for curve in curves],
        'curves': curves,
        'state_bytes': state,
        'weight_bytes': weights,
    }


def timed() -> dict[str, float]:
    """Seconds of the processor for a step of each optimizer: the median of runs of 21 steps, in turns.

    The first step, which finds SOAP's first eigenvectors, is not timed; the others improve them twice. The first turn
    warms up.
    """
    trainers = {name: Trainer(name, steps=21) for name in NAMES}
    turns = [{name: trainer.seconds() for name, trainer in trainers.items()} for _ in range(1 + ROUNDS)]
    return {name: statistics.median(turn[name] for turn in turns[1:]) for name in NAMES}


class Trainer:
    """Trains the model with one optimizer. Its step is compiled once: the learning rate is an argument."""

    def __init__(self, name: str, steps: int):
        self._name, self._steps = name, steps
        self.run = prepare(self._config(0), lambda _: None)
        config, recipe = self.run.config, self.run.recipe
        schedule = build('schedule', config.schedule, config.steps)

        def step(state: Any, batch: Any, peak: jax.Array) -> Any:
            return training_step(recipe._replace(rate=lambda number: peak * schedule(number)))(state, batch)[:2]

        self._step = jax.jit(step, donate_argnums=0)
        self._evaluation = Evaluation(self.run)

    def train(self, rate: float, seed: int) -> list[tuple[int, float]]:
        """(step, loss on held-out text), six times, the last one after the last step."""
        due = {round(self._steps * part / 6) for part in range(1, 7)}
        return [
            (number, self._evaluation.losses(state.weights)['val_loss'])
            for number, state in self._states(rate, seed)
            if number in due
        ]

    def seconds(self) -> float:
        """Of the processor for a step of a run, after the first one; batches are included."""
        states = self._states(2.0**-8, seed=0)
        next(states)  # it may compile
        began = time.process_time()
        for _, state in states:
            jax.block_until_ready(state)
        return (time.process_time() - began) / (self._steps - 1)

    def _states(self, rate: float, seed: int) -> Iterator[tuple[int, Any]]:
        run = prepare(self._config(seed), lambda _: None)
        with jax.set_mesh(run.mesh), contextlib.closing(run.batches(range(self._steps), print)) as batches:
            state = init_state(run.recipe, seed)
            for number, batch in enumerate(batches, 1):
                state, _ = self._step(state, batch, np.float32(rate))
                yield number, state

    def _config(self, seed: int) -> RunConfig:
        name = 'constant' if self._name == 'schedule_free' else 'cosine'
        return load(
            'configs/quickstart.yaml',
            [
                *SIZES,
                'name=optimizers',
                f'steps={self._steps}',
                f'seed={seed}',
                f'optimizer={{name: {self._name}, learning_rate: 1.0, weight_decay: 0.1{OPTIONS.get(self._name, "")}}}',
                f'schedule={{name: {name}, warmup: {self._steps // 8}}}',
            ],
        )


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    found = result['optimizers']
    lines = [
        '| optimizer | best rate | val_loss | seeds | tokens/s | state |',
        '|---|---|---|---|---|---|',
    ]
    for name, one in found.items():
        losses = one['val_loss']
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
        speed = found['adamw']['seconds_per_step'] / one['seconds_per_step']
        lines.append(
            f'| {NAMES[name]} | {one["best"]} | {statistics.mean(losses):.3f} ± {error:.3f} '
            f'| {", ".join(f"{loss:.3f}" for loss in losses)} | {speed:.2f} '
            f'| {one["state_bytes"] / 1e6:.2f} MB, {one["state_bytes"] / one["weight_bytes"]:.2f} times the weights |'
        )
    lines += ['', 'val_loss by learning rate, with seed 0:', '']
    powers = sorted({power for one in found.values() for power in one['by_rate']}, key=lambda text: int(text[2:]))
    lines += ['| optimizer | ' + ' | '.join(powers) + ' |', '|---|' + '---|' * len(powers)]
    for name, one in found.items():
        losses = [one['by_rate'].get(power) for power in powers]
        lines.append(f'| {NAMES[name]} | ' + ' | '.join('' if x is None else f'{x:.3f}' for x in losses) + ' |')
    lines += [
        '',
        f'{result["steps"]} steps of 2,048 tokens. The error is the standard error over seeds. tokens/s is relative '
        'to AdamW, by the '
        'time of the processor for a step.',
        f'Command: `{result["command"]}`, {result["date"]}, {result["processor"]}, {result["cores"]} cores.',
        f'Versions: {json.dumps(result["versions"])}.',
    ]
    return '\n'.join(lines) + '\n'


def picture(result: dict[str, Any], path: Path) -> None:
    """The curves of all optimizers: the mean over seeds, and their range."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, one in result['optimizers'].items():
            steps = [step for step, _ in one['curves'][0]]
            losses = np.array([[loss for _, loss in curve] for curve in one['curves']])
            (line,) = axes.plot(steps, losses.mean(axis=0), marker='o', markersize=3.5, label=NAMES[name])
            axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.15)
        axes.set_xlabel('step')
        axes.set_ylabel('val_loss, nats per token')
        axes.legend(frameon=False)

    path.write_bytes(figure_bytes(draw, path.suffix, 3.6))


if __name__ == '__main__':
    main()
