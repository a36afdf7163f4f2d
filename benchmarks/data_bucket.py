"""Measures MB/s of reading tokens from a bucket in the order of training, compared with a plain download.

    uv run python benchmarks/data_bucket.py                                 # starts moto, an S3 server in Python
    uv run python benchmarks/data_bucket.py --bucket s3://BUCKET/SCRATCH    # any S3 service

The tokens are random, and do not fit in the memory that the loader uses. Each round has these parts:

- uploading the files of the tokens with boto3, in 8 threads
- writing the tokens to the bucket, compressed and with checksums
- downloading what boto3 uploaded, whole and in ranges of 1 MiB
- reading all blocks of 2^19 tokens in a random order, with checksums and decompression
- making all batches of an epoch: from a disk, from the bucket, and again with everything kept on this machine

A server that reads the whole object for each range, as moto does, is slow for ranges, whoever asks for them. MB are
those of the compressed files. Making batches takes longer than reading, and nothing is trained meanwhile. The server
runs on the same cores unless `--bucket` names another one, so the ratios matter, not the MB/s.
"""

import argparse
import concurrent.futures
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from checkpoint_bucket import HERE, THREADS, scratch
from machine import busy
from result_files import circumstances, write_result

import pretrax
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import open_tokens
from pretrax.data.batches.windows import BLOCK
from pretrax.data.tokens.block_files import BlockFiles
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.storage import AnyPath, BucketPath

ROWS, LENGTH = 64, 1024
RANGE = 1 << 20  # bytes
VOCABULARY = 50_257


def write(directory: AnyPath, n_tokens: int) -> None:
    """Writes random tokens in documents of 50 to 2,000, more frequent ones with smaller ids, as in text."""
    rng = np.random.default_rng(0)
    identity = TokenizerIdentity(sha256=None, vocab_size=VOCABULARY, end_of_text=None)
    with create(directory, identity, None, {}) as writer:
        for start in range(0, n_tokens, 1 << 22):
            uniform = rng.random(min(1 << 22, n_tokens - start), np.float32)
            encoded = np.minimum(np.exp(uniform * np.log(VOCABULARY)) - 1, VOCABULARY - 1).astype(np.uint32) << 1
            encoded[np.cumsum(rng.integers(50, 2000, size=len(encoded) // 2000))[:-1]] |= 1
            encoded[0] |= 1
            writer.append('train', encoded, None, n_bytes=None, predicted_bytes=None)


def read_blocks(directory: BucketPath) -> None:
    """Reads all blocks, 32 at once as the loader does."""
    split = open_split(directory, 'train')
    blocks = np.random.default_rng(0).permutation(-(-split.n_tokens // BLOCK)).tolist()
    for numbers in itertools.batched(blocks, 32):
        split.read([(number * BLOCK, min((number + 1) * BLOCK, split.n_tokens)) for number in numbers])


def epoch(directory: AnyPath, near: Path, cache: BlockFiles | None) -> tuple[float, float]:
    """Seconds until the first batch, and until all batches of an epoch are made."""
    began = time.perf_counter()
    source = open_tokens(directory, DataRequest(0, LENGTH, near, lambda text: None), 'concatenate', cache)
    first = 0.0
    for step in range(source.train.n // ROWS):
        source.batch(step, slice(None), ROWS)
        first = first or time.perf_counter() - began
    return first, time.perf_counter() - began


def measure(directory: BucketPath, local: Path, n_tokens: int) -> dict[str, float]:
    """Runs one round. Returns seconds."""
    directory.remove_tree()
    client = boto3.client('s3', endpoint_url=os.environ.get('AWS_ENDPOINT_URL'))
    files = sorted(file for file in (local / 'train').rglob('c/*') if file.is_file())
    keys = [f'{directory.key}/plain/{number}' for number in range(len(files))]

    def upload(key: str, file: Path) -> None:
        client.put_object(Bucket=directory.bucket, Key=key, Body=file.read_bytes())

    def download(key: str) -> int:
        return len(client.get_object(Bucket=directory.bucket, Key=key)['Body'].read())

    def download_range(where: tuple[str, int, int]) -> int:
        key, start, stop = where
        answer = client.get_object(Bucket=directory.bucket, Key=key, Range=f'bytes={start}-{stop - 1}')
        return len(answer['Body'].read())

    ranges = [
        (key, start, min(start + RANGE, file.stat().st_size))
        for key, file in zip(keys, files, strict=True)
        for start in range(0, file.stat().st_size, RANGE)
    ]
    found = {}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool, tempfile.TemporaryDirectory() as near:
        began = time.perf_counter()
        list(pool.map(upload, keys, files))
        found['write plain'] = time.perf_counter() - began
        began = time.perf_counter()
        write(directory / 'tokens', n_tokens)
        found['write tokens'] = time.perf_counter() - began
        began = time.perf_counter()
        list(pool.map(download, keys))
        found['read plain'] = time.perf_counter() - began
        began = time.perf_counter()
        list(pool.map(download_range, ranges))
        found['read plain ranges'] = time.perf_counter() - began
        began = time.perf_counter()
        read_blocks(directory / 'tokens')
        found['read blocks'] = time.perf_counter() - began
        _, found['read batches of a disk'] = epoch(local, Path(near), None)
        found['first batch'], found['read batches'] = epoch(directory / 'tokens', Path(near), None)
        cache = BlockFiles(64 << 30, print, Path(near) / 'kept')
        epoch(directory / 'tokens', Path(near), cache)
        _, found['read kept batches'] = epoch(directory / 'tokens', Path(near), cache)
    directory.remove_tree()
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    speed = result['megabytes_per_second']
    rows = [f'| {key} | {speed[key]:.0f} | {result["of_plain"][key]:.2f} |' for key in speed]
    return '\n'.join([
        f'# Tokens in a bucket, {result["date"]}', '', f'`{result["command"]}`', '',
        f'{result["processor"]}, {result["cores"]} cores, {result["busy"]:.0%} of them busy with other programs; '
        f'pretrax {result["pretrax"]}, server: {result["server"]}. {result["tokens"] / 1e6:,.0f} M tokens, '
        f'{result["megabytes"]:,.0f} MB, median of {result["rounds"]} rounds.', '',
        '| | MB/s | relative to a plain upload or download |', '|---|---|---|', *rows, '',
        f'Reading in the order of training gives {result["tokens_per_second"] / 1e6:.1f} M tokens/s; the first batch '
        'is '
        f'there after {result["first_batch_seconds"]:.1f} s.',
    ]) + '\n'  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tokens', type=int, default=160_000_000)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--bucket', help='s3://BUCKET/PREFIX; everything below it is deleted')
    parser.add_argument(
        '--out', type=Path, default=HERE / 'results', help='directory for data-bucket-<date>.json and .md'
    )
    options = parser.parse_args()
    share = busy()
    with scratch(options.bucket) as directory, tempfile.TemporaryDirectory() as local:
        write(Path(local) / 'tokens', options.tokens)
        n_bytes = sum(file.stat().st_size for file in (Path(local) / 'tokens' / 'train').rglob('c/*'))
        rounds = [measure(directory, Path(local) / 'tokens', options.tokens) for _ in range(options.rounds)]
    keys = [key for key in rounds[0] if key != 'first batch']
    result = {
        **circumstances(), 'busy': share, 'pretrax': pretrax.__version__,
        'server': options.bucket or 'moto on the same cores',
        'tokens': options.tokens, 'megabytes': n_bytes / 1e6, 'rounds': options.rounds, 'seconds': rounds,
        'megabytes_per_second': {key: statistics.median(n_bytes / 1e6 / r[key] for r in rounds) for key in keys},
        'of_plain': {
            key: statistics.median(r[f'{key.split()[0]} plain'] / r[key] for r in rounds) for key in keys
        },
        'tokens_per_second': statistics.median(options.tokens / r['read batches'] for r in rounds),
        'first_batch_seconds': statistics.median(r['first batch'] for r in rounds),
    }  # fmt: skip
    write_result(result, table, options.out, 'data-bucket')


if __name__ == '__main__':
    main()
