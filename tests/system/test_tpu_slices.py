"""Identity on slices of TPUs: from the variables of GKE,
and from the metadata server of TPU VMs, as JAX understands both.
"""

import contextlib
import os
import subprocess

import pytest
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

from launched import PRETRAX, environment, write_run
from metadata_server import TPU_VM, serve_metadata
from preloaded import programs
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.system.launchers import slice_identity
from side_by_side import free_port


def gke(hosts, slices, worker, this):
    names = [f'run-train-{this}-{n}.run' for n in range(hosts)]
    found = {'TPU_WORKER_ID': str(worker), 'TPU_WORKER_HOSTNAMES': ','.join(names)}
    if slices > 1:
        found |= {
            'MEGASCALE_NUM_SLICES': str(slices), 'MEGASCALE_SLICE_ID': str(this),
            'MEGASCALE_COORDINATOR_ADDRESS': 'run-train-0-0.run:8080',
        }  # fmt: skip
    return found


@pytest.mark.parametrize(('hosts', 'slices'), [(4, 1), (1, 3), (2, 2), (16, 4)])
def test_processes_are_numbered_as_jax_numbers_them(hosts, slices, monkeypatch):
    monkeypatch.setattr(GkeTpuCluster, 'wait_for_coordinator', lambda *_: None)
    monkeypatch.setattr('jax._src.clusters.cloud_tpu_cluster.get_tpu_env_value', os.environ.get)
    for this in range(slices):
        for worker in range(hosts):
            with pytest.MonkeyPatch.context() as patched:
                for name, value in gke(hosts, slices, worker, this).items():
                    patched.setenv(name, value)
                address = GkeTpuCluster.get_coordinator_address(60, None)
                expected = GkeTpuCluster.get_process_count(), GkeTpuCluster.get_process_id(), address
                assert slice_identity() == expected


def test_a_single_host_and_other_machines_are_alone():
    assert slice_identity({}) is None
    assert slice_identity({'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}) is None


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({'TPU_WORKER_ID': '2'}, "TPU_WORKER_ID='2': expected 0 to 1"),
        ({'TPU_WORKER_ID': ''}, r'TPU_WORKER_ID=\(not set\)'),
        ({'MEGASCALE_SLICE_ID': 'x'}, "MEGASCALE_SLICE_ID='x': expected 0 to 1"),
        ({'MEGASCALE_NUM_SLICES': '0'}, 'MEGASCALE_NUM_SLICES'),
        ({'MEGASCALE_COORDINATOR_ADDRESS': ''}, 'MEGASCALE_COORDINATOR_ADDRESS is not set'),
    ],
)
def test_an_incomplete_identity_is_refused(changes, expected):
    with pytest.raises(UserError, match=expected):
        slice_identity(gke(2, 2, 1, 1) | changes)


def train_together(config, run_dir, environments, program=None):
    processes = [
        subprocess.Popen(
            [program or programs() / 'pretrax', 'train', str(config), f'run_dir={run_dir}', 'mesh.d=4'],
            env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for changes in environments
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), '\n'.join(said)
    return {line['step']: line['loss'] for line in read_metrics(run_dir / 'metrics.jsonl')}


@pytest.mark.slow
def test_two_slices_of_two_workers_train_as_four_processes_do(tmp_path):
    """By variables of GKE, by the metadata server, and by JAX's own variables: the same losses."""
    config = write_run(tmp_path, steps=8, plugins=['plugin.py', 'tpu_vm.py'])
    (tmp_path / 'tpu_vm.py').write_text(TPU_VM)
    places = [(this, worker) for this in range(2) for worker in range(2)]
    plain, by_gke, by_server = [], [], []
    ports = [free_port() for _ in range(3)]
    with contextlib.ExitStack() as servers:
        for number, (this, worker) in enumerate(places):
            # The plugin reads the number of the process.
            plain.append({
                'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{ports[0]}', 'JAX_NUM_PROCESSES': '4',
                'JAX_PROCESS_ID': str(number),
            })  # fmt: skip
            hosts = {'TPU_WORKER_HOSTNAMES': '127.0.0.1,127.0.0.1', 'MEGASCALE_COORDINATOR_ADDRESS': '127.0.0.1'}
            by_gke.append(gke(2, 2, worker, this) | hosts | {'JAX_COORDINATOR_PORT': str(ports[1])})
            slices = {
                'MEGASCALE_COORDINATOR_ADDRESS': '127.0.0.1',
                'MEGASCALE_NUM_SLICES': '2',
                'MEGASCALE_SLICE_ID': this,
            }
            attributes = {
                'agent-worker-number': str(worker), 'worker-network-endpoints': 'a:1:127.0.0.1,b:2:127.0.0.1',
                'tpu-env': ''.join(f"{name}: '{value}'\n" for name, value in slices.items()),
            }  # fmt: skip
            address = servers.enter_context(serve_metadata(attributes))
            by_server.append({
                'GCE_METADATA_IP': address, 'JAX_FORCE_TPU_INIT': '1', 'JAX_COORDINATOR_PORT': str(ports[2]),
            })  # fmt: skip
        expected = train_together(config, tmp_path / 'plain', plain)
        assert len(expected) == 8
        assert train_together(config, tmp_path / 'gke', by_gke) == expected
        # JAX reads JAX_FORCE_TPU_INIT when it is imported, so that this is not a fork.
        assert train_together(config, tmp_path / 'server', by_server, PRETRAX) == expected
