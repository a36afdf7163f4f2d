"""Compares tokens/s of pretrax, PyTorch and a plain Flax NNX module on this CPU, with the same small models.

    uv run python benchmarks/cpu.py [key=value ...]

The keys are those of pretrax's configuration, such as precision.compute=f32. The first model is nanoGPT's for CPUs: 4
layers, 128 wide, 4 heads, 64 tokens, batches of 12, no dropout. The second has GPT-2's vocabulary instead of 65
characters; the others are larger, longer, or of other families (`MODELS`). All sides start from the same weights and
read the same batches. Their first losses must agree before timing starts. Then they take turns.

The machine must be quiet: PyTorch's threads wait for each other actively, so they lose far more than XLA's on cores
that other programs use. The benchmark measures how busy the cores are while all sides sleep, and reports it with the
result. With --one-core, all sides take turns on one core, and a second is one of the processor, so that other programs
matter less; bf16 and f32 are then compared apart.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machine import QUIET, busy
from result_files import circumstances, write_result
from torch_environment import BenchmarkError, torch_python

import pretrax
from pretrax.data.batches.prefetch import prefetch
from pretrax.data.batches.source import DataRequest, HostBatch, Source, pack_rows
from pretrax.run.compiled_step import lower_step
from pretrax.system.cores import usable_cores
from pretrax.system.process_memory import ask_for_kept_memory, with_kept_memory
from pretrax.train.state import init_state

HERE = Path(__file__).resolve().parent
NEAR_TIES = 10  # times the tolerance with experts: a token between two of them may go to either
BATCHES = 32  # distinct batches, which repeat
CHECKED_STEPS = 6  # whose losses are compared
TOLERANCE = {'f32': 1e-4, 'bf16': 1e-2}  # nats; weights are f32 on all sides, only products differ
TORCH = {
    'PyTorch, eager f32': [],
    'PyTorch, eager bf16': ['--bf16'],
    'PyTorch, compile f32': ['--compile'],
    'PyTorch, compile bf16': ['--compile', '--bf16'],
}
KEPT = 'PyTorch, compile bf16, kept huge pages'  # not the default in PyTorch; measures their effect
NNX = 'Flax NNX, f32'
DEFAULT_PEER = 'PyTorch, eager f32'


@dataclasses.dataclass(frozen=True)
class Model:
    n_layers: int
    width: int
    heads: int
    length: int
    rows: int
    vocab_size: int
    family: str = 'gpt2'
    kv_heads: int | None = None  # None: as many as heads
    feed_forward: int | None = None  # None: that of the family
    experts: int = 0  # of which a token has two
    mixer: str | None = None  # 'delta' or 'mamba': layers with a state in the place of attention

    def __str__(self) -> str:
        more = ''.join([
            f', {self.kv_heads} for keys' * (self.kv_heads is not None),
            f', {self.experts} experts' * (self.experts > 0),
            f', {self.mixer} layers' * (self.mixer is not None),
        ])  # fmt: skip
        return (
            f'{self.family}, {self.n_layers} layers, {self.width} wide, {self.heads} heads{more}, L = {self.length}, '
            f'B = {self.rows}, V = {self.vocab_size:,}'
        )

    def options(self) -> dict[str, Any]:
        """The section `model` of pretrax's configuration."""
        sizes: dict[str, Any] = {'family': self.family, 'n_layers': self.n_layers, 'd_model': self.width}
        if self.mixer:
            sizes['layer_types'] = [self.mixer]
            sizes['recurrent'] = {'n_heads': self.heads, 'n_key_heads': self.kv_heads}
        else:
            sizes['attention'] = {'n_heads': self.heads, 'n_kv_heads': self.kv_heads}
        if self.feed_forward:
            sizes['feed_forward'] = {'d_ff': self.feed_forward}
        if self.experts:
            sizes['experts'] = {'n_experts': self.experts, 'router': {'balance_loss': 0.0}}
        return sizes


MODELS = {
    'small': Model(4, 128, 4, 64, 12, 65),
    'vocabulary': Model(4, 128, 4, 64, 12, 50_257),
    'larger': Model(6, 384, 6, 256, 8, 65),
    'wide': Model(8, 512, 8, 512, 2, 32_000),
    'long': Model(4, 256, 4, 4096, 1, 4_096),
    'llama': Model(12, 768, 12, 512, 1, 32_000, 'llama', 4, 2_048),
    'experts': Model(4, 256, 4, 512, 4, 4_096, 'mixtral', 2, 896, 8),
    'mamba2': Model(4, 256, 8, 512, 4, 4_096, 'mamba2', 1, mixer='mamba'),
    'delta': Model(4, 256, 4, 512, 4, 4_096, 'llama', 2, 704, mixer='delta'),
    'gpt2-124m': Model(12, 768, 12, 512, 1, 50_257),
}


@pretrax.register('data', 'random')
class RandomTokens(Source):
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


class Pretrax:
    """The step of pretrax with default settings, fed as in the training loop."""

    def __init__(self, model: Model, *overrides: str, clock: Callable[[], float] = time.perf_counter):
        self.model, self.clock = model, clock
        self.config = pretrax.config_from_values({
            'name': 'benchmark',
            'steps': 1_000_000,
            'model': model.options(),
            'data': {'name': 'random', 'vocab_size': model.vocab_size},
            'batch': {'tokens': model.rows * model.length, 'sequence_length': model.length},
            'optimizer': {'name': 'adamw', 'learning_rate': 3e-4, 'weight_decay': 0.1},
            'schedule': {'name': 'constant'},
        }, overrides)  # fmt: skip
        self.run = pretrax.prepare(self.config, report=lambda _: None)
        with jax.set_mesh(self.run.mesh):
            self.state = init_state(self.run.recipe, self.config.seed)
            self.step = lower_step(self.run).compile(compiler_options=self.run.compiler_options.values)
        self.number = 0

    def inputs(self) -> dict[str, np.ndarray]:
        """Weights, batches and settings, from which the other sides compute the same."""
        weights = {}
        for path, w in jax.tree_util.tree_leaves_with_path(jax.device_get(self.state.weights)):
            weights['weights.' + jax.tree_util.keystr(path, simple=True, separator='.')] = np.asarray(w)
        for table in {'weights.embed', 'weights.unembed'} & set(weights):  # without the padding
            weights[table] = weights[table][: self.run.source.vocab_size]
        rows = self.model.rows
        batches = [self.run.source.batch(step, slice(0, rows), rows) for step in range(BATCHES)]
        optimizer, arch = self.config.optimizer, self.run.recipe.model.arch
        assert arch is not None
        settings = {
            'family': self.model.family, 'n_heads': self.model.heads, 'n_layers': self.model.n_layers,
            'checked_steps': CHECKED_STEPS,
            'learning_rate': optimizer.learning_rate, 'weight_decay': optimizer.weight_decay,
            'clip_norm': optimizer.clip_norm, 'norm_eps': arch.norm.eps,
            'rope_base': arch.rope.base, **optimizer.options.model_dump(),
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
        """Trains for `seconds`. As in the training loop, it waits for a step after it has dispatched the next one."""
        first, before = self.number, None
        start, ticks = time.perf_counter(), self.clock()
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
            return Turn(self.number - first, self.clock() - ticks)


class Peer:
    """A process of another framework. It trains on request, and sleeps otherwise."""

    def __init__(self, *command: str | Path, kept_memory: bool = False):
        self.command = [str(part) for part in command]
        plain = {
            key: value for key, value in os.environ.items() if key != 'GLIBC_TUNABLES'
        }  # pretrax sets these for itself only
        self.process = subprocess.Popen(
            self.command, env=with_kept_memory(plain) if kept_memory else plain, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
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
            raise BenchmarkError(f'a process failed with exit code {self.process.wait()}: {shlex.join(self.command)}')
        return json.loads(line)

    def close(self) -> None:
        with self.process:  # closes its pipes, and waits
            pass


def compare(name: str, python: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Compares the sides on one model: the same start for all, then turns."""
    model, rounds, seconds = MODELS[name], asked.rounds, asked.seconds
    print(f'\n{name} ({model}): compiling')
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clock = time.process_time if asked.one_core else time.perf_counter
        exact = Pretrax(model, *asked.overrides, 'precision.compute=f32', clock=clock)
        ours = Pretrax(model, *asked.overrides, clock=clock)
        np.savez(directory / 'inputs.npz', allow_pickle=False, **ours.inputs())
        inputs, peers = directory / 'inputs.npz', {}
        threads = ['--threads', str(usable_cores()), *['--cpu-time'] * asked.one_core]
        for peer, flags in TORCH.items():
            peers[peer] = Peer(python, HERE / 'torch_gpt2.py', inputs, *threads, *flags)
            stack.callback(peers[peer].close)
        if not asked.one_core:
            flags = TORCH['PyTorch, compile bf16']
            peers[KEPT] = Peer(python, HERE / 'torch_gpt2.py', inputs, *threads, *flags, kept_memory=True)
            stack.callback(peers[KEPT].close)
        if not asked.one_core and model.family == 'gpt2':
            peers[NNX] = Peer(sys.executable, HERE / 'nnx_gpt2.py', inputs)
            stack.callback(peers[NNX].close)

        reference = peers[DEFAULT_PEER].losses
        losses = {'pretrax, f32': exact.first_losses(), 'pretrax': ours.first_losses()}
        losses |= {side: peer.losses for side, peer in peers.items()}
        for side, values in losses.items():
            difference = max(abs(a - b) for a, b in zip(values, reference, strict=True))
            allowed = TOLERANCE['f32' if side.endswith('f32') else 'bf16'] * (NEAR_TIES if model.experts else 1)
            print(f'  {side}: losses {values[0]:.4f} .. {values[-1]:.4f}, equal within {difference:.1e}')
            if not difference <= allowed:
                raise BenchmarkError(
                    f'{side} and {DEFAULT_PEER} do not train the same model: losses differ by {difference:.2e}'
                )

        runners = {'pretrax': ours, **({'pretrax, f32': exact} if asked.one_core else {}), **peers}
        speeds: dict[str, list[float]] = {side: [] for side in runners}
        for runner in runners.values():
            runner.turn(seconds / 2)  # warm-up
        elsewhere = []
        for number in range(rounds):
            elsewhere.append(busy())
            order = list(runners)
            for side in order[number % len(order) :] + order[: number % len(order)]:
                turn = runners[side].turn(seconds)
                speeds[side].append(turn.steps * model.rows * model.length / turn.seconds)
            print(f'  round {number + 1}/{rounds}: ' + ', '.join(f'{side} {v[-1]:,.0f}' for side, v in speeds.items()))
        report = [
            str(line)
            for line in ours.run.startup
            if line.topic in ('devices', 'process memory', 'compute', 'attention', 'layers')
        ]
        versions = {name: version for peer in peers.values() for name, version in peer.versions.items()}
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    peak, flops = ours.run.mfu.peak, ours.run.flops
    assert peak is not None
    assert flops is not None
    strongest = max(TORCH, key=medians.__getitem__)
    # One ratio per round, because a slow round slows both sides.
    own = {side: 'pretrax, f32' if asked.one_core and side.endswith('f32') else 'pretrax' for side in peers}
    ratios = {
        side: statistics.median(a / b for a, b in zip(speeds[own[side]], speeds[side], strict=True)) for side in peers
    }
    return {
        'name': name, 'model': str(model), 'tokens_per_second': medians, 'rounds': speeds, 'ratio': ratios,
        'strongest': strongest, 'limit': peak * ours.run.mesh.size / flops.causal, 'losses': losses,
        'busy': statistics.median(elsewhere), 'versions': versions,
        'pretrax_report': report,
    }  # fmt: skip


def warnings(result: dict[str, Any]) -> list[str]:
    """Reasons why the comparison is unfair."""
    worst = max(row['busy'] for row in result['rows'])
    if worst <= QUIET:
        return []
    return [
        f'Not a fair comparison: other programs used {worst:.0%} of the cores, which slows PyTorch more than pretrax.'
    ]


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
        'Without dropout:',
        '',
        *(f'- {row["name"]}: {row["model"]}' for row in result['rows']),
        '',
        f'Tokens/s: median of {result["rounds"]} rounds of {result["seconds"]:g} s; ratio: median of the ratios of '
        'each '
        'round.',
        '',
        '| model | | tokens/s | pretrax is faster by |',
        '|---|---|---|---|',
    ]
    for row in result['rows']:
        for name, speed in row['tokens_per_second'].items():
            ratio = f'{row["ratio"][name]:.2f}x' if name in row['ratio'] else ''
            note = ' (its fastest)' if name == row['strongest'] else ''
            lines.append(f'| {row["name"]} | {name}{note} | {speed:,.0f} | {ratio} |')
    lines += [
        '',
        'No step can be faster than the FLOPs per token allow, at the rate of the fastest XLA product on these cores:',
        '',
    ]
    for row in result['rows']:
        share = row['tokens_per_second']['pretrax'] / row['limit']
        reached = (
            f'pretrax reaches {share:.0%}' if share <= 1 else 'but pretrax is faster: that rate was measured too low'
        )
        lines.append(f'- {row["name"]}: at most {row["limit"]:,.0f} tokens/s; {reached}')
    for row in result['rows']:
        lines += [
            '',
            f'Chosen by pretrax, {row["name"]}:',
            '',
            *(f'- {line}' for line in row['pretrax_report']),
        ]
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description='Compare pretrax, PyTorch and Flax NNX with the same small GPT-2 models on the CPU'
    )
    parser.add_argument('overrides', nargs='*', metavar='key=value', help="of pretrax's configuration")
    parser.add_argument('--torch-python', help='a Python with PyTorch (default: creates .cache/torch-env)')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--seconds', type=float, default=2.0, help='duration of a turn')
    parser.add_argument('--one-core', action='store_true', help='take turns on one core, in seconds of the processor')
    parser.add_argument('--model', choices=MODELS, nargs='+', default=list(MODELS))
    parser.add_argument('--out', type=Path, default=HERE / 'results', help='directory for cpu-<date>.json and .md')
    arguments = parser.parse_args()
    python = torch_python(arguments.torch_python)
    if arguments.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = [compare(name, python, arguments) for name in arguments.model]
    result = {
        **circumstances(),
        'versions': {
            'pretrax': pretrax.__version__, 'jax': jax.__version__, 'jaxlib': importlib.metadata.version('jaxlib'),
            **rows[0]['versions'],
        },
        'rounds': arguments.rounds, 'seconds': arguments.seconds, 'rows': rows,
    }  # fmt: skip
    write_result(result, table, arguments.out, 'cpu')
    print()
    for row in rows:
        peer, best = DEFAULT_PEER, row['strongest']
        print(
            f'{row["name"]}: {row["ratio"][peer]:.2f} times the tokens/s of {peer}, '
            f'{row["ratio"][best]:.2f} times those of the fastest PyTorch ({best})'
            + (f', {row["ratio"][NNX]:.2f} times those of {NNX}' if NNX in row['ratio'] else '')
        )
    print(*warnings(result), sep='\n')


if __name__ == '__main__':
    ask_for_kept_memory()  # as `pretrax train` does
    try:
        main()
    except BenchmarkError as error:
        sys.exit(str(error))
