"""What processes tell each other is deleted from the coordinator when all of them have read it."""

import os
import socket
import subprocess

import pytest

from preloaded import programs

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
state = {'weights': {'table': jax.make_array_from_callback((64, 8), sharding, lambda index: jax.numpy.ones((64, 8))[index])}}
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
        with socket.socket() as free:
            free.bind(('localhost', 0))
            address = f'localhost:{free.getsockname()[1]}'
        both = [
            subprocess.Popen(
                [programs() / 'python', '-c', SAVES, str(tmp_path / str(n)), address, str(index), str(n)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, 'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': '1'},
            )
            for index in range(2)
        ]  # fmt: skip
        try:
            printed, complaints = zip(*(process.communicate(timeout=300) for process in both), strict=True)
        finally:
            for process in both:
                process.kill()
        assert [process.returncode for process in both] == [0, 0], complaints
        left.append(int(printed[0].splitlines()[-1]))
    assert left[0] == left[1] <= 4
