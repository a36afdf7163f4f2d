"""Measures GB/s of saving and restoring a state, compared with plain files, and how long a save blocks training.

    uv run python benchmarks/checkpoint.py [--arrays NUMBER]

The state is random f32 in arrays of 64 MiB, on one CPU device. Each round has five parts:

- writing plain files of the same sizes one after another, each with fsync
- saving the state, with digests and manifest
- reading the plain files into fresh memory
- restoring the state, and checking every digest
- restoring it with Orbax, which checks nothing

Reading is measured from disk, after the page cache is dropped, and from memory.

With `--arrays`, the state has this number of arrays of 4 KiB, and the seconds of each part are printed: saving, saving
again and removing the first checkpoint, restoring, and restoring with Orbax.
"""

import argparse
import importlib.metadata
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np
import orbax.checkpoint as ocp
from machine import QUIET, busy
from result_files import circumstances, write_result

import pretrax
from pretrax.checkpoint import Checkpoints, restore

HERE = Path(__file__).resolve().parent
ARRAY = 64 << 20  # bytes
SMALL = 4 << 10  # bytes
TARGET = 0.6


def make_state(count: int, size: int) -> dict[str, dict[str, jax.Array]]:
    """A state of arrays of this number of bytes."""
    keys = jax.random.split(jax.random.key(0), count)
    arrays = {f'w{i}': jax.random.normal(key, (size // 4096, 1024)) for i, key in enumerate(keys)}
    return jax.block_until_ready({'weights': arrays})


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def write_plain(directory: Path, state: dict[str, dict[str, jax.Array]]) -> None:
    for name, array in state['weights'].items():
        with (directory / name).open('wb', buffering=0) as file:
            content = memoryview(np.asarray(array)).cast('B')
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())


def read_plain(directory: Path) -> list[np.ndarray]:
    found = []
    for path in sorted(directory.iterdir()):
        found.append(np.empty(path.stat().st_size, np.uint8))
        with path.open('rb', buffering=0) as file:
            content = memoryview(found[-1])
            while content:
                content = content[file.readinto(content[: 4 << 20]) or 0 :]
    return found


def drop_page_cache(directory: Path) -> None:
    """Drops these files from the page cache."""
    for path in (path for path in directory.rglob('*') if path.is_file()):
        with path.open('rb') as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restore_with_orbax(place: Path, like: Any) -> Any:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
        )  # fmt: skip
        return checkpointer.restore(place, args=arguments)


def measure(directory: Path, state: Any) -> dict[str, float]:
    """Runs one round. Returns seconds."""
    plain, saved = directory / 'plain', directory / 'checkpoints'
    for place in (plain, saved):
        shutil.rmtree(place, ignore_errors=True)
    plain.mkdir()
    found = {'write plain': seconds(lambda: write_plain(plain, state))}
    checkpoints = Checkpoints(saved, 1)
    began = time.perf_counter()
    checkpoints.save(1, state, {})
    found['save blocks'] = time.perf_counter() - began
    checkpoints.close()
    found['write pretrax'] = time.perf_counter() - began
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    sides: dict[str, tuple[Path, Callable[[], Any]]] = {
        'plain': (plain, lambda: read_plain(plain)),
        'pretrax': (saved, lambda: restore(saved, 1, like)),
        'Orbax': (saved, lambda: restore_with_orbax(saved / '1' / 'state', like)),
    }
    for where in ('disk', 'memory'):
        for side, (files, read) in sides.items():
            if where == 'disk':
                drop_page_cache(files)
            found[f'read {where} {side}'] = seconds(read)
    return found


def measure_small(directory: Path, state: Any) -> dict[str, float]:
    """Saves a state twice, and restores it. Returns seconds."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

    def save(step: int) -> None:
        checkpoints.save(step, state, {})
        checkpoints.wait()

    with Checkpoints(directory, 1) as checkpoints:
        found = {'save': seconds(lambda: save(1)), 'save, remove the first': seconds(lambda: save(2))}
    found['restore'] = seconds(lambda: restore(directory, 2, like))
    found['restore with Orbax'] = seconds(lambda: restore_with_orbax(directory / '2' / 'state', like))
    found['remove'] = seconds(lambda: shutil.rmtree(directory))
    return found


def summary(rounds: list[dict[str, float]], n_bytes: int) -> dict[str, Any]:
    """Median GB/s, and the median over rounds of the ratio to plain files."""
    keys = [key for key in rounds[0] if key != 'save blocks']
    plain = {key: ' '.join([*key.split()[:-1], 'plain']) for key in keys}
    return {
        'gigabytes_per_second': {key: statistics.median(n_bytes / 1e9 / r[key] for r in rounds) for key in keys},
        'of_plain': {key: statistics.median(r[plain[key]] / r[key] for r in rounds) for key in keys},
        'save_blocks_seconds': statistics.median(r['save blocks'] for r in rounds),
    }


def warnings(result: dict[str, Any]) -> list[str]:
    if result['busy'] > QUIET:
        return [f'Not a fair comparison: other programs used {result["busy"]:.0%} of the cores.']
    return []


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f'# Checkpoints, {result["date"]}', '', f'`{result["command"]}`', '',
        f'{result["processor"]}, {result["cores"]} cores; '
        + ', '.join(f'{name} {version}' for name, version in result['versions'].items())
        + f'. {result["gigabytes"]:.2f} GB, median of {result["rounds"]} rounds.', '',
        *(f'**{warning}**\n' for warning in warnings(result)),
        '| | GB/s | relative to plain files |', '|---|---|---|',
    ]  # fmt: skip
    for key, speed in result['gigabytes_per_second'].items():
        lines.append(f'| {key} | {speed:.2f} | {result["of_plain"][key]:.2f} |')
    blocked = result['save_blocks_seconds']
    lines += [
        '',
        f'A save blocks training for {1000 * blocked:.0f} ms, {1000 * blocked / result["gigabytes"]:.0f} ms per GB.',
    ]
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gigabytes', type=float, default=2.0, help='size of the state')
    parser.add_argument('--arrays', type=int, help='measure this number of small arrays, and nothing else')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument(
        '--directory', type=Path, help='a directory on the disk to measure (default: the one for temporary files)'
    )
    parser.add_argument(
        '--out', type=Path, default=HERE / 'results', help='directory for checkpoint-<date>.json and .md'
    )
    options = parser.parse_args()
    if options.arrays:
        state = make_state(options.arrays, SMALL)
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            rounds = [measure_small(Path(name) / 'checkpoints', state) for _ in range(options.rounds)]
        for part in rounds[0]:
            print(f'{part}: {statistics.median(r[part] for r in rounds):.2f} s')
        return
    state = make_state(max(1, int(options.gigabytes * 1e9) // ARRAY), ARRAY)
    n_bytes = sum(array.nbytes for array in state['weights'].values())
    share = busy()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        rounds = [measure(Path(name), state) for _ in range(options.rounds)]
    result = {
        **circumstances(), 'busy': share, 'gigabytes': n_bytes / 1e9, 'rounds': options.rounds,
        'versions': {
            'pretrax': pretrax.__version__, 'jax': jax.__version__,
            'orbax': importlib.metadata.version('orbax-checkpoint'),
        },
        'seconds': rounds,
    } | summary(rounds, n_bytes)  # fmt: skip
    write_result(result, table, options.out, 'checkpoint')
    for key in ('write pretrax', 'read disk pretrax', 'read memory pretrax'):
        reached = result['of_plain'][key]
        print(
            f'{key}: {reached:.2f} times plain files, {"at least" if reached >= TARGET else "LESS THAN"} the target '
            f'of {TARGET}'
        )


if __name__ == '__main__':
    main()
