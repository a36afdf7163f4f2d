"""examples/skypilot.yaml: SkyPilot's own parser accepts it, and its commands give each node its identity."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / 'examples' / 'skypilot.yaml'
PARSE = 'import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes, *task.resources)'


@pytest.mark.slow
def test_skypilot_reads_it_and_refuses_a_wrong_key(tmp_path):
    """In an environment of its own: SkyPilot has a hundred dependencies."""
    wrong = tmp_path / 'wrong.yaml'
    wrong.write_text(EXAMPLE.read_text().replace('num_nodes', 'num_nodess'))
    environment = os.environ | {'HOME': str(tmp_path), 'UV_CACHE_DIR': os.environ.get('UV_CACHE_DIR',
    str(Path.home() / '.cache/uv'))}  # fmt: skip
    command = ['uv', 'run', '-q', '--isolated', '--no-project', '--with', 'skypilot>=0.14', 'python', '-c', PARSE]
    good, bad = (
        subprocess.run([*command, str(path)], capture_output=True, text=True, env=environment, cwd=EXAMPLE.parents[1])
        for path in (EXAMPLE, wrong)
    )
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith('4 ')
    assert "'H100': 8" in good.stdout
    assert 'num_nodess' in bad.stderr


@pytest.mark.parametrize('rank', [0, 3])
def test_its_command_gives_each_node_its_identity(tmp_path, rank):
    """With the variables that docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html promises."""
    uv = tmp_path / 'uv'
    uv.write_text('#!/bin/sh\necho "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $*"\n')
    uv.chmod(0o755)
    variables = {
        'SKYPILOT_NODE_IPS': '10.0.0.7\n10.0.0.8\n10.0.0.9\n10.0.0.10', 'SKYPILOT_NUM_NODES': '4',
        'SKYPILOT_NODE_RANK': str(rank), 'RUN_DIR': 'gs://bucket/runs/base', 'PATH': f'{tmp_path}:{os.environ["PATH"]}',
    }  # fmt: skip
    script = yaml.safe_load(EXAMPLE.read_text())['run']
    done = subprocess.run(['bash', '-eu', '-c', script], env=variables, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[:3] == ['10.0.0.7:8476', '4', str(rank)]
    assert words[3:8] == ['run', 'pretrax', 'launch', 'node', 'configs/quickstart.yaml']
    assert 'run_dir=gs://bucket/runs/base' in words
