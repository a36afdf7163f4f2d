"""Flips single bits while a model trains, and counts which of them replays see, and which device they blame.

    uv run python benchmarks/bit_flips.py --flips 10000 --clean 1000

The model is small, and the devices are simulated on CPUs: what is measured is whether a flip is seen, not time.
A flip is in a result of one equation on one device (an activation, a gradient, a gathered weight), in one turn of its
loops, and happens once (in one of the runs of a replay) or always (in all of them). Other flips are in one replica of
an array of the state. A flip that changes no value that a device sends or returns changes no gradient: for these
flips, the gradients themselves are compared bit for bit.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == '__main__':  # before JAX is imported
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from result_files import circumstances, write_result

from pretrax import config_from_values
from pretrax.run.clock import Clock
from pretrax.run.replay import Replay
from pretrax.run.setup import prepare
from pretrax.run.start import initial_state
from pretrax.shardlib import digests
from pretrax.shardlib.ops import vary
from pretrax.shardlib.replication import settle
from pretrax.train.replay import make_replay
from pretrax.train.step import TrainState

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
    truth: Any = None
    clean = np.zeros(0)
    unseen: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        flips.places = places
        fault = flips.draw(rng, campaign.n_devices)
        kind = 'always' if rng.random() < 0.5 else 'once'
        flips.aim(**fault, runs=None if kind == 'always' else frozenset({int(rng.integers(2))}))
        found = campaign.find()
        counts[f'{kind}, injected'] += 1
        if found:
            counts[f'{kind}, seen, {campaign.verdict(found, fault["device"])}'] += 1
        else:
            if truth is None:
                flips.rest()
                truth = make_truth(campaign)
                clean = truth()
            flips.aim(**fault)
            changes = not np.array_equal(truth(), clean)
            counts[f'{kind}, {"not seen" if changes else "changes nothing"}'] += 1
            unseen[places[fault['place']].name.split()[0]] += changes
        flips.rest()
    of_unseen = {f'not seen, in {name}': count for name, count in sorted(unseen.items()) if count}
    return {'places': len(places), **dict(sorted(counts.items())), **of_unseen}


def make_truth(campaign: Campaign) -> Any:
    """A function that returns all bits that the devices send and return, with the fault at that time."""
    digest, digests.digest = digests.digest, all_bits
    try:
        program = make_replay(campaign.run.recipe)[0]
        compiled = program.lower(campaign.state, campaign.batch, np.bool_(False)).compile()
    finally:
        digests.digest = digest
    return lambda: np.asarray(compiled(campaign.state, campaign.batch, np.bool_(False)))


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


def replay_without_faults(campaign: Campaign, count: int) -> dict[str, int]:
    """Replays of different batches. Each one runs the program three times."""
    for number in range(count):
        campaign.batch = campaign.run.batch(number)
        campaign.replay.check(number + 1, campaign.state, campaign.batch)
    return {'replays': campaign.replay.replays, 'differences': campaign.replay.differences}


def table(result: dict[str, Any]) -> str:
    """The counts as Markdown."""
    lines = [f'# Bit flips, {result["date"]}', '', f'`{result["command"]}`, {result["processor"]}', '']
    lines += ['| what | count |', '|---|---|']
    for part, counts in result['parts'].items():
        lines += [f'| {part}: {name} | {count:,} |' for name, count in counts.items()]
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--flips', type=int, default=1000, help='in the replayed program')
    parser.add_argument('--state-flips', type=int, default=1000, help='in replicas of the state')
    parser.add_argument('--clean', type=int, default=1000, help='replays without a fault')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--directory', type=Path, default=Path(__file__).parent / 'results')
    arguments = parser.parse_args()
    rng, parts = np.random.default_rng(arguments.seed), {}
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        with Flips() as flips, Campaign(Path(directory) / 'a', d=4, t=2) as campaign:
            parts['computation, d=4 t=2'] = flip_in_replays(campaign, flips, arguments.flips, rng)
        print(parts, f'{time.perf_counter() - began:.0f} s', flush=True)
        with Campaign(Path(directory) / 'b', r=4, d=2) as campaign:
            parts['state, r=4 d=2'] = flip_in_state(campaign, arguments.state_flips, rng)
        print(parts, f'{time.perf_counter() - began:.0f} s', flush=True)
        with Campaign(Path(directory) / 'c', d=4, t=2) as campaign:
            parts['no fault, d=4 t=2'] = replay_without_faults(campaign, arguments.clean)
    write_result({**circumstances(), 'parts': parts}, table, arguments.directory, 'bit-flips')


if __name__ == '__main__':
    main()
