"""Measures tokens/s of batches from flat-tokens, compared with a plain memory map and Grain; also seek time and memory.

    uv run python benchmarks/data_loading.py

All sides read rows of the same length from the same tokens, each in its own random order, in turns in one process, in
CPU time. The corpus must be larger than the 256 MiB that the loader keeps in memory. Only pretrax also computes
documents, positions and masks. The time of a batch is that of `configs/quickstart.yaml`, 16 rows of 256 tokens, from
its tokens to arrays on a device, in the thread that makes it.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grain.python as grain
import numpy as np

import pretrax
from pretrax.config import load
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import open_stores
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.run.setup import prepare
from pretrax.system.cores import usable_cores

ROWS = 64
VOCABULARY = 50_257
FAR = 1_000_000  # the step to seek
QUICKSTART = Path(__file__).parents[1] / 'configs' / 'quickstart.yaml'


def write_corpus(directory: Path, n_tokens: int) -> None:
    """Writes random tokens in documents of 50 to 2,000, as flat-tokens and as a plain file of uint16."""
    rng = np.random.default_rng(0)
    identity = TokenizerIdentity(sha256='0' * 64, vocab_size=VOCABULARY, end_of_text=VOCABULARY - 1)
    with create(directory / 'flat', identity, b'{}', {}) as writer, (directory / 'plain.bin').open('wb') as plain:
        written = 0
        while written < n_tokens:
            lengths = rng.integers(50, 2000, size=1000)
            documents = [rng.integers(0, VOCABULARY - 1, size=length, dtype=np.uint32) for length in lengths]
            for document in documents:
                document[-1] = VOCABULARY - 1
            encoded = np.concatenate(documents) << 1
            encoded[np.cumsum(lengths) - lengths] |= 1
            writer.append('train', encoded, None, n_bytes=int(lengths.sum()), predicted_bytes=int(lengths.sum()))
            plain.write(np.concatenate(documents).astype(np.uint16).tobytes())
            written += int(lengths.sum())


def ours(directory: Path, length: int, packing: str) -> Callable[[int], object]:
    request = DataRequest(0, length, directory / 'index', lambda text: None)
    source = open_stores(open_split(directory / 'flat', 'train'), None, None, request, packing)  # type: ignore[arg-type]
    return lambda step: source.batch(step, slice(None), ROWS)


def memmap(directory: Path, length: int) -> Callable[[int], object]:
    """nanoGPT's get_batch: windows at random positions."""
    tokens = np.memmap(directory / 'plain.bin', np.uint16, 'r')

    def batch(step: int) -> object:
        starts = np.random.default_rng(step).integers(0, len(tokens) - length - 1, size=ROWS)
        inputs = np.stack([tokens[start : start + length].astype(np.int32) for start in starts])
        targets = np.stack([tokens[start + 1 : start + length + 1].astype(np.int32) for start in starts])
        return inputs, targets

    return batch


def grain_over_memmap(directory: Path, length: int) -> Iterator[object]:
    tokens = np.memmap(directory / 'plain.bin', np.uint16, 'r')

    def read(window: int) -> dict[str, np.ndarray]:
        row = tokens[window * length : window * length + length + 1].astype(np.int32)
        return {'inputs': row[:-1], 'targets': row[1:]}

    windows = grain.MapDataset.range((len(tokens) - 1) // length).shuffle(seed=0).repeat().map(read)
    return iter(windows.to_iter_dataset().batch(ROWS))


def speed(batch: Callable[[int], object], first: int, length: int, seconds: float) -> float:
    """M tokens per second of CPU time of the batches that start at step `first`."""
    began, step = time.process_time(), first
    while time.process_time() - began < seconds:
        batch(step)
        step += 1
    return (step - first) * ROWS * length / (time.process_time() - began) / 1e6


def batch_milliseconds(directory: Path) -> float:
    """The time of a batch of the quickstart on one device, the median of 1,000, in the thread that makes it."""
    run = prepare(load(str(QUICKSTART), [f'run_dir={directory}/run']), report=lambda text: None)
    seconds = []
    for number in range(1000):
        began = time.thread_time()
        run.batch(number)
        seconds.append(time.thread_time() - began)
    return 1000 * statistics.median(seconds)


class Generated:
    """A token store of documents of 50 tokens, computed when they are read."""

    name, vocab_size, end_of_text, bytes_per_target, fingerprint = 'generated', 1 << 20, None, None, ''
    has_mask, is_remote, largest_token = False, False, (1 << 20) - 1

    def __init__(self, n_documents: int):
        self.n_documents, self.n_tokens = n_documents, 50 * n_documents

    def read(self, ranges):
        places = [np.arange(start, stop) for start, stop in ranges]
        return [(2 * (place % self.vocab_size) + (place % 50 == 0)).astype(np.uint32) for place in places]

    def read_starts(self, start, stop):
        return 50 * np.arange(start, stop, dtype=np.uint64)

    def read_mask(self, ranges):
        return [np.ones(stop - start, bool) for start, stop in ranges]


def peak_memory(n_documents: int, length: int, packing: str) -> float:
    """Peak MiB of a process that opens `n_documents`, makes 200 batches, and then one at a distant step."""
    command = [sys.executable, __file__, '--child', str(n_documents), '--length', str(length), '--packing', packing]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(n_documents: int, length: int, packing: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        request = DataRequest(0, length, Path(directory), lambda text: None)
        source = open_stores(Generated(n_documents), None, None, request, packing)  # type: ignore[arg-type]
        for step in [*range(200), FAR]:
            source.batch(step, slice(None), ROWS)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tokens', type=int, default=200_000_000, help='size of the corpus')
    parser.add_argument('--length', type=int, default=1024, help='tokens per row')
    parser.add_argument('--packing', default='concatenate', help='packing for the memory measurement')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=3.0, help='duration of a turn')
    parser.add_argument('--documents', type=int, nargs='+', default=[1_000_000, 20_000_000], help='to compare memory')
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'results')
    parser.add_argument('--child', type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.length, options.packing)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_corpus(directory, options.tokens)
        began = time.perf_counter()
        far = ours(directory, options.length, 'concatenate')
        opened = time.perf_counter()
        far(FAR)
        seek = time.perf_counter() - opened
        over_grain = grain_over_memmap(directory, options.length)
        sides: dict[str, Callable[[int], object]] = {
            'pretrax': ours(directory, options.length, 'concatenate'),
            'pretrax, whole': ours(directory, options.length, 'whole'),
            'pretrax, best_fit': ours(directory, options.length, 'best_fit'),
            'numpy.memmap': memmap(directory, options.length),
            'Grain over memmap': lambda step: next(over_grain),
        }
        rounds = [
            {side: speed(batch, 10_000 * number, options.length, options.seconds) for side, batch in sides.items()}
            for number in range(options.rounds)
        ]
        batch = batch_milliseconds(directory)
    speeds = {side: statistics.median(turn[side] for turn in rounds) for side in sides}
    memory = {f'{n:,} documents': peak_memory(n, options.length, options.packing) for n in options.documents}
    result = {
        'command': ' '.join(['python', 'benchmarks/data_loading.py', *sys.argv[1:]]),
        'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'pretrax': pretrax.__version__,
        'machine': f'{platform.machine()}, {usable_cores()} cores',
        'load': os.getloadavg()[0],
        'million_tokens_per_cpu_second': speeds,
        'milliseconds_of_a_batch': batch,
        'seconds_to_open': opened - began,
        f'seconds_to_step_{FAR}': seek,
        'peak_mib': memory,
        'rounds': rounds,
    }
    for side, value in speeds.items():
        print(f'{side:20} {value:8.1f} M tokens/s   {value / speeds["numpy.memmap"]:5.2f} x numpy.memmap')
    print(f'opened in {opened - began:.2f} s, then read step {FAR:,} in {seek:.3f} s')
    print(f'a batch of the quickstart: {batch:.3f} ms')
    print('peak memory: ' + ', '.join(f'{name} {value:,.0f} MiB' for name, value in memory.items()))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / 'data_loading.json').write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
    main()
