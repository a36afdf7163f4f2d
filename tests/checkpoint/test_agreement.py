"""What processes tell each other is deleted from the coordinator when all of them have read it."""

import os

import pytest

from side_by_side import coordinator_address, run_side_by_side

SAVES = """
import sys
import jax
from pretrax.checkpoint import Checkpoints
from pretrax.jax_compat import coordination_client
from pathlib import Path

directory, address, index, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.distributed.initialize(address, 2, index)
mesh = jax.make_mesh((2,), ('d',))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('d'))
table = jax.make_array_from_callback((64, 8), sharding, lambda index: jax.numpy.ones((64, 8))[index])
state = {'weights': {'table': table}}
with Checkpoints(directory, 2) as checkpoints:
    checkpoints.continue_from(0)
    for step in range(1, n + 1):
        checkpoints.save(step, state, {})
        checkpoints.wait()
        if step == n and index == 0:
            print(sum(key.startswith('pretrax/') for key, _ in coordination_client().key_value_dir_get('pretrax/')))
"""


@pytest.mark.slow
def test_no_keys_are_left_in_the_coordinator_by_saves(tmp_path):
    """It kept a key for each process and file of each save, about 1 MB at 9,000 files."""
    left = []
    for n in (2, 8):
        command = ['python', '-c', SAVES, str(tmp_path / str(n)), coordinator_address()]
        environment = {**os.environ, 'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': '1'}
        both = run_side_by_side([[*command, str(index), str(n)] for index in range(2)], [environment] * 2)
        assert [process.returncode for process in both] == [0, 0], [process.stderr for process in both]
        left.append(int(both[0].stdout.splitlines()[-1]))
    assert left[0] == left[1] <= 4
