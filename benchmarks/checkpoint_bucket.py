"""Measures GB/s of saving a state to a bucket and restoring it, compared with a plain upload and download.

    uv run python benchmarks/checkpoint_bucket.py                                 # starts moto, an S3 server in Python
    uv run python benchmarks/checkpoint_bucket.py --bucket s3://BUCKET/SCRATCH    # any S3 service

The state is random f32 in arrays of 64 MiB, on one CPU device. Each round has four parts:

- uploading the arrays with boto3, in as many threads as pretrax uses
- saving the state, with digests and manifest
- downloading what boto3 uploaded
- restoring the state, and checking every digest

The server runs on the same cores unless `--bucket` names another one, so the ratios matter, not the GB/s.
"""

import argparse
import concurrent.futures
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import boto3
import jax
import numpy as np
from machine import busy
from result_files import circumstances, write_result

import pretrax
from checkpoint import ARRAY, HERE, make_state, seconds, summary
from pretrax.checkpoint import Checkpoints, restore
from pretrax.storage import BucketPath

THREADS = 8
sys.path.append(str(HERE.parent / 'tests'))


@contextlib.contextmanager
def scratch(url: str | None) -> Iterator[BucketPath]:
    """A prefix to write to, in the bucket that is given or in that of a server on this machine."""
    if url is not None:
        yield BucketPath(url)
        return
    from buckets import bucket_server  # type: ignore[import-not-found]  # of the tests

    with bucket_server('s3') as server:
        os.environ |= server.environment | {
            'AWS_ENDPOINT_URL': f'http://127.0.0.1:{server.backend}',  # without the proxy that injects faults
            'PRETRAX_STORAGE_RETRY_SECONDS': '60',
        }
        yield BucketPath(f'{server.url}/scratch')


def measure(directory: BucketPath, state: Any) -> dict[str, float]:
    """Runs one round. Returns seconds."""
    directory.remove_tree()
    client = boto3.client('s3', endpoint_url=os.environ.get('AWS_ENDPOINT_URL'))
    keys = {name: f'{directory.key}/plain/{name}' for name in state['weights']}

    def upload(name: str) -> None:
        content = np.asarray(state['weights'][name]).tobytes()
        client.put_object(Bucket=directory.bucket, Key=keys[name], Body=content)

    def download(name: str) -> int:
        return len(client.get_object(Bucket=directory.bucket, Key=keys[name])['Body'].read())

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = {'save plain': seconds(lambda: list(pool.map(upload, keys)))}
        checkpoints = Checkpoints(directory / 'checkpoints', 1)
        began = time.perf_counter()
        checkpoints.save(1, state, {})
        found['save blocks'] = time.perf_counter() - began
        checkpoints.close()
        found['save pretrax'] = time.perf_counter() - began
        found['restore plain'] = seconds(lambda: list(pool.map(download, keys)))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found['restore pretrax'] = seconds(lambda: restore(directory / 'checkpoints', 1, like))
    directory.remove_tree()
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    speed, blocked = result['gigabytes_per_second'], result['save_blocks_seconds']
    rows = [f'| {key} | {speed[key]:.2f} | {result["of_plain"][key]:.2f} |' for key in speed]
    return '\n'.join([
        f'# Checkpoints in a bucket, {result["date"]}', '', f'`{result["command"]}`', '',
        f'{result["processor"]}, {result["cores"]} cores, {result["busy"]:.0%} of them busy with other programs; '
        f'pretrax {result["versions"]["pretrax"]}, jax {result["versions"]["jax"]}, server: {result["server"]}. '
        f'{result["gigabytes"]:.2f} GB, median of {result["rounds"]} rounds.', '',
        '| | GB/s | relative to a plain upload or download |', '|---|---|---|', *rows, '',
        f'A save blocks training for {1000 * blocked:.0f} ms, {1000 * blocked / result["gigabytes"]:.0f} ms per GB.',
    ]) + '\n'  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gigabytes', type=float, default=1.0, help='size of the state')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--bucket', help='s3://BUCKET/PREFIX; everything below it is deleted')
    parser.add_argument(
        '--out', type=Path, default=HERE / 'results', help='directory for checkpoint-bucket-<date>.json and .md'
    )
    options = parser.parse_args()
    state = make_state(max(1, int(options.gigabytes * 1e9) // ARRAY), ARRAY)
    n_bytes = sum(array.nbytes for array in state['weights'].values())
    share = busy()
    with scratch(options.bucket) as directory:
        rounds = [measure(directory, state) for _ in range(options.rounds)]
    result = {
        **circumstances(), 'busy': share, 'gigabytes': n_bytes / 1e9, 'rounds': options.rounds,
        'server': options.bucket or 'moto on the same cores',
        'versions': {'pretrax': pretrax.__version__, 'jax': jax.__version__},
        'seconds': rounds,
    } | summary(rounds, n_bytes)  # fmt: skip
    write_result(result, table, options.out, 'checkpoint-bucket')


if __name__ == '__main__':
    main()
