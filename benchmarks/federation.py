"""Trains islands that meet in rounds, and compares their loss with one run of the same tokens.

    uv run python benchmarks/federation.py                               # everything, an hour on two cores
    uv run python benchmarks/federation.py --parts islands --seeds 1     # one table
    uv run python benchmarks/federation.py --from results/federation-DATE.json

The islands are simulated in one process: their steps, the encoding of their differences and the outer optimizer are
those of pretrax, but nothing is sent. What a federation would send is computed from the encoded sizes. One run of the
same tokens has a batch as large as those of all islands together, as in Douillard et al. 2023, arXiv:2311.08105; the
best of several learning rates of it is taken, and of the islands. Each island has the outer settings of the paper, rate
0.7 and momentum 0.9. `streaming` has fragments as Douillard et al. 2025, arXiv:2501.18512.

Every run that has ended is in results/federation-DATE.json at once; `--from` takes over those of an earlier file.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
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
from pretrax.train.state import init_state
from pretrax.train.step import training_step

RESULTS = Path(__file__).parent / 'results'
STEPS, TOKENS, LENGTH = 1200, 1024, 128  # TOKENS: of an island in a step
MESH = ['mesh.r=1', 'mesh.d=1']
MODEL = 'model={n_layers: 4, d_model: 64, attention: {n_heads: 2, n_kv_heads: 1}}'
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
POWERS = (-9, -8, -7)  # of two: the learning rates that are tried first
TUNED = 100  # the interval with which the learning rate of the islands is chosen


class Case(NamedTuple):
    """A federation. `every`: steps between two rounds of a fragment; 0: one run with the batches of all islands."""

    islands: int
    every: int
    encoding: Encoding = 'f32'
    fragments: int = 1
    delay: int = 0
    power: int = 0  # the learning rate is 2^power
    seed: int = 0


def cases_of(part: str) -> list[Case]:
    """The federations of a table, without learning rate and seed."""
    return {
        'islands': [Case(n, every) for n in (2, 4, 8) for every in (10, 30, 100, 300)],
        'encodings': [Case(4, 100), Case(4, 100, 'bf16'), Case(4, 100, 'int8'), Case(4, 100, 'int4')],
        'streaming': [Case(4, 100, 'f32', 4, delay) for delay in (0, 5)] + [Case(4, 100, 'int4', 4, 5)],
    }[part]


def main() -> None:
    """Trains what is missing, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--parts', nargs='+', default=['islands', 'encodings', 'streaming'])
    parser.add_argument('--seeds', type=int, default=3, help='of 4 islands that meet every 100 steps; else 1')
    parser.add_argument('--steps', type=int, default=STEPS)
    parser.add_argument('--from', dest='earlier', type=Path, default=None, help='a .json file to continue')
    parser.add_argument('--out', type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = json.loads(arguments.earlier.read_text())['rows'] if arguments.earlier else []
    result = circumstances() | {'versions': versions(), 'steps': arguments.steps, 'tokens': TOKENS, 'rows': rows}
    trainer = Trainer(arguments.steps)

    def loss(case: Case) -> float:
        for row in rows:
            if Case(**row['case']) == case:
                return row['val_loss']
        row = trainer.train(case)
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

    cases = list(dict.fromkeys(case for part in arguments.parts for case in cases_of(part)))
    inner = best(Case(4, TUNED))
    for case in cases:
        loss(case._replace(power=inner))
    for n in sorted({case.islands for case in cases}):
        result.setdefault('best_alone', {})[str(n)] = best(Case(n, 0))
    for seed in range(1, arguments.seeds):
        loss(Case(4, 0, power=result['best_alone']['4'], seed=seed))
        for case in (Case(4, TUNED), Case(4, TUNED, 'int4', 4, 5)):
            loss(case._replace(power=inner, seed=seed))
    write_result(result, table, arguments.out, 'federation')


class Trainer:
    """Trains federations of one model. A step is compiled once per batch size: the learning rate is an argument."""

    def __init__(self, steps: int):
        self._steps = steps

    def train(self, case: Case) -> dict[str, Any]:
        """The loss on held-out text after the last step, and what an island has sent and read, in bytes."""
        run = self._prepare(case)
        with jax.set_mesh(run.mesh):
            federation = Islands(run, case).train(self._step(run)) if case.every else None
            weights, sent, read = federation or (self._alone(run, case), 0, 0)
            loss = Evaluation(run).losses(weights)['val_loss']
        return {'val_loss': loss, 'sent': sent, 'read': read}

    def _prepare(self, case: Case) -> Run:
        changes = [
            MODEL,
            'data.vocab_size=1024',
            f'batch={{tokens: {case.islands * TOKENS}, sequence_length: {LENGTH}}}',
            'eval.batches=16',
            *MESH,
            'name=federation',
            f'steps={self._steps}',
            f'seed={case.seed}',
            f'optimizer={{name: adamw, learning_rate: {2.0**case.power}, weight_decay: 0.1}}',
            f'schedule={{name: cosine, warmup: {self._steps // 12}}}',
        ]
        return prepare(load('configs/quickstart.yaml', changes), lambda _: None)

    def _step(self, run: Run) -> Any:
        schedule = build('schedule', run.config.schedule, run.config.steps)
        rate = run.config.optimizer.learning_rate
        recipe = run.recipe._replace(rate=lambda number: rate * schedule(number), accumulation=1)
        return jax.jit(lambda state, batch: training_step(recipe)(state, batch)[:2], donate_argnums=0)

    def _alone(self, run: Run, case: Case) -> Any:
        step, state = self._step(run), init_state(run.recipe, case.seed)
        with contextlib.closing(run.batches(range(self._steps), print)) as batches:
            for batch in batches:
                state, _ = step(state, batch)
        return state.weights


class Islands:
    """The islands of a federation, and what they have in common: the weights theta, and their momentum."""

    def __init__(self, run: Run, case: Case):
        self.run, self.case = run, case
        self.states = [init_state(run.recipe, case.seed) for _ in range(case.islands)]
        self.theta = numpy_of(self.states[0].weights)
        self.momentum = {name: np.zeros_like(x) for name, x in self.theta.items()}
        stacked = {name: range(len(x)) for name, x in self.theta.items() if name.startswith('layers.')}
        shapes = {name: x.shape for name, x in self.theta.items()}
        self.fragments = fragments(shapes, case.fragments, stacked)
        self.residuals = [{name: np.zeros_like(x) for name, x in self.theta.items()} for _ in self.states]
        self.sent = self.read = 0

    def train(self, step: Any) -> tuple[Any, int, int]:
        """theta after the last step, and the bytes that an island has sent and read."""
        steps, n = self.run.config.steps, self.case.islands
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
            nesterov(new, momentum, total, OUTER_RATE, OUTER_MOMENTUM)
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
    rows = {Case(**row['case']): row for row in result['rows']}
    alone: dict[tuple[int, int], float] = {}
    for case, row in rows.items():
        if not case.every:
            key = case.islands, case.seed
            alone[key] = min(alone.get(key, row['val_loss']), row['val_loss'])
    lines = [
        f'{result["steps"]:,} steps of {result["tokens"]:,} tokens in each island.',
        '',
        '| islands | every | encoding | fragments | delay | rate | seed | val_loss | one run | difference '
        '| MB sent by an island | MB read |',
        '|---|---|---|---|---|---|---|---|---|---|---|---|',
    ]
    for case, row in sorted(rows.items(), key=lambda item: (not item[0].every, item[0])):
        best = alone.get((case.islands, case.seed)) if case.every else None
        of_one = ('', '') if best is None else (f'{best:.4f}', f'{row["val_loss"] / best - 1:+.2%}')
        cells = [
            case.islands,
            case.every or 'one run',
            case.encoding if case.every else '',
            case.fragments if case.every else '',
            case.delay if case.every else '',
            f'2^{case.power}',
            case.seed,
            f'{row["val_loss"]:.4f}',
            *of_one,
            f'{row["sent"] / 1e6:.2f}' if case.every else '',
            f'{row["read"] / 1e6:.2f}' if case.every else '',
        ]
        lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
    for name, case in (('f32', Case(4, TUNED)), ('int4, 4 fragments, delay 5', Case(4, TUNED, 'int4', 4, 5))):
        ratios = ratios_of(rows, alone, case)
        if len(ratios) > 1:
            spread = f'{statistics.mean(ratios):+.2%} ± {statistics.stdev(ratios):.2%} over {len(ratios)} seeds'
            lines += ['', f'4 islands, every {TUNED}, {name}: {spread}.']
    lines += [
        '',
        f'Command: `{result["command"]}`, {result["date"]}, {result["processor"]}, {result["cores"]} cores.',
        f'Versions: {json.dumps(result["versions"])}.',
    ]
    return '\n'.join(lines) + '\n'


def ratios_of(rows: dict[Case, Any], alone: dict[tuple[int, int], float], case: Case) -> list[float]:
    """How much larger the loss of a federation is than that of one run, by seed, at its best learning rate."""
    losses: dict[int, float] = {}
    for other, row in rows.items():
        if other._replace(power=case.power, seed=case.seed) == case and (case.islands, other.seed) in alone:
            losses[other.seed] = min(row['val_loss'], losses.get(other.seed, row['val_loss']))
    return [losses[seed] / alone[case.islands, seed] - 1 for seed in sorted(losses)]


if __name__ == '__main__':
    main()
