"""Identity under Open MPI: as its variables name it, as JAX understands version 4, and from a real `mpirun`."""

import json
import shutil
import subprocess
import sys

import pytest
from jax._src.clusters.ompi_cluster import OmpiCluster

from pretrax.errors import UserError
from pretrax.system.launchers import mpi_identity


def rank(index, count, local, **more):
    """Variables of a process as `mpirun` 5.0.11 sets them."""
    return {
        'OMPI_COMM_WORLD_SIZE': str(count), 'OMPI_COMM_WORLD_RANK': str(index),
        'OMPI_COMM_WORLD_LOCAL_RANK': str(index % local),
        'OMPI_COMM_WORLD_LOCAL_SIZE': str(local), **more,
    }  # fmt: skip


def five(index, host, count=4, local=2):
    return rank(
        index, count, local, PMIX_NAMESPACE='prterun-node-01-18705@1', PMIX_HOSTNAME=host, OMPI_VERSION='5.0.11'
    )


def test_version_5_needs_no_mpi4py():
    found = [mpi_identity(None, five(i, host)) for i, host in enumerate(('node-01', 'node-01', 'b', 'b'))]
    assert [(count, index, device) for count, index, _, device in found] == [(4, 0, 0), (4, 1, 1), (4, 2, 0), (4, 3, 1)]
    [address] = {address for _, _, address, _ in found}
    assert address.startswith('node-01:')
    assert 1024 < int(address.rpartition(':')[2]) < 65536
    assert mpi_identity(None, five(0, 'any', count=2))[2].startswith('localhost:'), 'all on one host'


def test_an_address_that_cannot_be_right_is_refused_by_process_0():
    with pytest.raises(UserError, match='mpirun -x JAX_COORDINATOR_ADDRESS=other:'):
        mpi_identity(None, five(0, 'other'))
    assert mpi_identity('other:1', five(0, 'other')) == (4, 0, 'other:1', 0)
    with pytest.raises(UserError, match='JAX_COORDINATOR_ADDRESS=HOST'):
        mpi_identity(None, rank(1, 4, 2))


@pytest.mark.parametrize(
    'uri', ['1531576320.0;tcp://10.96.0.1,10.148.0.1:34911', '1314521088.0;tcp6://[fe80::b9b:ac5d,2620::2]:43370']
)
def test_version_4_across_hosts_has_the_host_that_jax_finds(uri, monkeypatch):
    variables = rank(3, 4, 2, OMPI_MCA_orte_hnp_uri=uri)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    host = OmpiCluster.get_coordinator_address(60, None).rpartition(':')[0]
    assert mpi_identity(None, variables)[2].rpartition(':')[0] == host


def test_one_process_and_other_programs_are_alone():
    assert mpi_identity(None, {}) is None
    assert mpi_identity(None, five(0, 'a', count=1, local=1)) is None
    assert mpi_identity(None, {'OMPI_COMM_WORLD_SIZE': '2'}) is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('mpirun') is None, reason='needs Open MPI: apt-get install openmpi-bin')
def test_a_real_mpirun_numbers_its_processes():
    program = (
        'import json; from pretrax.system.launchers import mpi_identity; print(json.dumps(mpi_identity()), flush=True)'
    )
    command = ['mpirun', '--allow-run-as-root', '--oversubscribe', '-n', '2', sys.executable, '-c', program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (_, _, one, _), (_, _, other, _) = found = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [(count, index, device) for count, index, _, device in found] == [(2, 0, 0), (2, 1, 1)]
    assert one == other
