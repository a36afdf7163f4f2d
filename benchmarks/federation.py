"""Trains islands that meet in rounds, and compares their loss with one run of the same tokens.

    uv run python benchmarks/federation.py                               # everything, an hour on two cores
    uv run python benchmarks/federation.py --parts islands --seeds 1     # one table
    uv run python benchmarks/federation.py --from results/federation-DATE.json

The islands are simulated in one process: their steps, the encoding of their differences and the outer optimizer are
those of pretrax, but nothing is sent. What a federation would send is computed from the encoded sizes. One run of the
same tokens has a batch as large as those of all islands together, as in Douillard et al. 2023, arXiv:2311.08105; the
best of several learning rates of it is taken, and of the islands. Each island has the outer settings of the paper, rate
0.7 and momentum 0.9. `streaming` has fragments as Douillard et al. 2025, arXiv:2501.18512. `trained` begins as the
first paper does, with the weights of an earlier run (`init_from`), which had the batch of an island and 27 % of all
steps (24,000 of 88,000 there). So does the one run that it is compared with.

Every run that has ended is in results/federation-DATE.json at once; `--from` takes over those of an earlier file.
"""

import argparse
import contextlib
import functools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from result_files import circumstances, write_result

from pretrax.checkpoint.manifest import named_leaves
from pretrax.config import load
from pretrax.config.registry import build
from pretrax.federation.encoding import Encoding, decode, encode, encoded_size
from pretrax.federation.fragments import fragments
from pretrax.federation.outer import add_weighted, mix, nesterov, shares_of
from pretrax.run.setup import Run, prepare
from pretrax.run.validation import Evaluation
from pretrax.system.software import versions
from pretrax.train.state import TrainState, init_state
from pretrax.train.step import training_step

RESULTS = Path(__file__).parent / 'results'
TOKENS, LENGTH = 1024, 128  # TOKENS: of an island in a step
WARMUP, START_POWER = 100, -8  # START_POWER: of the learning rate of the run that comes before a federation
MESH = ['mesh.r=1', 'mesh.d=1']
MODEL = 'model={n_layers: 4, d_model: 64, attention: {n_heads: 2, n_kv_heads: 1}}'
POWERS = (-9, -8, -7)  # of two: the learning rates that are tried first


class Case(NamedTuple):
    """A federation.

    Attributes:
        every: steps between two rounds of a fragment; 0: one run with the batches of all islands.
        power: the learning rate is 2^power.
        start: steps of an earlier run with the batch of an island, from whose weights it begins; 0: from random ones.
    """

    islands: int
    every: int
    encoding: Encoding = 'f32'
    fragments: int = 1
    delay: int = 0
    power: int = 0
    seed: int = 0
    steps: int = 1200
    start: int = 0
    outer_rate: float = 0.7
    outer_momentum: float = 0.9

    @property
    def alone(self) -> 'Case':
        """One run of the same tokens, without its learning rate."""
        return Case(self.islands, 0, seed=self.seed, steps=self.steps, start=self.start)


class Part(NamedTuple):
    """Some federations, without learning rates and seeds.

    Attributes:
        tuned: the one whose best learning rate all of them have.
        repeated: those that are trained with their own best learning rate and more seeds.
    """

    cases: list[Case]
    tuned: Case
    repeated: list[Case]


TUNED, STREAMING = Case(4, 100), Case(4, 100, 'int4', 4, 5)
TRAINED = Case(4, 30, steps=1750, start=650)
PARTS = {
    'islands': Part([Case(n, every) for n in (2, 4, 8) for every in (10, 30, 100, 300)], TUNED, [TUNED]),
    'encodings': Part([TUNED._replace(encoding=name) for name in ('f32', 'bf16', 'int8', 'int4')], TUNED, []),
    'streaming': Part([Case(4, 100, 'f32', 4, delay) for delay in (0, 5)] + [STREAMING], TUNED, [STREAMING]),
    'trained': Part(
        [TRAINED._replace(every=every) for every in (10, 30, 100, 300)], TRAINED, [TRAINED._replace(every=10), TRAINED]
    ),
}


def main() -> None:
    """Trains what is missing, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=list(PARTS))
    parser.add_argument('--seeds', type=int, default=3, help='of one federation of each part')
    parser.add_argument('--from', dest='earlier', type=Path, default=None, help='a .json file to continue')
    parser.add_argument('--out', type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = json.loads(arguments.earlier.read_text())['rows'] if arguments.earlier else []
    result = circumstances() | {'versions': versions(), 'tokens': TOKENS, 'rows': rows}

    def loss(case: Case) -> float:
        for row in rows:
            if Case(**row['case']) == case:
                return row['val_loss']
        row = train(case)
        rows.append({'case': case._asdict(), **row})
        print(json.dumps(rows[-1]), flush=True)
        with contextlib.redirect_stdout(None):
            write_result(result, table, arguments.out, 'federation')
        return row['val_loss']

    def best(case: Case) -> int:
        """The best power of two, with worse ones on both sides of it."""
        powers = {power: loss(case._replace(power=power)) for power in POWERS}
        while (power := min(powers, key=powers.__getitem__)) in (min(powers), max(powers)):
            for near in (power - 1, power + 1):
                powers[near] = loss(case._replace(power=near))
        return power

    for part in (PARTS[name] for name in arguments.parts):
        power = best(part.tuned)
        for case in part.cases:
            loss(case._replace(power=power))
        alone = {case.alone: best(case.alone) for case in part.cases}
        for case in part.repeated:
            power = best(case)
            for seed in range(1, arguments.seeds):
                loss(case.alone._replace(power=alone[case.alone], seed=seed))
                loss(case._replace(power=power, seed=seed))


def train(case: Case) -> dict[str, Any]:
    """The loss on held-out text after the last step, and what an island has sent and read, in bytes."""
    run = prepared(case)
    start = started(case.start, case.seed) if case.start else None
    with jax.set_mesh(run.mesh):
        state = init_state(run.recipe, case.seed)
        state = state if start is None else state._replace(weights=arrays_of(start, state.weights))
        weights, sent, read = Islands(run, case, state).train() if case.every else (trained_alone(run, state), 0, 0)
        loss = Evaluation(run).losses(weights)['val_loss']
    return {'val_loss': loss, 'sent': sent, 'read': read}


@functools.cache
def started(steps: int, seed: int) -> dict[str, np.ndarray]:
    """The weights after the run that comes before a federation, which has other rows and a constant learning rate."""
    run = prepared(Case(1, 0, power=START_POWER, seed=seed + 1000, steps=steps), 'constant')
    with jax.set_mesh(run.mesh):
        return numpy_of(trained_alone(run, init_state(run.recipe, seed)))


def prepared(case: Case, schedule: str = 'cosine') -> Run:
    """The run whose batches have the rows of all islands."""
    changes = [
        MODEL,
        'data.vocab_size=1024',
        f'batch={{tokens: {case.islands * TOKENS}, sequence_length: {LENGTH}}}',
        'eval.batches=16',
        *MESH,
        'name=federation',
        f'steps={case.steps}',
        f'seed={case.seed}',
        f'optimizer={{name: adamw, learning_rate: {2.0**case.power}, weight_decay: 0.1}}',
        f'schedule={{name: {schedule}, warmup: {min(WARMUP, case.steps // 4)}}}',
    ]
    return prepare(load('configs/quickstart.yaml', changes), lambda _: None)


def step_of(run: Run) -> Any:
    """The step of one run or of an island. It is compiled once for each batch size."""
    schedule = build('schedule', run.config.schedule, run.config.steps)
    rate = run.config.optimizer.learning_rate
    recipe = run.recipe._replace(rate=lambda number: rate * schedule(number), accumulation=1)
    return jax.jit(lambda state, batch: training_step(recipe)(state, batch)[:2], donate_argnums=0)


def trained_alone(run: Run, state: TrainState) -> Any:
    """The weights after one run."""
    step = step_of(run)
    with contextlib.closing(run.batches(range(run.config.steps), print)) as batches:
        for batch in batches:
            state, _ = step(state, batch)
    return state.weights


class Islands:
    """The islands of a federation, and what they have in common: the weights theta, and their momentum."""

    def __init__(self, run: Run, case: Case, state: TrainState):
        self.run, self.case = run, case
        self.states = [jax.tree.map(jnp.copy, state) for _ in range(case.islands)]
        self.theta = numpy_of(self.states[0].weights)
        self.momentum = {name: np.zeros_like(x) for name, x in self.theta.items()}
        stacked = {name: range(len(x)) for name, x in self.theta.items() if name.startswith('layers.')}
        shapes = {name: x.shape for name, x in self.theta.items()}
        self.fragments = fragments(shapes, case.fragments, stacked)
        self.residuals = [{name: np.zeros_like(x) for name, x in self.theta.items()} for _ in self.states]
        self.sent = self.read = 0

    def train(self) -> tuple[Any, int, int]:
        """theta after the last step, and the bytes that an island has sent and read."""
        step, steps, n = step_of(self.run), self.case.steps, self.case.islands
        with contextlib.closing(self.run.batches(range(steps), print)) as batches:
            taken: dict[int, int] = {}  # the fragment that is taken after a step
            apart = self.case.every // self.case.fragments  # steps between two rounds
            for number, batch in enumerate(batches, 1):
                for i, state in enumerate(self.states):
                    share = jax.tree.map(lambda x, i=i: x[i::n], batch)
                    self.states[i], _ = step(state, share)
                if number == steps:
                    for fragment in range(self.case.fragments):
                        self._close(fragment)
                elif number % apart == 0:
                    taken[number + self.case.delay] = (number // apart - 1) % self.case.fragments
                    self._close(taken[number + self.case.delay])
                if number in taken:
                    self._take(taken[number])
        like = self.states[0].weights
        return arrays_of(self.theta, like), self.sent, self.read

    def _close(self, fragment: int) -> None:
        """Changes theta by the mean of what the islands have learned in a fragment."""
        weights = [numpy_of(state.weights) for state in self.states]
        for name, rows in self._parts(fragment):
            theta = self.theta[name][rows]
            total = np.zeros_like(theta)
            for i, share in enumerate(shares_of([1] * self.case.islands)):
                difference = theta - weights[i][name][rows]
                content, left = encode(difference, self.case.encoding, self.residuals[i][name][rows])
                if left is not None:
                    self.residuals[i][name][rows] = left
                decoded = decode(content, self.case.encoding, difference.size).reshape(difference.shape)
                add_weighted(total, share, decoded)
            size = encoded_size(theta.size, self.case.encoding)
            self.sent, self.read = self.sent + size, self.read + (self.case.islands - 1) * size
            new, momentum = theta.copy(), self.momentum[name][rows].copy()
            nesterov(new, momentum, total, self.case.outer_rate, self.case.outer_momentum)
            self.theta[name][rows], self.momentum[name][rows] = new, momentum

    def _take(self, fragment: int) -> None:
        """All islands get the weights of a fragment: theta, or half of it if they have trained on meanwhile."""
        for i, state in enumerate(self.states):
            weights = numpy_of(state.weights)
            for name, rows in self._parts(fragment):
                own = weights[name][rows].copy()
                mix(own, self.theta[name][rows], 0.5 if self.case.delay else 0.0)
                weights[name][rows] = own
            self.states[i] = state._replace(weights=arrays_of(weights, state.weights))

    def _parts(self, fragment: int) -> Iterator[tuple[str, Any]]:
        """Name and rows of each part of a fragment."""
        for name, runs in self.fragments[fragment].items():
            if runs is None:
                yield name, ...
            else:
                yield from ((name, slice(*one)) for one in runs)


def numpy_of(weights: Any) -> dict[str, np.ndarray]:
    """Copies of the weights, by dotted name."""
    return {name: np.array(leaf, np.float32) for name, leaf in named_leaves(weights)}


def arrays_of(weights: dict[str, np.ndarray], like: Any) -> Any:
    """Copies of the weights, with the structure and the shardings of `like`."""
    arrays = [jax.device_put(weights[name].copy(), leaf.sharding) for name, leaf in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    losses = {Case(**row['case']): row['val_loss'] for row in result['rows']}
    alone: dict[Case, float] = {}
    for case, loss in losses.items():
        if not case.every:
            alone[case.alone] = min(loss, alone.get(case.alone, loss))
    lines = [
        f'{result["tokens"]:,} tokens in each step of each island.',
        '',
        '| steps | earlier steps | islands | every | encoding | fragments | delay | rate | seed | val_loss | one run '
        '| difference | MB sent by an island | MB read |',
        '|---|---|---|---|---|---|---|---|---|---|---|---|---|---|',
    ]
    in_order = sorted(result['rows'], key=lambda row: key_of(Case(**row['case'])))
    for case, row in ((Case(**row['case']), row) for row in in_order):
        cells = [f'{case.steps:,}', f'{case.start:,}', case.islands, case.every or 'one run']
        cells += [case.encoding, case.fragments, case.delay] if case.every else [''] * 3
        cells += [f'2^{case.power}', case.seed, f'{row["val_loss"]:.4f}']
        best = alone.get(case.alone) if case.every else None
        cells += ['', ''] if best is None else [f'{best:.4f}', f'{row["val_loss"] / best - 1:+.2%}']
        cells += [f'{row[key] / 1e6:.2f}' if case.every else '' for key in ('sent', 'read')]
        lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
    for name, part in PARTS.items():
        for case in part.repeated:
            ratios = ratios_of(losses, alone, case)
            if len(ratios) > 1:
                spread = f'{statistics.mean(ratios):+.2%} ± {statistics.stdev(ratios):.2%} over {len(ratios)} seeds'
                federation = f'{case.islands} islands, every {case.every}, {case.encoding}, {case.fragments} fragments'
                lines += ['', f'{name}: {federation}: {spread}.']
    lines += [
        '',
        f'Command: `{result["command"]}`, {result["date"]}, {result["processor"]}, {result["cores"]} cores.',
        f'Versions: {json.dumps(result["versions"])}.',
    ]
    return '\n'.join(lines) + '\n'


def key_of(case: Case) -> Any:
    """The place of a case in the table: one run comes last."""
    return case.start, case.steps, not case.every, case


def ratios_of(losses: dict[Case, float], alone: dict[Case, float], case: Case) -> list[float]:
    """How much larger the loss of a federation is than that of one run, by seed, at its best learning rate."""
    best: dict[int, float] = {}
    for other, loss in losses.items():
        if other._replace(power=case.power, seed=case.seed) == case and other.alone in alone:
            best[other.seed] = min(loss, best.get(other.seed, loss))
    return [best[seed] / alone[case._replace(seed=seed).alone] - 1 for seed in sorted(best)]


if __name__ == '__main__':
    main()
