"""Flips single bits while a model trains, and counts which of them are seen, and which device is blamed.

    uv run python benchmarks/bit_flips.py                                                # an hour
    uv run python benchmarks/bit_flips.py --flips 500 --state-flips 500 --clean 5000     # minutes

The model is small, and the devices are simulated on CPUs: what is measured is whether a flip is seen, not time.

- A flip in the computation is in a result of one equation on one device (an activation, a gradient, a gathered weight),
  in one turn of its loops, and happens once (in one of the runs of a replay) or always (in all of them). A flip that
  changes no value that a device sends or returns changes no gradient: for flips that are not seen, these values are
  compared bit for bit.
- A flip in the state is in one replica of an array of the weights or of the optimizer's state.
- A flip in a file is in any byte of a checkpoint.
- Runs without a fault, on four meshes, train and replay each of their steps.

Chunks of the campaign have seeds of their own, and each is added to `--chunks` when it is done: the same command
continues after an interruption, and larger numbers add to what is there. Delete the file to begin again.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == '__main__':  # before JAX is imported
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from result_files import circumstances, write_result

from pretrax import config_from_values
from pretrax.checkpoint import DamagedError, steps_in, verify
from pretrax.observe.metrics import read_metrics
from pretrax.run.clock import Clock
from pretrax.run.replay import Replay
from pretrax.run.setup import prepare
from pretrax.run.start import initial_state
from pretrax.shardlib import digests
from pretrax.shardlib.ops import vary
from pretrax.shardlib.replication import settle
from pretrax.train.replay import make_replay
from pretrax.train.step import TrainState

LOST_IN_ROUNDING = 'changes nothing in that program, and is seen in a higher bit'
NOWHERE = -1
_DEPTH = 3  # loops inside each other
_FLIPPED = {
    'dot_general', 'exp', 'rsqrt', 'logistic', 'reduce_sum', 'add_any', 'gather', 'scatter-add', 'all_gather',
    'reduce_scatter', 'psum', 'psum_invariant', 'ppermute', 'all_to_all', 'convert_element_type', 'scan', 'jit',
}  # fmt: skip


@dataclasses.dataclass
class Place:
    """A result of an equation on one device: its shape, its bits, and the turns of the loops around it."""

    name: str
    shape: tuple[int, ...]
    bits: int
    turns: tuple[int, ...]


class Flips(contextlib.AbstractContextManager['Flips']):
    """While it is entered, programs that `digest_sent` traces flip a bit where `aim` says."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._fault = np.full(3 + _DEPTH, NOWHERE, np.int32)
        self._device = NOWHERE
        self._runs: frozenset[int] | None = None
        self._calls: collections.Counter[int] = collections.Counter()
        self._lengths: list[int] = []

    def aim(self, device: int, place: int, turns: tuple[int, ...], element: int, bit: int, runs: Any = None) -> None:
        """The next fault is on this device, in these of the next runs of the program; None: in all of them."""
        self._fault = np.array([place, element, bit, *turns, *[NOWHERE] * (_DEPTH - len(turns))], np.int32)
        self._device, self._runs = device, runs
        self._calls.clear()

    def rest(self) -> None:
        """There is no fault until the next `aim`."""
        self._device = NOWHERE

    def draw(self, rng: np.random.Generator, n_devices: int) -> dict[str, Any]:
        """A random fault, for `aim`."""
        number = int(rng.integers(len(self.places)))
        place = self.places[number]
        return {
            'device': int(rng.integers(n_devices)),
            'place': number,
            'turns': tuple(int(rng.integers(turns)) for turns in place.turns),
            'element': int(rng.integers(np.prod(place.shape, dtype=int))),
            'bit': int(rng.integers(place.bits)),
        }

    def _read(self, device: Any) -> np.ndarray:
        """Returns the fault of a device in this run. Each device asks once per run."""
        run = self._calls[int(device)]
        self._calls[int(device)] += 1
        is_now = int(device) == self._device and (self._runs is None or run in self._runs)
        return self._fault if is_now else np.full_like(self._fault, NOWHERE)

    def __enter__(self) -> 'Flips':
        kind: Any = digests._Evaluation
        self._before = kind.__init__, kind._bind, kind._loop
        start, bind, loop = self._before

        def started(evaluation: Any, *args: Any) -> None:
            start(evaluation, *args)
            axes = tuple(evaluation.sizes)
            fault = io_callback(self._read, jax.ShapeDtypeStruct((3 + _DEPTH,), jnp.int32), jax.lax.axis_index(axes))
            object.__setattr__(evaluation, 'fault', vary(fault, axes))
            self.places = []

        def bound(evaluation: Any, equation: Any, operands: Any, turns: Any) -> Any:
            results = bind(evaluation, equation, operands, turns)
            return [self._flip(x, equation, turns, evaluation) for x in results]

        def looped(evaluation: Any, equation: Any, operands: Any, turns: Any) -> Any:
            self._lengths.append(equation.params['length'])
            try:
                return loop(evaluation, equation, operands, turns)
            finally:
                self._lengths.pop()

        kind.__init__, kind._bind, kind._loop = started, bound, looped
        return self

    def __exit__(self, *_: object) -> None:
        kind: Any = digests._Evaluation
        kind.__init__, kind._bind, kind._loop = self._before

    def _flip(self, x: Any, equation: Any, turns: Any, evaluation: Any) -> Any:
        name = equation.primitive.name
        if name not in _FLIPPED or not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            return x
        bits = 8 * x.dtype.itemsize
        place, element, bit, *at = evaluation.fault
        here = place == len(self.places)
        for turn, wanted in itertools.zip_longest(turns, at, fillvalue=NOWHERE):
            here = here & (turn == wanted)
        self.places.append(Place(f'{name} in {equation.source_info.name_stack}', x.shape, bits, tuple(self._lengths)))
        kind = {16: jnp.uint16, 32: jnp.uint32}[bits]
        numbers = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
        mask = jnp.where(here & (numbers == element), (jnp.uint32(1) << bit.astype(jnp.uint32)).astype(kind), 0)
        words = jax.lax.bitcast_convert_type(x, kind) ^ mask.astype(kind)
        flipped = jax.lax.bitcast_convert_type(words, x.dtype)
        axes = jax.typeof(x).manual_axis_type.varying
        if missing := jax.typeof(flipped).manual_axis_type.varying - axes:
            flipped = settle(flipped, missing)  # the other replicas do not have the fault
        return flipped


def all_bits(x: jax.Array, by_row: bool = False) -> jax.Array:
    """Takes the place of `digests.digest`: every bit of an array, as u32[n]."""
    del by_row
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32).reshape(-1)
    kind = {16: jnp.uint16, 32: jnp.uint32}[8 * x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32).reshape(-1)


class Campaign(contextlib.AbstractContextManager['Campaign']):
    """A small run on eight devices, whose replays are called without training it. Its mesh is set inside of it."""

    def __init__(self, directory: Path, **mesh: int):
        values = {
            'name': 'flips', 'run_dir': str(directory / 'run'), 'steps': 10**6, 'mesh': mesh,
            'precision': {'compute': 'f32'},
            'model': {'family': 'llama', 'n_layers': 3, 'd_model': 32, 'layers': 'scan',
                      'attention': {'n_heads': 4, 'n_kv_heads': 2}},
            'data': {'name': 'synthetic', 'vocab_size': 96}, 'batch': {'tokens': 512, 'sequence_length': 32},
            'optimizer': {'learning_rate': 1e-3}, 'faults': {'replay': {'every': 1, 'quarantine_after': 10**9}},
        }  # fmt: skip
        (directory / 'run').mkdir(parents=True)
        self.run = prepare(config_from_values(values), report=lambda line: None)
        self.n_devices = self.run.mesh.size
        self.said: list[str] = []
        clock = Clock(directory, writes=False, step=0, description={})
        self.replay = Replay(self.run, clock, self.said.append, lambda why: None)

    def __enter__(self) -> 'Campaign':
        self._mesh = jax.set_mesh(self.run.mesh)
        self._mesh.__enter__()
        self.state, self.batch = initial_state(self.run, self.said.append), self.run.batch(0)
        self.replay.check(1, self.state, self.batch)
        return self

    def __exit__(self, *error: Any) -> None:
        self._mesh.__exit__(*error)

    @functools.cached_property
    def sent(self) -> tuple[Callable[[], np.ndarray], np.ndarray]:
        """A function that returns all bits that devices send and return, and these bits now."""
        digest, digests.digest = digests.digest, all_bits
        try:
            program = make_replay(self.run.recipe)[0]
            compiled = program.lower(self.state, self.batch, np.bool_(False)).compile()
        finally:
            digests.digest = digest
        return (sent := lambda: np.asarray(compiled(self.state, self.batch, np.bool_(False)))), sent()

    def find(self, state: TrainState | None = None) -> dict[str, Any]:
        """Replays a step, and returns the difference that was found; {}: none."""
        self.replay.replays = 0  # every second replay rotates the data
        return self.replay._find_corruption(1, 1, state or self.state, self.batch)

    def verdict(self, found: dict[str, Any], device: int) -> str:
        """Whether a finding names the device with this number in the mesh."""
        numbers = [int(name.split()[1]) for name in found['devices']]
        is_named = self.run.mesh.devices.flat[device].id in numbers
        return (
            'that device named' if is_named and len(numbers) == 1 else 'among several' if is_named else 'others named'
        )


def flip_in_replays(campaign: Campaign, flips: Flips, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Faults that happen in one run of a replay, and faults that happen in all: how many are seen and blamed."""
    places = flips.places
    unseen: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        flips.places = places
        fault = flips.draw(rng, campaign.n_devices)
        kind = 'always' if rng.random() < 0.5 else 'once'
        runs = None if kind == 'always' else frozenset({int(rng.integers(2))})
        flips.aim(**fault, runs=runs)
        found = campaign.find()
        counts[f'{kind}, injected'] += 1
        if found:
            counts[f'{kind}, seen, {campaign.verdict(found, fault["device"])}'] += 1
        else:
            flips.rest()
            sent, clean = campaign.sent
            flips.places = places
            flips.aim(**fault)
            changes = not np.array_equal(sent(), clean)
            what = 'not seen' if changes else 'changes nothing'
            if changes and is_seen_in_a_higher_bit(campaign, flips, fault, runs):
                what = LOST_IN_ROUNDING
            counts[f'{kind}, {what}'] += 1
            unseen[places[fault['place']].name.split()[0]] += what == 'not seen'
        flips.rest()
    of_unseen = {f'not seen, in {name}': count for name, count in sorted(unseen.items()) if count}
    return {'places': len(places), **dict(sorted(counts.items())), **of_unseen}


def is_seen_in_a_higher_bit(campaign: Campaign, flips: Flips, fault: dict[str, Any], runs: Any) -> bool:
    """Whether the same fault is seen in the highest bit of the mantissa. Then the place is looked at.

    The program that returns all bits is another one than that of a replay, and rounds elsewhere: a flip of the lowest
    bits may change something in one of them only.
    """
    flips.aim(**fault | {'bit': flips.places[fault['place']].bits - 10}, runs=runs)
    return bool(campaign.find())


def flipped_replica(x: jax.Array, at: jax.Device, rng: np.random.Generator) -> jax.Array:
    """The array with one bit flipped in the memory of one device."""
    shards = {shard.device: np.array(shard.data) for shard in x.addressable_shards}
    words = shards[at].reshape(-1).view(np.uint8)
    words[rng.integers(words.size)] ^= np.uint8(1 << rng.integers(8))
    pieces = [jax.device_put(piece, where) for where, piece in shards.items()]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def flip_in_state(campaign: Campaign, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Faults in one of three or more replicas of an array of the weights or of the optimizer's state."""
    leaves, tree = jax.tree.flatten(campaign.state)
    slices = [len({str(one) for one in x.sharding.devices_indices_map(x.shape).values()}) for x in leaves]
    replicated = [i for i, count in enumerate(slices) if 3 * count <= campaign.n_devices]
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        number, device = int(rng.choice(replicated)), int(rng.integers(campaign.n_devices))
        flipped = flipped_replica(leaves[number], campaign.run.mesh.devices.flat[device], rng)
        found = campaign.find(jax.tree.unflatten(tree, [*leaves[:number], flipped, *leaves[number + 1 :]]))
        counts['injected'] += 1
        counts[campaign.verdict(found, device) if found else 'not seen'] += 1
    return {'arrays': len(replicated), **dict(sorted(counts.items()))}


def flip_in_files(checkpoints: Path, count: int, rng: np.random.Generator) -> dict[str, int]:
    """Faults in any bytes of the files of a checkpoint: how many are seen, and whether the file is named."""
    [step] = steps_in(checkpoints)
    files = sorted(path for path in (checkpoints / str(step)).rglob('*') if path.is_file())
    sizes = np.array([path.stat().st_size for path in files])
    counts: collections.Counter[str] = collections.Counter()
    for number in range(count):
        # Half of them in bytes drawn from all, half in files drawn from all: small files get their share.
        file = files[rng.choice(len(files), p=sizes / sizes.sum() if number % 2 else None)]
        content = file.read_bytes()
        changed = bytearray(content)
        changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        try:
            verify(checkpoints, step)
            counts['not seen'] += 1
        except DamagedError as error:
            counts['that file named' if file.name in str(error) else 'seen'] += 1
        file.write_bytes(content)
    return {'injected': count, **dict(sorted(counts.items()))}


def replay_without_faults(campaign: Campaign, count: int) -> dict[str, int]:
    """Replays of different batches. Each one runs the program three times."""
    for number in range(count):
        campaign.batch = campaign.run.batch(number)
        campaign.replay.check(number + 1, campaign.state, campaign.batch)
    return {'replays': campaign.replay.replays, 'differences': campaign.replay.differences}


def tiny_run(
    directory: Path, steps: int, seed: int, mesh: dict[str, int], model: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """Starts a run that replays each of its steps, in a process of its own, with `run/` in this directory."""
    values = {
        'name': 'clean', 'run_dir': str(directory / 'run'), 'steps': steps, 'mesh': mesh, 'seed': seed,
        'precision': {'compute': 'f32'}, 'data': {'name': 'synthetic', 'vocab_size': 64},
        'model': {'family': 'llama', 'n_layers': 2, 'd_model': 16, 'attention': {'n_heads': 2}} | model,
        'batch': {'tokens': 128, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-3},
        'eval': {'every': 0}, 'log': {'every': min(steps, 100), 'report': False},
        'faults': {'replay': {'every': 1, 'quarantine_after': 10**9}},
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / 'run.yaml').write_text(json.dumps(values))
    flags = f'--xla_force_host_platform_device_count={np.prod(list(mesh.values()))}'
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags, 'XDG_CACHE_HOME': str(directory.parent)}
    command = [sys.executable, '-c', 'from pretrax.cli import main; main()', 'train', str(directory / 'run.yaml')]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


SMALLEST: tuple[dict[str, int], dict[str, Any]] = ({'d': 2}, {})  # a mesh, and changes of the model
EXPERTS = {'experts': {'n_experts': 4, 'experts_per_token': 2}, 'dropout': 0.1}
OTHERS = {1: ({'d': 2, 't': 2}, {}), 3: ({'d': 2, 'p': 2}, {}), 5: ({'d': 2, 'e': 2}, EXPERTS)}  # of 20 chunks

type Chunks = Iterator[tuple[int, np.random.Generator]]  # number and seed


def chunks_of_computation(directory: Path, size: int, chunks: Chunks) -> Iterator[dict[str, Any]]:
    with Flips() as flips, Campaign(directory, d=4, t=2) as campaign:
        places = flips.places
        for _, rng in chunks:
            flips.places = places  # `sent` traces the program again
            yield flip_in_replays(campaign, flips, size, rng)


def chunks_of_state(directory: Path, size: int, chunks: Chunks) -> Iterator[dict[str, Any]]:
    with Campaign(directory, r=4, d=2) as campaign:
        for _, rng in chunks:
            yield flip_in_state(campaign, size, rng)


def chunks_of_files(directory: Path, size: int, chunks: Chunks) -> Iterator[dict[str, Any]]:
    with tiny_run(directory / 'files', 2, 0, *SMALLEST):
        pass
    for _, rng in chunks:
        yield flip_in_files(directory / 'files' / 'run' / 'checkpoints', size, rng)


def chunks_of_clean_steps(directory: Path, size: int, chunks: Chunks) -> Iterator[dict[str, Any]]:
    for other, together in itertools.groupby(chunks, lambda chunk: chunk[0] % 20 if chunk[0] % 20 in OTHERS else None):
        mesh, model = SMALLEST if other is None else OTHERS[other]
        name = 'replays, ' + ' '.join(f'{axis}={size}' for axis, size in mesh.items())
        numbers = [number for number, _ in together]
        with tiny_run(directory / str(numbers[0]), size * len(numbers), numbers[0], mesh, model) as process:
            before = {'replays': 0, 'replay_differences': 0}
            for count in range(1, len(numbers) + 1):
                while (last := newest_line(directory / str(numbers[0]))).get('replays', 0) < size * count:
                    if process.poll() not in (None, 0):
                        raise SystemExit(f'a run without a fault ended with {process.returncode}')
                    time.sleep(2)
                found = {key: last[key] - before[key] for key in ('replays', 'replay_differences')}
                before = last
                yield {'replays': found['replays'], 'differences': found['replay_differences'], name: found['replays']}


def newest_line(directory: Path) -> dict[str, Any]:
    """The newest metrics of a run that has them; {}: there are none."""
    path = directory / 'run' / 'metrics.jsonl'
    lines = read_metrics(path) if path.exists() else []
    return lines[-1] if lines else {}


# Each part: how many there are in a chunk, and what makes them.
PARTS: dict[str, tuple[int, Callable[[Path, int, Chunks], Iterator[dict[str, Any]]]]] = {
    'computation, d=4 t=2': (250, chunks_of_computation),
    'state, r=4 d=2': (250, chunks_of_state),
    'files of a checkpoint': (250, chunks_of_files),
    'no fault': (5000, chunks_of_clean_steps),
}


def table(result: dict[str, Any]) -> str:
    """The counts as Markdown."""
    lines = [f'# Bit flips, {result["date"]}', '', f'`{result["command"]}`, {result["processor"]}', '']
    lines += ['| what | count |', '|---|---|']
    for part, counts in result['parts'].items():
        lines += [f'| {part}: {name} | {count:,} |' for name, count in counts.items()]
    return '\n'.join(lines) + '\n'


def chunks_in(file: Path, part: str) -> list[dict[str, int]]:
    """The counts of the chunks of a part that are done."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row['counts'] for row in rows if row['part'] == part]


def summed(rows: list[dict[str, int]]) -> dict[str, int]:
    """The counts of chunks together. `places` and `arrays` are the same in all of them."""
    names = dict.fromkeys(name for row in rows for name in sorted(row))
    return {
        name: max(row.get(name, 0) for row in rows)
        if name in ('places', 'arrays')
        else sum(row.get(name, 0) for row in rows)
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--flips', type=int, default=10000, help='in the replayed program')
    parser.add_argument('--state-flips', type=int, default=2000, help='in replicas of the state')
    parser.add_argument('--file-flips', type=int, default=2000, help='in files of a checkpoint')
    parser.add_argument('--clean', type=int, default=100000, help='replayed steps without a fault')
    parser.add_argument('--directory', type=Path, default=Path(__file__).parent / 'results')
    parser.add_argument('--chunks', type=Path, help='what was done so far; default: bit-flips.jsonl in --directory')
    asked = parser.parse_args()
    file = asked.chunks or asked.directory / 'bit-flips.jsonl'
    wanted = (asked.flips, asked.state_flips, asked.file_flips, asked.clean)
    for (part, (size, make)), count in zip(PARTS.items(), wanted, strict=True):
        first, began = len(chunks_in(file, part)), time.perf_counter()
        numbers = range(first, -(-count // size))
        if not numbers:
            continue
        with tempfile.TemporaryDirectory() as directory:
            seeds = ((number, np.random.default_rng([list(PARTS).index(part), number])) for number in numbers)
            for counts in make(Path(directory), size, seeds):
                with file.open('a') as lines:
                    lines.write(json.dumps({'part': part, 'counts': counts}) + '\n')
                print(f'{time.perf_counter() - began:.0f} s: {part}: {counts}', flush=True)
    parts = {part: summed(chunks_in(file, part)) for part in PARTS}
    write_result({**circumstances(), 'parts': parts}, table, asked.directory, 'bit-flips')


if __name__ == '__main__':
    main()
