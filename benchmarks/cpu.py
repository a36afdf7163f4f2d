"""Tokens/s of pretrax and of PyTorch on the same small GPT-2, side by side in one run on this machine's CPU.

    uv run python benchmarks/cpu.py

The model is nanoGPT's for CPUs: 4 layers, 128 wide, 4 heads, 64 tokens, batches of 12, no dropout. Both sides start
from the same weights and read the same batches; before anything is timed, their first losses have to agree. Then they
take turns. A second row has GPT-2's vocabulary instead of 65 characters.

The machine has to be quiet: PyTorch's threads wait for each other actively, and on cores that other programs use they
lose far more than XLA's. How busy it was is measured while everyone here sleeps, and told with the result.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machine import QUIET, busy, cores, processor

import pretrax
from pretrax.data.prefetch import prefetch
from pretrax.data.source import DataRequest, HostBatch, pack_rows
from pretrax.train.step import init_state, make_step

HERE = Path(__file__).resolve().parent
TORCH = 'torch==2.13.0'
VOCABULARIES = (65, 50_257)
N_LAYERS, WIDTH, HEADS, LENGTH, ROWS = 4, 128, 4, 64, 12
BATCHES = 32  # different ones, again and again
CHECKED_STEPS = 10  # losses of these are compared
TOLERANCE = {'f32': 1e-4, 'bf16': 5e-3}  # nats; weights are f32 on both sides, only products differ
PEERS = {
    'PyTorch, eager f32': [],
    'PyTorch, eager bf16': ['--bf16'],
    'PyTorch, compile f32': ['--compile'],
    'PyTorch, compile bf16': ['--compile', '--bf16'],
}
DEFAULT_PEER = 'PyTorch, eager f32'


class BenchmarkError(Exception):
    """What the person at the terminal can mend."""


@pretrax.register('data', 'random')
class RandomTokens:
    """Batches of random tokens: speed does not depend on what is learned."""

    documents_per_row = 1

    def __init__(self, request: DataRequest, *, vocab_size: int):
        self.request, self.vocab_size = request, vocab_size

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        rng = np.random.default_rng((self.request.seed, step % BATCHES))
        tokens = rng.integers(0, self.vocab_size, (batch_rows, self.request.sequence_length + 1))[rows]
        return pack_rows(tokens, np.zeros(tokens.shape, bool))


@dataclasses.dataclass
class Turn:
    steps: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.steps * ROWS * LENGTH / self.seconds


class Ours:
    """The real step with the default settings, fed as the training loop feeds it."""

    def __init__(self, vocab_size: int, *overrides: str):
        self.config = pretrax.config_from_values({
            'name': 'benchmark',
            'steps': 1_000_000,
            'model': {'family': 'gpt2', 'n_layers': N_LAYERS, 'd_model': WIDTH, 'n_heads': HEADS},
            'data': {'name': 'random', 'vocab_size': vocab_size},
            'batch': {'tokens': ROWS * LENGTH, 'sequence_length': LENGTH},
            'optimizer': {'name': 'adamw', 'learning_rate': 1e-3, 'weight_decay': 0.1},
            'schedule': {'name': 'constant'},
        }, overrides)  # fmt: skip
        self.run = pretrax.prepare(self.config, say=lambda _: None)
        with jax.set_mesh(self.run.mesh):
            self.state = init_state(self.run.recipe, self.config.seed)
            self.step = make_step(self.run.recipe)
        self.number = 0

    def inputs(self) -> dict[str, np.ndarray]:
        """Everything the other side needs to compute the same: weights, batches, settings."""
        weights = {}
        for path, w in jax.tree_util.tree_leaves_with_path(jax.device_get(self.state.weights)):
            weights['weights.' + jax.tree_util.keystr(path, simple=True, separator='.')] = np.asarray(w)
        weights['weights.embed'] = weights['weights.embed'][: self.run.source.vocab_size]  # without the padding
        batches = [self.run.source.batch(step, slice(0, ROWS), ROWS) for step in range(BATCHES)]
        optimizer = self.config.optimizer
        settings = {
            'n_heads': HEADS, 'n_layers': N_LAYERS, 'checked_steps': CHECKED_STEPS,
            'learning_rate': optimizer.learning_rate, 'weight_decay': optimizer.weight_decay,
            'clip_norm': optimizer.clip_norm, **optimizer.options.model_dump(),
        }  # fmt: skip
        return weights | {
            'tokens': np.stack([batch.tokens for batch in batches]),
            'targets': np.stack([batch.targets for batch in batches]),
            'settings': np.array(json.dumps(settings)),
        }

    def first_losses(self) -> list[float]:
        losses = []
        with jax.set_mesh(self.run.mesh):
            for self.number in range(CHECKED_STEPS):
                self.state, metrics = self.step(self.state, self.run.batch(self.number))
                losses.append(float(metrics['loss']))
        self.number += 1
        return losses

    def turn(self, seconds: float) -> Turn:
        """Trains for so long. As in the loop, a step's end is awaited when the next one is on its way."""
        first, before = self.number, None
        start = time.perf_counter()
        with (
            jax.set_mesh(self.run.mesh),
            contextlib.closing(prefetch(self.run.batch, itertools.count(first))) as batches,
        ):
            for batch in batches:
                self.state, metrics = self.step(self.state, batch)
                self.number += 1
                if before is not None:
                    before['loss'].block_until_ready()
                if time.perf_counter() - start > seconds:
                    break
                before = metrics
            jax.block_until_ready(self.state)
            return Turn(self.number - first, time.perf_counter() - start)


class Theirs:
    """A process with PyTorch that trains when it is told to, and sleeps otherwise."""

    def __init__(self, python: Path, inputs: Path, flags: list[str]):
        self.command = [str(python), str(HERE / 'torch_gpt2.py'), str(inputs), '--threads', str(cores()), *flags]
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started = self.answer()
        self.losses, self.versions = started['losses'], started['versions']

    def turn(self, seconds: float) -> Turn:
        assert self.process.stdin is not None
        self.process.stdin.write(f'{seconds}\n')
        self.process.stdin.flush()
        return Turn(**self.answer())

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f'PyTorch stopped with exit code {self.process.wait()}: {shlex.join(self.command)}')
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(vocab_size: int, python: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """One row: the same start everywhere, then turns."""
    print(f'\nvocabulary {vocab_size:,}: compiling')
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        exact, ours = Ours(vocab_size, 'precision.compute=f32'), Ours(vocab_size)
        np.savez(directory / 'inputs.npz', allow_pickle=False, **ours.inputs())
        theirs = {}
        for name, flags in PEERS.items():
            theirs[name] = Theirs(python, directory / 'inputs.npz', flags)
            stack.callback(theirs[name].close)

        reference = theirs[DEFAULT_PEER].losses
        losses = {'pretrax, f32': exact.first_losses(), 'pretrax, default': ours.first_losses()}
        losses |= {name: peer.losses for name, peer in theirs.items()}
        for name, values in losses.items():
            difference = max(abs(a - b) for a, b in zip(values, reference, strict=True))
            allowed = TOLERANCE['f32' if name.endswith('f32') else 'bf16']
            print(f'  {name}: losses {values[0]:.4f} .. {values[-1]:.4f}, the same within {difference:.1e}')
            if not difference <= allowed:
                raise BenchmarkError(
                    f'{name} and {DEFAULT_PEER} do not train the same model: losses differ by {difference:.2e}'
                )

        runners = {'pretrax, default': ours, **theirs}
        speeds: dict[str, list[float]] = {name: [] for name in runners}
        for runner in runners.values():
            runner.turn(seconds / 2)  # warm-up
        elsewhere = []
        for number in range(rounds):
            elsewhere.append(busy())
            order = list(runners)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                speeds[name].append(runners[name].turn(seconds).tokens_per_second)
            print(f'  round {number + 1}/{rounds}: ' + ', '.join(f'{name} {v[-1]:,.0f}' for name, v in speeds.items()))
        report = [
            line for line in ours.run.report if line.split(':')[0] in ('devices', 'compute', 'attention', 'layers')
        ]
        versions = next(iter(theirs.values())).versions
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    strongest = max(PEERS, key=medians.__getitem__)
    # Of each round by itself: what slows a round slows both.
    ratios = {
        name: statistics.median(a / b for a, b in zip(speeds['pretrax, default'], speeds[name], strict=True))
        for name in PEERS
    }
    return {
        'vocabulary': vocab_size, 'tokens_per_second': medians, 'rounds': speeds, 'ratio': ratios,
        'strongest': strongest, 'busy': statistics.median(elsewhere), 'losses': losses, 'torch': versions,
        'pretrax_report': report,
    }  # fmt: skip


def torch_python(given: str | None) -> Path:
    """An interpreter that has PyTorch: the given one, or that of an environment made for it in .cache/torch-env."""

    def run(*command: str | Path) -> subprocess.CompletedProcess:
        # Elsewhere, so that the repository's .python-version, under which there may be no PyTorch, does not apply.
        return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)

    def has_torch(python: str | Path) -> bool:
        try:
            return run(python, '-c', 'import torch, numpy').returncode == 0
        except OSError:
            return False

    if given:
        if not has_torch(Path(given).absolute()):
            raise BenchmarkError(f'--torch-python {given} cannot import torch and numpy')
        return Path(given).absolute()
    home = HERE.parent / '.cache' / 'torch-env'
    python = home / 'bin' / 'python'
    if has_torch(python):
        return python
    tried = []
    for candidate in ('python3.11', 'python3.12', 'python3.13', 'python3'):
        print(f'making {home} with {candidate} and {TORCH}; this downloads PyTorch once')
        try:
            for command in (
                [candidate, '-m', 'venv', '--clear', home],
                [python, '-m', 'pip', 'install', TORCH, 'numpy'],
            ):
                done = run(*command)
                done.check_returncode()
        except FileNotFoundError:
            tried.append(f'{candidate}: not there')
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).strip().splitlines() or ['nothing said']
            tried.append(f'{candidate}: {said[-1]}')
        else:
            if has_torch(python):
                return python
            tried.append(f'{candidate}: installed, but import torch fails')
    raise BenchmarkError(
        '\n'.join([f'no Python here can install {TORCH}:', *tried, 'give one that has it: --torch-python PATH'])
    )


def warnings(result: dict[str, Any]) -> list[str]:
    """What makes the comparison unfair."""
    worst = max(row['busy'] for row in result['rows'])
    if worst <= QUIET:
        return []
    return [f'Not a fair comparison: other programs took {worst:.0%} of the cores, which costs PyTorch more.']


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f'# CPU, {result["date"]}',
        '',
        f'`{result["command"]}`',
        '',
        f'{result["processor"]}, {result["cores"]} cores; '
        + ', '.join(f'{name} {version}' for name, version in result['versions'].items())
        + '.',
        '',
        *(f'**{warning}**\n' for warning in warnings(result)),
        'GPT-2 of 4 layers, 128 wide, 4 heads, L = 64, B = 12, no dropout. Tokens/s: median of '
        f'{result["rounds"]} rounds of {result["seconds"]:g} s; ratio: median of the ratios of each round.',
        '',
        '| vocabulary | | tokens/s | pretrax is faster by |',
        '|---|---|---|---|',
    ]
    for row in result['rows']:
        for name, speed in row['tokens_per_second'].items():
            ratio = f'{row["ratio"][name]:.2f}x' if name in row['ratio'] else ''
            note = ' (its fastest)' if name == row['strongest'] else ''
            lines.append(f'| {row["vocabulary"]:,} | {name}{note} | {speed:,.0f} | {ratio} |')
    lines += ['', 'What pretrax chose by itself:', '', *(f'- {line}' for line in result['rows'][0]['pretrax_report'])]
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description='pretrax and PyTorch on the same small GPT-2 on the CPU')
    parser.add_argument('--torch-python', help='an interpreter with PyTorch; default: makes .cache/torch-env')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--seconds', type=float, default=2.0, help='of one turn')
    parser.add_argument('--vocabulary', type=int, nargs='+', default=VOCABULARIES)
    parser.add_argument('--out', type=Path, default=HERE / 'results', help='directory for cpu-<date>.json and .md')
    arguments = parser.parse_args()
    python = torch_python(arguments.torch_python)
    rows = [compare(size, python, arguments.rounds, arguments.seconds) for size in arguments.vocabulary]
    result = {
        'date': datetime.date.today().isoformat(),
        'command': shlex.join(['uv', 'run', 'python', 'benchmarks/cpu.py', *sys.argv[1:]]),
        'processor': processor(), 'cores': cores(),
        'versions': {
            'pretrax': pretrax.__version__, 'jax': jax.__version__, 'jaxlib': importlib.metadata.version('jaxlib'),
            'torch': rows[0]['torch']['torch'],
        },
        'rounds': arguments.rounds, 'seconds': arguments.seconds, 'rows': rows,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f'cpu-{result["date"]}'
    path.with_suffix('.json').write_text(json.dumps(result, indent=1) + '\n')
    path.with_suffix('.md').write_text(table(result))
    print(f'\n{table(result)}\nwritten to {path}.json and .md\n')
    for row in rows:
        peer, best = DEFAULT_PEER, row['strongest']
        print(
            f'vocabulary {row["vocabulary"]:,}: {row["ratio"][peer]:.2f} times the tokens/s of {peer}, '
            f'{row["ratio"][best]:.2f} times those of its fastest form ({best})'
        )
    print(*warnings(result), sep='\n')


if __name__ == '__main__':
    try:
        main()
    except BenchmarkError as error:
        sys.exit(str(error))
