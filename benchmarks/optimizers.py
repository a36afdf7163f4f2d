"""Compares optimizers at equal loss, at two sizes: `uv run python benchmarks/optimizers.py`.

Each run trains a small decoder on the same tokens in the same order, and counts the loss on held-out text as it goes.
With seed 0, learning rates in powers of two are tried, until the best one is not at the edge of those that were tried;
then the best one is trained with other seeds. The target is the mean of AdamW's last losses. The tokens to the target
are read from the curve of each seed. The cosine of a run decays over all its steps, so a run that was planned to end at
the target would need fewer tokens. Schedule-Free has a constant rate, as its paper demands. Everything else is equal.

The time of a step is the processor's, on one thread. It is compared with AdamW's in pairs: ten steps of one, then
ten of the other. A pair of AdamW with itself shows the noise.

The result is written to results/optimizers-DATE.json and .md after each optimizer, and the curves to --picture.
`--from` continues an earlier result: only what it lacks is measured.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class Size(NamedTuple):
    """A model, and the length of its runs."""

    model: str
    steps: int


SIZES = {
    '0.2M': Size('model={n_layers: 2, d_model: 64, attention: {n_heads: 2, n_kv_heads: 1}}', 150),
    '0.6M': Size('model={n_layers: 4, d_model: 96, attention: {n_heads: 3, n_kv_heads: 1}}', 300),
}
TOKENS = 2048  # in a step
SHARED = [
    'data.vocab_size=1024',
    f'batch={{tokens: {TOKENS}, sequence_length: 128}}',
    'eval.batches=16',
    'mesh.r=1',
    'mesh.d=1',
]


class Choice(NamedTuple):
    """An optimizer with its options."""

    label: str
    options: str
    powers: tuple[int, ...]  # of two: the learning rates that are tried first


CHOICES = {
    'adamw': Choice('AdamW', 'name: adamw', (-9, -8, -7)),
    'muon': Choice('Muon', 'name: muon', (-6, -5, -4)),
    'polar_express': Choice('Muon, Polar Express', 'name: muon, polynomials: polar_express', (-6, -5, -4)),
    'normuon': Choice('NorMuon', 'name: muon, neuron_b2: 0.95', (-6, -5, -4)),
    'cautious': Choice('Muon, cautious decay', 'name: muon, cautious_decay: true', (-6, -5, -4)),
    # the vocabulary has no preconditioner
    'soap': Choice('SOAP', 'name: soap, max_precond_dim: 512', (-7, -6, -5)),
    'schedule_free': Choice('Schedule-Free', 'name: schedule_free', (-8, -7, -6)),
}
POINTS = 6  # of a curve
PAIRS = 5
TIMED_STEPS = 10  # in a half of a pair; SOAP improves its eigenvectors once in ten steps
RESULTS = Path(__file__).parent / 'results'


def main() -> None:
    """Measures what is missing, prints the table and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', nargs='+', choices=SIZES, default=list(SIZES))
    parser.add_argument('--optimizers', nargs='+', choices=CHOICES, default=list(CHOICES), help='AdamW is always added')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--from', dest='earlier', type=Path, nargs='+', default=[], help='.json files to continue')
    parser.add_argument('--out', type=Path, default=RESULTS)
    parser.add_argument('--picture', type=Path, default=None, help='a .png file for the curves')
    arguments = parser.parse_args()
    result: dict[str, Any] = circumstances() | {'versions': versions(), 'sizes': {}}
    for path in arguments.earlier:
        for size, measured in json.loads(path.read_text())['sizes'].items():
            result['sizes'].setdefault(size, {}).update(measured)
    for size in arguments.sizes:
        measure_missing(
            size,
            arguments.optimizers,
            arguments.seeds,
            result['sizes'].setdefault(size, {}),
            lambda: write_result(result, table, arguments.out, 'optimizers'),
        )
    write_result(result, table, arguments.out, 'optimizers')
    if arguments.picture is not None:
        picture(result, arguments.picture)


def measure_missing(
    size: str, names: list[str], seeds: int, measured: dict[str, Any], write: Callable[[], None]
) -> None:
    """Adds to `measured` what it lacks of AdamW and of `names`, and writes the losses and the times of each."""
    reference = Trainer('adamw', size)
    for name in dict.fromkeys(['adamw', *names]):
        if 'seconds_of_pairs' in measured.get(name, {}):
            continue
        trainer = Trainer(name, size)
        if name not in measured:
            measured[name] = losses_of(trainer, seeds)
            write()
        measured[name]['seconds_of_pairs'] = time_pairs(reference, trainer)
        write()


def losses_of(trainer: 'Trainer', seeds: int) -> dict[str, Any]:
    """The last loss by learning rate, the curve of each seed at the best rate, and the bytes of weights and state."""
    losses: dict[int, float] = {}
    untried, best = list(CHOICES[trainer.name].powers), 0
    while untried:
        for power in untried:
            losses[power] = trainer.train(2.0**power, 0, points=1)[-1][1]
            print(f'{trainer.size} {trainer.name} 2^{power}: {losses[power]:.4f}', flush=True)
        best = min(losses, key=lambda power: losses[power] if math.isfinite(losses[power]) else math.inf)
        untried = [power for power in (best - 1, best + 1) if power not in losses]
    curves = [trainer.train(2.0**best, seed, POINTS) for seed in range(1, 1 + seeds)]
    print(f'{trainer.size} {trainer.name} at 2^{best}: {[curve[-1][1] for curve in curves]}', flush=True)
    return {
        'date': circumstances()['date'],
        'versions': versions(),
        'loss_by_rate': {f'2^{power}': losses[power] for power in sorted(losses)},
        'best_rate': f'2^{best}',
        'curves': curves,
        'weights': sum(leaf.size for leaf in jax.tree.leaves(trainer.run.like.weights)),
        'weight_bytes': bytes_of(trainer.run.like.weights),
        'state_bytes': bytes_of(trainer.run.like.optimizer),
    }


def bytes_of(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def time_pairs(reference: 'Trainer', trainer: 'Trainer') -> list[tuple[float, float]]:
    """Seconds of the processor for a step of AdamW and of an optimizer, for each pair."""
    pairs = [(reference.seconds(), trainer.seconds()) for _ in range(1 + PAIRS)]
    return pairs[1:]  # the first one warms up


class Trainer:
    """Trains the model with one optimizer. Its step is compiled once: the learning rate is an argument."""

    def __init__(self, name: str, size: str):
        self.name, self.size, self._steps = name, size, SIZES[size].steps
        self.run = prepare(self._config(0), lambda _: None)
        config, recipe = self.run.config, self.run.recipe
        schedule = build('schedule', config.schedule, config.steps)

        def step(state: Any, batch: Any, peak: jax.Array) -> Any:
            return training_step(recipe._replace(rate=lambda number: peak * schedule(number)))(state, batch)[:2]

        self._step = jax.jit(step, donate_argnums=0)
        self._evaluation = Evaluation(self.run)

    def train(self, rate: float, seed: int, points: int) -> list[tuple[int, float]]:
        """(step, loss on held-out text) at points of a run, the last of them after the last step."""
        due = {round(self._steps * part / points) for part in range(1, 1 + points)}
        return [
            (number, self._evaluation.losses(state.weights)['val_loss'])
            for number, state in self._states(rate, seed, self._steps)
            if number in due
        ]

    def seconds(self) -> float:
        """Seconds of the processor for a step after the first one, which may compile. Batches are included."""
        states = self._states(2.0**-8, 0, 1 + TIMED_STEPS)
        jax.block_until_ready(next(states))
        start = time.process_time()
        for _, state in states:
            jax.block_until_ready(state)
        return (time.process_time() - start) / TIMED_STEPS

    def _states(self, rate: float, seed: int, steps: int) -> Iterator[tuple[int, Any]]:
        run = prepare(self._config(seed), lambda _: None)
        with jax.set_mesh(run.mesh), contextlib.closing(run.batches(range(steps), print)) as batches:
            state = init_state(run.recipe, seed)
            for number, batch in enumerate(batches, 1):
                state, _ = self._step(state, batch, np.float32(rate))
                yield number, state

    def _config(self, seed: int) -> RunConfig:
        schedule = 'constant' if self.name == 'schedule_free' else 'cosine'
        return load(
            'configs/quickstart.yaml',
            [
                SIZES[self.size].model,
                *SHARED,
                'name=optimizers',
                f'steps={self._steps}',
                f'seed={seed}',
                f'optimizer={{{CHOICES[self.name].options}, learning_rate: 1.0, weight_decay: 0.1}}',
                f'schedule={{name: {schedule}, warmup: {self._steps // 8}}}',
            ],
        )


def steps_to(curve: list[tuple[int, float]], target: float) -> float | None:
    """Steps until the loss is at most the target, linear between the points of a curve; None: it is never reached."""
    if curve[0][1] <= target:
        return float(curve[0][0])
    for (before, higher), (after, lower) in itertools.pairwise(curve):
        if lower <= target < higher:
            return before + (after - before) * (higher - target) / (higher - lower)
    return None


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for size, measured in result['sizes'].items():
        target = statistics.mean(curve[-1][1] for curve in measured['adamw']['curves'])
        steps = measured['adamw']['curves'][0][-1][0]
        lines += [
            f'{size}: {measured["adamw"]["weights"]:,} weights, {steps} steps of {TOKENS:,} tokens. The target is '
            f'{target:.3f}.',
            '',
            '| optimizer | best rate | val_loss | tokens to the target | time of a step | time to the target | state |',
            '|---|---|---|---|---|---|---|',
            *[row(name, measured, target) for name in CHOICES if name in measured],
            '',
        ]
    lines += ['val_loss after the last step by learning rate, with seed 0:', '', *rates(result)]
    lines += [
        '',
        'Numbers after ± are standard deviations over seeds; that of the time of a step is over pairs, and that of the '
        'time to the target over both. '
        'Tokens and times are relative to those of AdamW, bytes of the state to those of the weights.',
        f'Command: `{result["command"]}`, {result["date"]}, {result["processor"]}, one thread.',
        f'Versions: {json.dumps(result["versions"])}.',
    ]
    return '\n'.join(lines) + '\n'


def row(name: str, measured: dict[str, Any], target: float) -> str:
    """The row of an optimizer at a size."""
    own = measured[name]
    ratios = [seconds / of_adamw for of_adamw, seconds in own.get('seconds_of_pairs', [])]
    reached = [steps_to(curve, target) for curve in own['curves']]
    fractions = [steps / own['curves'][0][-1][0] for steps in reached if steps is not None]
    if name == 'adamw':
        tokens, seconds = '1', '1'
    elif len(fractions) < len(reached):
        tokens, seconds = f'{len(fractions)} of {len(reached)} seeds reach it', ''
    else:
        tokens = deviation(fractions)
        seconds = deviation([fraction * ratio for fraction in fractions for ratio in ratios]) if ratios else ''
    of_step = deviation(ratios) if ratios else ''
    losses = deviation([curve[-1][1] for curve in own['curves']], digits=3)
    return (
        f'| {CHOICES[name].label} | {own["best_rate"]} | {losses} | {tokens} | {of_step} | {seconds} '
        f'| {own["state_bytes"] / own["weight_bytes"]:.2f} |'
    )


def deviation(numbers: list[float], digits: int = 2) -> str:
    """The mean of numbers and, of more than one, their standard deviation."""
    spread = f' ± {statistics.stdev(numbers):.{digits}f}' if len(numbers) > 1 else ''
    return f'{statistics.mean(numbers):.{digits}f}{spread}'


def rates(result: dict[str, Any]) -> list[str]:
    """The losses by learning rate."""
    rows = [
        (f'{size}, {CHOICES[name].label}', measured[name]['loss_by_rate'])
        for size, measured in result['sizes'].items()
        for name in CHOICES
        if name in measured
    ]
    powers = sorted({power for _, losses in rows for power in losses}, key=lambda text: int(text[2:]))
    lines = ['| optimizer | ' + ' | '.join(powers) + ' |', '|---|' + '---|' * len(powers)]
    for label, losses in rows:
        cells = [f'{losses[power]:.3f}' if power in losses else '' for power in powers]
        lines.append(f'| {label} | ' + ' | '.join(cells) + ' |')
    return lines


def picture(result: dict[str, Any], path: Path) -> None:
    """The curves of all optimizers, for each size: the mean over seeds, and their range."""

    def draw(figure: Any) -> None:
        sizes = result['sizes']
        for axes, (size, measured) in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes.items(), strict=True):
            for name in CHOICES:
                if name not in measured:
                    continue
                steps = [step for step, _ in measured[name]['curves'][0]]
                losses = np.array([[loss for _, loss in curve] for curve in measured[name]['curves']])
                (line,) = axes.plot(steps, losses.mean(axis=0), label=CHOICES[name].label)
                axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.15)
            axes.set_title(size)
            axes.set_xlabel('step')
        figure.axes[0].set_ylabel('val_loss, nats per token')
        figure.axes[0].legend(frameon=False)

    path.write_bytes(figure_bytes(draw, path.suffix, 3.6))


if __name__ == '__main__':
    os.environ['NPROC'] = '1'  # threads of XLA, so that the time of the processor is that of a step alone
    main()
