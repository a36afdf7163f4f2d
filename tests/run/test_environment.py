"""A run writes what it ran on, without secrets."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import jax

from pretrax import config_from_values, pretrain
from pretrax.run.environment import git_state, memory_line
from runs import Quiet


def test_a_run_writes_its_versions_hardware_and_sizes(values):
    progress = Quiet()
    result = pretrain(config_from_values(values | {'steps': 2, 'schedule': {}}), progress=progress)
    found = json.loads((Path(values['run_dir']) / 'environment.json').read_text())
    assert found['versions']['python'] == platform.python_version()
    assert found['versions']['jax'] == version('jax')
    assert (found['platform'], found['devices'], found['processes']) == ('cpu', 8, 1)
    assert found['mesh'] == {'r': 2, 'd': 2, 'e': 1, 'c': 1, 't': 2, 'p': 1}
    assert [device for device, _ in found['mesh_devices']] == [device.id for device in result.run.mesh.devices.flat]
    stored = sum(leaf.size for leaf in jax.tree.leaves(result.state.weights))
    tables = [result.state.weights.embed, result.state.weights.unembed]
    padding = sum(table.size - result.run.source.vocab_size * table.shape[1] for table in tables)
    assert padding > 0  # rows that make the tables divisible are no parameters of the model
    assert found['parameters'] == stored - padding
    mfu = result.metrics['tokens_per_second'] * found['flops_per_token'] / (8 * found['peak_flops'])
    assert abs(mfu / result.metrics['mfu'] - 1) < 1e-9
    memory = found['memory']
    state = 3 * 4 * stored / 4  # weights and two moments, over d and t
    assert sum(memory['planned'].values()) > state
    assert memory['compiled'] > state
    assert memory['peak'] >= memory['compiling'] >= memory['before'] > 1e8, 'a process with JAX'
    assert memory_line(memory) in progress.said
    assert memory_line(
        {'peak': 3e9, 'before': 1e9, 'compiling': 2e9, 'compiled': 2e8, 'planned': {'weights': 5e7, 'moments': 1e8}}
    ) == (
        'memory: 3 GB at most in the whole process, 1 GB of it before compiling, 2 GB of it before the first step; '
        'per device 200 MB compiled for the step, 150 MB planned by formula'
    )
    assert memory_line({'peak': 3e9, 'planned': None}) == 'memory: 3 GB at most in one device'
    assert found['step']['seconds'] > 0


def test_the_commit_is_that_of_the_repository(tmp_path):
    inside = tmp_path / 'repository' / 'src'
    inside.mkdir(parents=True)
    assert git_state(inside.parent) is None
    git = ['git', '-C', str(inside.parent), '-c', 'user.name=a', '-c', 'user.email=b']
    (inside / 'file').write_text('1')
    for command in (['init', '-q'], ['add', '.'], ['commit', '-qm', 'first']):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, 'rev-parse', 'HEAD'], check=True, capture_output=True, text=True).stdout.strip()
    assert git_state(inside) == {'commit': commit, 'changed': False}
    (inside / 'file').write_text('2')
    git_state.cache_clear()
    assert git_state(inside) == {'commit': commit, 'changed': True}
