"""Measures tokens/s of the engine on this CPU, compared with `generate` of transformers on the same weights.

    uv run python benchmarks/serve.py --torch-python PATH     # a Python with torch and transformers

There are three parts. Everything that is compared alternates in one run, and the ratios are medians over rounds.

- decode: GPT-2 124M and a Llama of 1.3M parameters, 1 and 8 sequences, weights in f32 and int8. transformers is always
  f32, with the faster of one thread and a thread on every core. Both sides read prompts of 16 tokens and write
  greedily. In f32 the first tokens must be the same. Bytes of weights read for each token, times tokens/s, are given as
  a share of the bandwidth of a copy.
- batching: requests of exponentially distributed lengths, 8 slots. Continuous: a request starts when a slot is free.
  Static: 8 requests start when all 8 before them have ended.
- latency: the time from the end of an engine's block to the arrival of its tokens at 64 clients that stream, with a
  stub engine that writes a token in every slot every 20 ms.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from machine import QUIET, busy
from result_files import circumstances, write_result
from torch_environment import BenchmarkError, has_torch

import pretrax
from pretrax.huggingface.export import export
from pretrax.infer.engine import Engine
from pretrax.infer.programs import EngineOptions, programs_of
from pretrax.infer.request import Request
from pretrax.infer.sampling_settings import Sampling
from pretrax.infer.weights import WeightKind
from pretrax.model.axes import AXES
from pretrax.model.choices import TransformerOptions
from pretrax.model.option_names import nest
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.system.cores import usable_cores
from pretrax.system.process_memory import ask_for_kept_memory

HERE = Path(__file__).resolve().parent
PROMPT = 16
SAME = 4  # tokens that both sides must choose alike
MODELS = {
    '1.3M': ({'family': 'llama', 'n_layers': 4, 'd_model': 128, 'n_heads': 4, 'd_ff': 448}, 1536),
    '124M': ({'family': 'gpt2', 'n_layers': 12, 'd_model': 768, 'n_heads': 12}, 50_257),
}
TARGETS = {
    '124M, batch 1, f32': 1.1, '124M, batch 8, f32': 1.5, '124M, batch 1, int8': 2.0,
    'continuous / static': 1.8,
}  # fmt: skip
KINDS: dict[str, WeightKind] = {'f32': 'compute', 'int8': 'int8'}


@dataclasses.dataclass
class Decoder:
    """A model with random weights, and its engines."""

    model: Transformer
    weights: Any
    mesh: Any

    @classmethod
    def create(cls, options: dict[str, Any], vocab_size: int) -> 'Decoder':
        mesh = jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=jax.devices()[:1])
        request = ModelRequest(vocab_size, 1024, None, jnp.float32, 'cpu', dict(mesh.shape))
        model = Transformer(request, options=TransformerOptions(**nest(options)))
        with jax.set_mesh(mesh):
            return cls(model, jax.jit(model.init)(jax.random.key(0)), mesh)

    def engine(self, slots: int, length: int, kind: WeightKind = 'compute', block: int = 8) -> Engine:
        options = EngineOptions(max_length=length, slots=slots, chunk=128, block=block, weights=kind)
        return Engine(programs_of(self.model, self.mesh, options), self.weights)

    # What an export reads

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_leaves_with_path(self.weights)
        return {jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(w) for path, w in leaves}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: w.shape for path, w in self.arrays.items()}

    def pieces(self, path: str) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        yield (), self.arrays[path]

    def bytes_per_step(self, kind: WeightKind) -> int:
        """Bytes of weights that a step multiplies by, whatever the number of sequences."""
        tables = self.model.arch.padded_vocab_size * self.model.arch.d_model
        positions = 0 if self.weights.positions is None else self.weights.positions.size
        untied = 0 if self.weights.unembed is None else tables
        total = sum(w.size for w in jax.tree.leaves(self.weights)) - positions - untied
        return total * (1 if kind == 'int8' else 4)


class Peer:
    """transformers, in a process of its own. It sleeps unless it is asked."""

    def __init__(self, python: Path, checkpoint: Path):
        command = [str(python), str(HERE / 'torch_generate.py'), str(checkpoint)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._answer()

    def write(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens: the faster of one thread and a thread on every core, which wait for each other."""
        assert self.process.stdin is not None
        answers = []
        for threads in {1, usable_cores()}:
            request = {'prompts': prompts, 'tokens': tokens, 'threads': threads}
            self.process.stdin.write(json.dumps(request) + '\n')
            self.process.stdin.flush()
            answers.append(self._answer())
        fastest = min(answers, key=lambda answer: answer['seconds'])
        return fastest['seconds'], fastest['tokens']

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f'torch_generate.py failed with exit code {self.process.wait()}')
        return json.loads(line)

    def close(self) -> None:
        with self.process:  # closes its pipes, and waits
            pass


def write(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[list[int]]]:
    """Answers of given lengths: seconds, and the tokens."""
    greedy = Sampling(temperature=0)
    start = time.perf_counter()
    numbers = [
        engine.add(Request(prompt=tuple(prompt), max_tokens=length, sampling=greedy))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.idle:
        for update in engine.step():
            found[update.number] += [token.id for token in update.tokens]
    return time.perf_counter() - start, [found[number] for number in numbers]


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes per second that a copy reads and writes, with a thread on every core."""
    n = usable_cores()
    pairs = [(np.ones(megabytes * 2**17 // n), np.zeros(megabytes * 2**17 // n)) for _ in range(n)]

    def copy() -> float:
        threads = [threading.Thread(target=np.copyto, args=(b, a)) for a, b in pairs]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 2 * sum(a.nbytes for a, _ in pairs) / (time.perf_counter() - start)

    return max(copy() for _ in range(3))


def decode(name: str, python: Path, rounds: int, tokens: int, report: list[str]) -> list[dict[str, Any]]:
    """Tokens/s of one model in every setting."""
    options, vocab_size = MODELS[name]
    decoder, rng, rows = Decoder.create(options, vocab_size), np.random.default_rng(0), []
    with contextlib.ExitStack() as stack:
        checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory())) / name
        export(
            decoder, decoder.model.arch, decoder.weights, checkpoint, dtype='F32', family=options['family'],
            say=lambda _: None,
        )  # fmt: skip
        peer = Peer(python, checkpoint)
        stack.callback(peer.close)
        report[:] = [f'{package} {version}' for package, version in peer.versions.items()]
        for batch in (1, 8):
            prompts = rng.integers(0, vocab_size, (batch, PROMPT)).tolist()
            engines = {dtype: decoder.engine(batch, PROMPT + tokens, kind) for dtype, kind in KINDS.items()}
            speeds: dict[str, list[float]] = {side: [] for side in (*engines, 'transformers')}
            copies, elsewhere = [], []
            _, theirs = peer.write(prompts, SAME)
            _, ours = write(engines['f32'], prompts, [SAME] * batch)
            if ours != theirs:
                raise BenchmarkError(f'{name}: pretrax and transformers do not write the same tokens: {ours}, {theirs}')
            for _ in range(rounds):
                elsewhere.append(busy())
                copies.append(copy_bandwidth())
                speeds['transformers'].append(batch * tokens / peer.write(prompts, tokens)[0])
                for dtype, engine in engines.items():
                    speeds[dtype].append(batch * tokens / write(engine, prompts, [tokens] * batch)[0])
            for dtype, kind in KINDS.items():
                # One ratio per round, because a slow round slows both sides.
                ratios = [a / b for a, b in zip(speeds[dtype], speeds['transformers'], strict=True)]
                read = [speed / batch * decoder.bytes_per_step(kind) for speed in speeds[dtype]]
                rows.append({
                    'name': f'{name}, batch {batch}, {dtype}', 'tokens_per_second': statistics.median(speeds[dtype]),
                    'transformers': statistics.median(speeds['transformers']), 'ratio': statistics.median(ratios),
                    'best_ratio': max(speeds[dtype]) / max(speeds['transformers']),
                    'of_copy': statistics.median(a / b for a, b in zip(read, copies, strict=True)),
                    'best_of_copy': max(read) / max(copies),
                    'copy_gigabytes_per_second': statistics.median(copies) / 1e9, 'busy': statistics.median(elsewhere),
                    'rounds': speeds,
                })  # fmt: skip
                print(f'  {describe(rows[-1])}', flush=True)
    return rows


def batching(rounds: int, requests: int, mean: int, name: str = '1.3M') -> dict[str, Any]:
    """Tokens/s of continuous and of static batching."""
    options, vocab_size = MODELS[name]
    slots, longest = 8, 6 * mean
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.exponential(mean, requests).astype(int), 1, longest).tolist()
    prompts = rng.integers(0, vocab_size, (requests, PROMPT)).tolist()
    engine = Decoder.create(options, vocab_size).engine(slots, PROMPT + longest, block=8)
    groups = [slice(start, start + slots) for start in range(0, requests, slots)]
    ratios, speeds = [], []
    for _ in range(rounds):
        static = sum(write(engine, prompts[group], lengths[group])[0] for group in groups)
        continuous = write(engine, prompts, lengths)[0]
        ratios.append(static / continuous)
        speeds.append(sum(lengths) / continuous)
    ideal = sum(max(lengths[group]) for group in groups) * slots / sum(lengths)
    return {
        'name': 'continuous / static', 'ratio': statistics.median(ratios),
        'tokens_per_second': statistics.median(speeds),
        'ideal': ideal, 'requests': requests, 'mean_length': mean,
    }  # fmt: skip


async def stream(port: int, number: int, tokens: int) -> list[float]:
    """When the tokens of one answer arrived."""
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    body = json.dumps({'model': 'stub', 'prompt': [number, number], 'max_tokens': tokens, 'stream': True})
    head = 'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    head += f'Content-Length: {len(body)}\r\n'
    writer.write(f'{head}Connection: close\r\n\r\n{body}'.encode())
    arrived = []
    while line := await reader.readline():
        if line.startswith(b'data: {') and b'"text":""' not in line and b'"text": ""' not in line:
            arrived.append(time.perf_counter())
    writer.close()
    return arrived


def latency(streams: int = 64, tokens: int = 100, seconds: float = 0.02) -> dict[str, Any]:
    """Milliseconds from a block's end to the arrival of its tokens. The server and the clients are two processes."""
    command = [sys.executable, str(HERE / 'serve_stub.py'), str(streams), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())

        async def clients() -> list[list[float]]:
            return await asyncio.gather(*(stream(port, number, tokens) for number in range(streams)))

        asyncio.run(clients())  # warm-up
        arrived = asyncio.run(clients())
        server.stdin.close()
        ended = json.loads(server.stdout.readline())
    added = []
    for number, times in enumerate(arrived):
        if len(times) != tokens:
            raise BenchmarkError(f'stream {number} brought {len(times)} tokens instead of {tokens}')
        added += [1000 * (b - a) for a, b in zip(ended[str(number)][-tokens:], times, strict=True)]
    shares = np.percentile(added, [50, 99])
    return {'streams': streams, 'tokens': len(added), 'median_ms': float(shares[0]), 'p99_ms': float(shares[1])}


def describe(row: dict[str, Any]) -> str:
    return (
        f'{row["name"]}: {row["tokens_per_second"]:,.1f} tokens/s, transformers {row["transformers"]:,.1f}, '
        f'{row["ratio"]:.2f}x; {row["of_copy"]:.0%} of a copy'
    )


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f'# Serving on a CPU, {result["date"]}', '', f'`{result["command"]}`', '',
        f'{result["processor"]}, {result["cores"]} cores; {", ".join(result["versions"])}.', '',
    ]  # fmt: skip
    if result['busy'] > QUIET:
        lines += [
            f'**Other programs used {result["busy"]:.0%} of the cores. This slows PyTorch, whose threads wait for '
            'each other at '
            'every product, more than pretrax. "Best" compares the fastest round of each side.**', '',
        ]  # fmt: skip
    if rows := result.get('decode'):
        lines += [
            f'Tokens/s: median of {result["rounds"]} rounds of {result["tokens"]} tokens in each sequence.', '',
            '| | pretrax | transformers f32 | ratio | best | wanted | of a copy | best |',
            '|---|---|---|---|---|---|---|---|',
        ]  # fmt: skip
        for row in rows:
            wanted = f'{TARGETS[row["name"]]}x' if row['name'] in TARGETS else ''
            lines.append(
                f'| {row["name"]} | {row["tokens_per_second"]:,.1f} | {row["transformers"]:,.1f} | '
                f'{row["ratio"]:.2f}x | '
                f'{row["best_ratio"]:.2f}x | {wanted} | {row["of_copy"]:.0%} | {row["best_of_copy"]:.0%} |'
            )
        lines += ['', f'A copy: {rows[-1]["copy_gigabytes_per_second"]:.1f} GB/s, read and written.', '']
    if row := result.get('batching'):
        lines += [
            f'Continuous batching writes {row["ratio"]:.2f} times the tokens/s of static batching (wanted: '
            f'{TARGETS["continuous / static"]}; the lengths allow {row["ideal"]:.2f}): {row["requests"]} requests, '
            f'{row["mean_length"]} tokens on average, 8 slots.', '',
        ]  # fmt: skip
    if row := result.get('latency'):
        lines += [
            f'With {row["streams"]} streams, the server adds {row["median_ms"]:.1f} ms to a token (median), and '
            f'{row["p99_ms"]:.1f} ms (99th percentile; wanted: 5 ms). The clients share the cores.', '',
        ]  # fmt: skip
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--torch-python', help='a Python with torch and transformers; needed for the part decode')
    parser.add_argument(
        '--part', nargs='+', choices=['decode', 'batching', 'latency'], default=['decode', 'batching', 'latency']
    )
    parser.add_argument('--model', nargs='+', choices=MODELS, default=list(MODELS))
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--tokens', type=int, default=48, help='new tokens in each sequence')
    parser.add_argument('--out', type=Path, default=HERE / 'results', help='directory for serve-<date>.json and .md')
    options = parser.parse_args()
    if 'decode' in options.part and not (options.torch_python and has_torch(Path(options.torch_python).absolute())):
        raise BenchmarkError('give a Python with torch and transformers: --torch-python PATH')
    versions: list[str] = []
    result: dict[str, Any] = {
        **circumstances(), 'busy': busy(2), 'rounds': options.rounds, 'tokens': options.tokens,
    }  # fmt: skip
    if 'latency' in options.part:
        result['latency'] = latency()
    if 'batching' in options.part:
        result['batching'] = batching(min(options.rounds, 5), requests=96, mean=64)
    if 'decode' in options.part:
        python = Path(options.torch_python).absolute()
        rows = [decode(name, python, options.rounds, options.tokens, versions) for name in options.model]
        result['decode'] = [row for of_model in rows for row in of_model]
    result['versions'] = [f'pretrax {pretrax.__version__}', f'jax {jax.__version__}', *versions]
    write_result(result, table, options.out, 'serve')


if __name__ == '__main__':
    ask_for_kept_memory()  # as `pretrax serve` does
    try:
        main()
    except BenchmarkError as error:
        sys.exit(str(error))
