"""Replicas in several processes: storage is read once, whatever number of replicas there is, and bits are copied."""

import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pretrax.checkpoint import Checkpoints
from side_by_side import coordinator_address, run_side_by_side

DTYPES = ('float32', 'bfloat16', 'float16', 'float8_e4m3fn', 'int8', 'int32', 'uint8', 'uint16', 'uint32', 'bool')

# Restores a checkpoint on a mesh, and prints the bytes of each file that it reads, and of what is on its devices.
RESTORES = """
import collections, json, sys
import jax, numpy as np
from pathlib import Path
from pretrax.checkpoint import files, restore
from pretrax.checkpoint.store import DamagedError

directory, address, index, n, mesh, dtypes = Path(sys.argv[1]), sys.argv[2], *map(json.loads, sys.argv[3:])
jax.distributed.initialize(address, n, index)
read = collections.Counter()
class Counted:
    def __init__(self, stream, name):
        self.stream, self.name = stream, name
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.stream.close()
    def __getattr__(self, name):
        return getattr(self.stream, name)
    def readinto(self, content):
        size = self.stream.readinto(content)
        read[self.name] += size
        return size

from pretrax.checkpoint import chunks
open_file = chunks.open_file
chunks.open_file = lambda place, name, *more: Counted(open_file(place, name, *more), name)
mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
def sharding(*spec):
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
like = {
    **{dtype: jax.ShapeDtypeStruct((12, 8), dtype, sharding=sharding('d')) for dtype in dtypes},
    'all': jax.ShapeDtypeStruct((5,), 'float32', sharding=sharding()),
    'scalar': jax.ShapeDtypeStruct((), 'int32', sharding=sharding()),
    'both': jax.ShapeDtypeStruct((12, 8), 'float32', sharding=sharding('r', 'd')),
}
try:
    with jax.set_mesh(mesh):
        state = restore(directory, 1, {'weights': like})
    held = {
        name: [(str(shard.index), np.asarray(shard.data).tobytes().hex()) for shard in array.addressable_shards]
        for name, array in state['weights'].items()
    }
except DamagedError as error:
    held = str(error)
print(json.dumps([read, held]))
"""


def bits(dtype):
    """Numbers of a type with all kinds of bits, also those of NaNs and of -0."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype.kind == 'b':
        return np.arange(96).reshape(12, 8) % 3 == 0
    every = np.random.default_rng(0).integers(0, 256, 96 * dtype.itemsize, dtype=np.uint8)
    every[:16] = [0, 0, 0, 0x80, 1, 0, 0x80, 0x7F, 1, 0, 0xC0, 0xFF, 0, 0x80, 0, 0x80]
    return every.view(dtype).reshape(12, 8)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp('written')
    state = {dtype: jnp.asarray(bits(dtype)) for dtype in DTYPES}
    state |= {'all': jnp.arange(5.0), 'scalar': jnp.int32(7), 'both': jnp.asarray(bits('float32'))}
    mesh = jax.make_mesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('d'))
    state |= {dtype: jax.device_put(state[dtype], rows) for dtype in DTYPES}
    with Checkpoints(directory, 1) as checkpoints:
        checkpoints.save(1, {'weights': state}, {})
    return directory, {name: np.asarray(array) for name, array in state.items()}


def restored_by(directory, n, devices, mesh):
    """What each process has read and holds."""
    command = ['python', '-c', RESTORES, str(directory), coordinator_address()]
    environment = {**os.environ, 'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': str(devices)}
    commands = [[*command, *map(json.dumps, (index, n, mesh, DTYPES))] for index in range(n)]
    ended = run_side_by_side(commands, [environment] * n)
    assert not any(process.returncode for process in ended), [process.stderr[-2000:] for process in ended]
    return [json.loads(process.stdout.splitlines()[-1]) for process in ended]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('n', 'devices', 'mesh'), [(2, 2, {'r': 2, 'd': 2}), (3, 2, {'r': 3, 'd': 2}), (2, 2, {'r': 4, 'd': 1})]
)
def test_replicas_read_each_file_once_and_have_its_bits(n, devices, mesh, written):
    directory, state = written
    processes = restored_by(directory, n, devices, mesh)
    read = [found for found, _ in processes]
    for name, array in state.items():
        files = {file for found in read for file in found if file.split('/')[1] == f'weights.{name}'}
        total = sum(found.get(file, 0) for found in read for file in files)
        assert total == array.nbytes if name != 'both' else total <= n * array.nbytes, name
        for _, held in processes:
            for index, content in held[name]:
                part = eval(f'array[{index}]', {'array': array, 'slice': slice})
                assert content == np.ascontiguousarray(part).tobytes().hex(), (name, index)
    busy = [sum(found.values()) for found in read]
    assert min(busy) > max(busy) / 3  # the replicas divide the arrays


@pytest.mark.slow
def test_damage_that_one_replica_finds_is_told_to_all_and_none_waits(written, tmp_path):
    import shutil

    directory, _ = written
    shutil.copytree(directory, tmp_path / 'damaged')
    file = tmp_path / 'damaged/1/state/weights.int32/1.0'
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    for _, held in restored_by(tmp_path / 'damaged', 2, 2, {'r': 2, 'd': 2}):
        assert 'weights.int32/1.0 differs from what was written' in held
