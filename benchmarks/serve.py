"""Measures tokens/s of the engine on this CPU, compared with `generate` of transformers on the same weights.

    uv run python benchmarks/serve.py --torch-python PATH --one-core     # a Python with torch and transformers

There are four parts. Everything that is compared alternates in one run, and the ratios are medians over rounds. Times
are CPU seconds of the process, user and system, because other programs may use the cores; `wall` in the JSON has the
others. With --one-core, all sides take turns on one core.

- decode: GPT-2 124M and a Llama of 1.3M parameters, 1 and 8 sequences, in f32, in bf16 and with int8 weights.
  transformers has the same form: f32, bf16, or PyTorch's dynamic quantization to int8, with one thread or a thread on
  every core, whichever needs less. Both sides read prompts of 16 tokens and write greedily. In f32 the first tokens
  must be the same. Bytes of weights read for each token, times tokens/s, are given as a share of a copy on one core.
- streams: 1, 8, 32 and 64 streams in an engine with 64 slots. All prompts, of 16 tokens, come at once. Time to the
  first token, and 99th percentile between tokens. transformers writes the first token of the same prompts in one batch.
- batching: requests of exponentially distributed lengths, 8 slots. Continuous: a request starts when a slot is free.
  Static: 8 requests start when all 8 before them have ended, and all 8 rows are computed until then.
- latency: the time from the end of an engine's block to the arrival of its tokens at 64 clients that stream, with a
  stub engine that writes a token in every slot every 20 ms. It is wall time.
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
STEADY = 1e6  # seconds for which a block may go on: it has all its steps, however slow other programs make them
SAME = 4  # tokens that both sides must choose alike
MODELS = {
    '1.3M': ({'family': 'llama', 'n_layers': 4, 'd_model': 128, 'n_heads': 4, 'd_ff': 448}, 1536),
    '124M': ({'family': 'gpt2', 'n_layers': 12, 'd_model': 768, 'n_heads': 12}, 50_257),
}
TARGETS = {
    '124M, batch 1, f32': 1.5, '124M, batch 8, f32': 1.5, '124M, batch 1, bf16': 1.5, '124M, batch 8, bf16': 1.5,
    '124M, batch 1, int8': 1.0, '124M, batch 8, int8': 1.0,
    'continuous / static': 1.8,
}  # fmt: skip
KINDS: dict[str, WeightKind] = {'f32': 'compute', 'bf16': 'compute', 'int8': 'int8'}
REQUESTS = {'1.3M': (96, 64), '124M': (48, 32)}  # of the part batching, and their tokens on average
BYTES = {'f32': 4, 'bf16': 2, 'int8': 1}
STREAMS = 1, 8, 32, 64
PARTS = 'decode', 'streams', 'batching', 'latency'


@dataclasses.dataclass
class Decoder:
    """A model with random weights, and its engines."""

    model: Transformer
    weights: Any
    mesh: Any

    @classmethod
    def create(cls, options: dict[str, Any], vocab_size: int, dtype: Any = jnp.float32) -> 'Decoder':
        mesh = jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=jax.devices()[:1])
        request = ModelRequest(vocab_size, 1024, None, dtype, 'cpu', dict(mesh.shape))
        model = Transformer(request, options=TransformerOptions(**nest(options)))
        with jax.set_mesh(mesh):
            return cls(model, jax.jit(model.init)(jax.random.key(0)), mesh)

    def engine(self, slots: int, length: int, kind: WeightKind = 'compute', **options: Any) -> Engine:
        """An engine that compiles a program when it first needs it."""
        wanted = EngineOptions(max_length=length, slots=slots, weights=kind, **options)
        return Engine(programs_of(self.model, self.mesh, wanted), self.weights, warm_up=False)

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

    def bytes_per_step(self, form: str) -> int:
        """Bytes of weights that a step multiplies by, whatever the number of sequences."""
        tables = self.model.arch.padded_vocab_size * self.model.arch.d_model
        positions = 0 if self.weights.positions is None else self.weights.positions.size
        untied = 0 if self.weights.unembed is None else tables
        return (sum(w.size for w in jax.tree.leaves(self.weights)) - positions - untied) * BYTES[form]


class Peer:
    """transformers, in a process of its own. It sleeps unless it is asked."""

    def __init__(self, python: Path, checkpoint: Path):
        command = [str(python), str(HERE / 'torch_generate.py'), str(checkpoint)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._answer()

    def write(self, form: str, prompts: list[list[int]], tokens: int) -> 'Written':
        """With one thread or with a thread on every core, which wait for each other: whichever needs less CPU time."""
        assert self.process.stdin is not None
        answers = []
        for threads in {1, usable_cores()}:
            request = {'form': form, 'prompts': prompts, 'tokens': tokens, 'threads': threads}
            self.process.stdin.write(json.dumps(request) + '\n')
            self.process.stdin.flush()
            answers.append(Written(**self._answer()))
        return min(answers, key=lambda answer: answer.cpu)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f'torch_generate.py failed with exit code {self.process.wait()}')
        return json.loads(line)

    def close(self) -> None:
        with self.process:  # closes its pipes, and waits
            pass


@dataclasses.dataclass
class Written:
    """Answers, and the wall and CPU seconds that they took. `arrivals`: CPU seconds of each token of each answer."""

    seconds: float
    cpu: float
    tokens: list[list[int]]
    arrivals: list[list[float]] = dataclasses.field(default_factory=list)


def write(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> Written:
    """Answers of given lengths."""
    greedy = Sampling(temperature=0)
    start, cpu = time.perf_counter(), time.process_time()
    numbers = [
        engine.add(Request(prompt=tuple(prompt), max_tokens=length, sampling=greedy))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    arrivals: dict[int, list[float]] = {number: [] for number in numbers}
    while not engine.idle:
        for update in engine.step():
            found[update.number] += [token.id for token in update.tokens]
            arrivals[update.number] += [time.process_time() - cpu] * len(update.tokens)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Written(seconds, cpu, list(found.values()), list(arrivals.values()))


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes that a copy on one core reads and writes per CPU second."""
    a, b = np.ones(megabytes * 2**17), np.zeros(megabytes * 2**17)

    def copy() -> float:
        start = time.thread_time()
        np.copyto(b, a)
        return 2 * a.nbytes / (time.thread_time() - start)

    return max(copy() for _ in range(3))


@contextlib.contextmanager
def peer_of(name: str, python: Path, report: list[str]) -> Iterator[tuple[dict[str, Decoder], Peer]]:
    """A model in every form, and transformers with the same weights."""
    options, vocab_size = MODELS[name]
    f32, bf16 = (Decoder.create(options, vocab_size, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / name
        export(
            f32, f32.model.arch, f32.weights, checkpoint, dtype='F32', family=options['family'], say=lambda _: None
        )  # fmt: skip
        peer = Peer(python, checkpoint)
        report[:] = [f'{package} {version}' for package, version in peer.versions.items()]
        with contextlib.closing(peer):
            yield {'f32': f32, 'bf16': bf16, 'int8': f32}, peer


def decode(name: str, decoders: dict[str, Decoder], peer: Peer, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Tokens per CPU second of one model in every setting."""
    vocab_size, rng, rows = MODELS[name][1], np.random.default_rng(0), []
    for batch in (1, 8):
        prompts = rng.integers(0, vocab_size, (batch, PROMPT)).tolist()
        lengths = [tokens] * batch
        engines = {
            form: decoders[form].engine(batch, PROMPT + tokens, kind, block_seconds=STEADY)
            for form, kind in KINDS.items()
        }  # fmt: skip
        first = {form: write(engines[form], prompts, [SAME] * batch).tokens for form in KINDS}
        theirs = {form: peer.write(form, prompts, SAME).tokens for form in KINDS}
        if first['f32'] != theirs['f32']:
            raise BenchmarkError(f'{name}: pretrax and transformers do not write the same tokens: {first}, {theirs}')
        results: dict[str, list[tuple[Written, Written]]] = {form: [] for form in KINDS}
        copies, elsewhere = [], []
        for _ in range(rounds):
            elsewhere.append(busy())
            copies.append(copy_bandwidth())
            for form, pairs in results.items():
                pairs.append((write(engines[form], prompts, lengths), peer.write(form, prompts, tokens)))
        for form, pairs in results.items():
            speeds, others = ([batch * tokens / one.cpu for one in side] for side in zip(*pairs, strict=True))
            read = [speed / batch * decoders[form].bytes_per_step(form) for speed in speeds]
            rows.append({
                'name': f'{name}, batch {batch}, {form}', 'tokens_per_second': statistics.median(speeds),
                'transformers': statistics.median(others),
                # One ratio per round, because a slow round slows both sides.
                'ratio': statistics.median(a / b for a, b in zip(speeds, others, strict=True)),
                'best_ratio': max(speeds) / max(others),
                'of_copy': statistics.median(a / b for a, b in zip(read, copies, strict=True)),
                'copy_gigabytes_per_second': statistics.median(copies) / 1e9, 'busy': statistics.median(elsewhere),
                'rounds': {'pretrax': speeds, 'transformers': others},
                'wall': {'pretrax': [a.seconds for a, _ in pairs], 'transformers': [b.seconds for _, b in pairs]},
            })  # fmt: skip
            print(f'  {describe(rows[-1])}', flush=True)
    return rows


def streams(name: str, decoder: Decoder, peer: Peer, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """CPU milliseconds to the first token and between tokens, as streams become more."""
    engine, rng, rows = decoder.engine(max(STREAMS), PROMPT + tokens), np.random.default_rng(0), []
    for count in STREAMS:
        write(engine, rng.integers(0, MODELS[name][1], (count, PROMPT)).tolist(), [tokens] * count)  # compiles
        first, between, per_second, theirs = [], [], [], []
        for _ in range(rounds):  # other prompts each time, so that none is in the cache
            prompts = rng.integers(0, MODELS[name][1], (count, PROMPT)).tolist()
            written = write(engine, prompts, [tokens] * count)
            first += [1000 * times[0] for times in written.arrivals]
            between += [1000 * gap for times in written.arrivals for gap in np.diff(times).tolist()]
            per_second.append(count * tokens / written.cpu)
            theirs.append(1000 * peer.write('f32', prompts, 1).cpu)
        rows.append({
            'name': name, 'streams': count, 'first_ms': statistics.median(first), 'last_first_ms': max(first),
            'between_p99_ms': float(np.percentile(between, 99)), 'tokens_per_second': statistics.median(per_second),
            'transformers_first_ms': statistics.median(theirs),
        })  # fmt: skip
        print(f'  {rows[-1]}', flush=True)
    return rows


def batching(name: str, rounds: int) -> dict[str, Any]:
    """Tokens per CPU second of continuous and of static batching."""
    requests, mean = REQUESTS[name]
    options, vocab_size = MODELS[name]
    slots, longest = 8, 6 * mean
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.exponential(mean, requests).astype(int), 1, longest).tolist()
    prompts = rng.integers(0, vocab_size, (requests, PROMPT)).tolist()
    engine = Decoder.create(options, vocab_size).engine(slots, PROMPT + longest, block_seconds=STEADY)
    for count in range(1, slots + 1):
        write(engine, prompts[:count], [SAME] * count)  # compiles
    groups = [slice(start, start + slots) for start in range(0, requests, slots)]
    programs, fewer = engine._programs, engine._programs.written_rows
    ratios, shrinking, speeds = [], [], []
    for _ in range(rounds):
        continuous = write(engine, prompts, lengths).cpu
        shrinking.append(sum(write(engine, prompts[group], lengths[group]).cpu for group in groups) / continuous)
        programs.written_rows = fewer[-1:]
        static = sum(write(engine, prompts[group], lengths[group]).cpu for group in groups)
        programs.written_rows = fewer
        ratios.append(static / continuous)
        speeds.append(sum(lengths) / continuous)
    ideal = sum(max(lengths[group]) for group in groups) * slots / sum(lengths)
    return {
        'name': name, 'ratio': statistics.median(ratios), 'least': min(ratios), 'ratios': ratios,
        'shrinking': statistics.median(shrinking), 'tokens_per_second': statistics.median(speeds),
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
            f'**Other programs used {result["busy"]:.0%} of the cores. Seconds are CPU seconds. "Best" compares the '
            'fastest round of each side.**', '',
        ]  # fmt: skip
    if rows := result.get('decode'):
        lines += [
            f'Tokens per CPU second: median of {result["rounds"]} rounds of {result["tokens"]} tokens each.', '',
            '| | pretrax | transformers | ratio | best | wanted | of a copy |', '|---|---|---|---|---|---|---|',
        ]  # fmt: skip
        for row in rows:
            wanted = f'{TARGETS[row["name"]]}x' if row['name'] in TARGETS else ''
            lines.append(
                f'| {row["name"]} | {row["tokens_per_second"]:,.1f} | {row["transformers"]:,.1f} | '
                f'{row["ratio"]:.2f}x | {row["best_ratio"]:.2f}x | {wanted} | {row["of_copy"]:.0%} |'
            )
        lines += ['', f'A copy on one core: {rows[-1]["copy_gigabytes_per_second"]:.1f} GB/s, read and written.', '']
    if rows := result.get('streams'):
        lines += [
            f'{max(STREAMS)} slots, f32, prompts of {PROMPT} tokens that come at once; CPU milliseconds.', '',
            '| | streams | first token | of the last stream | transformers | 99 % between tokens | tokens/s |',
            '|---|---|---|---|---|---|---|',
        ]  # fmt: skip
        for row in rows:
            lines.append(
                f'| {row["name"]} | {row["streams"]} | {row["first_ms"]:,.0f} | {row["last_first_ms"]:,.0f} | '
                f'{row["transformers_first_ms"]:,.0f} | {row["between_p99_ms"]:,.0f} | '
                f'{row["tokens_per_second"]:,.0f} |'
            )
        lines.append('')
    for row in result.get('batching', []):
        lines += [
            f'{row["name"]}: continuous batching writes {row["ratio"]:.2f} times the tokens of static batching in a '
            f'CPU second, and at least {row["least"]:.2f} times in each run (wanted: '
            f'{TARGETS["continuous / static"]}; the lengths allow {row["ideal"]:.2f}): {row["requests"]} requests, '
            f'{row["mean_length"]} tokens on average, 8 slots. It writes {row["shrinking"]:.2f} times those of static '
            'batches whose rows become fewer as answers end.',
            '',
        ]  # fmt: skip
    if row := result.get('latency'):
        lines += [
            f'With {row["streams"]} streams, the server adds {row["median_ms"]:.1f} ms to a token (median), and '
            f'{row["p99_ms"]:.1f} ms (99th percentile; wanted: 5 ms). The clients share the cores.', '',
        ]  # fmt: skip
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--torch-python', help='a Python with torch and transformers; needed for the parts decode and streams'
    )
    parser.add_argument('--part', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--model', nargs='+', choices=MODELS, default=list(MODELS))
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--tokens', type=int, default=48, help='new tokens in each sequence')
    parser.add_argument('--out', type=Path, default=HERE / 'results', help='directory for serve-<date>.json and .md')
    parser.add_argument('--one-core', action='store_true', help='all sides take turns on one core')
    options = parser.parse_args()
    if options.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if {'decode', 'streams'} & {*options.part} and not (
        options.torch_python and has_torch(Path(options.torch_python).absolute())
    ):
        raise BenchmarkError('give a Python with torch and transformers: --torch-python PATH')
    versions: list[str] = []
    result: dict[str, Any] = {
        **circumstances(), 'busy': busy(2), 'rounds': options.rounds, 'tokens': options.tokens,
    }  # fmt: skip
    if 'latency' in options.part:
        result['latency'] = latency()
    if 'batching' in options.part:
        result['batching'] = [batching(name, min(options.rounds, 5)) for name in options.model]
    for name in options.model if options.torch_python else []:
        with peer_of(name, Path(options.torch_python).absolute(), versions) as (decoders, peer):
            if 'decode' in options.part:
                rows = decode(name, decoders, peer, options.rounds, options.tokens)
                result['decode'] = [*result.get('decode', []), *rows]
            if 'streams' in options.part:
                rows = streams(name, decoders['f32'], peer, options.rounds, options.tokens)
                result['streams'] = [*result.get('streams', []), *rows]
    result['versions'] = [f'pretrax {pretrax.__version__}', f'jax {jax.__version__}', *versions]
    write_result(result, table, options.out, 'serve')


if __name__ == '__main__':
    ask_for_kept_memory()  # as `pretrax serve` does
    try:
        main()
    except BenchmarkError as error:
        sys.exit(str(error))
