"""SIGKILL of processes whose states are in memory, without a checkpoint: two steps are lost at most.

What follows equals an undisturbed run, bit for bit.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from launched import Launched, Training, environment, undisturbed, write_run
from pretrax import config_from_values
from pretrax.distill.preparation import prepare_cache
from pretrax.launch.group import free_port, identity
from pretrax.launch.host_memory import HostMemory
from pretrax.launch.local import devices_of, pretrax_command
from run.test_restart_matrix import FEATURES, SPIKES, TEACHER
from runs import small_values, write_documents

IN_MEMORY = {'every': 0, 'memory': {'every': 1}}


def killed(config, run_dir, kills, *options):
    """Kills a process of each of so many attempts, at random steps. Returns the losses, and what the launcher said."""
    moments = random.Random(run_dir.name)
    places = set()
    with Launched(config, run_dir, '-n', '2', *options) as run:
        for attempt in range(1, kills + 1):
            run.until_step(attempt, moments.randrange(1, 5))
            variables = Path(f'/proc/{run.pid(0)}/environ').read_text().split('\0')
            places.add(next(text for text in variables if text.startswith('PRETRAX_MEMORY=')))
            os.kill(run.pid(moments.randrange(2)), signal.SIGKILL)
            run.until(lambda n=attempt: run.events('ended')[n - 1 :], f'the end of attempt {attempt}')
            newest = run.step()  # of all steps that were done
            began = run.until(lambda n=attempt: run.events('began')[n:], f'attempt {attempt + 1}')[0]['step']
            assert newest - 2 <= began <= newest, run.said  # two if a state takes longer to write than a step
        assert run.wait() == 0, run.said
    assert run.checkpoints()[-1] == max(run.losses())
    assert len(places) == 1
    assert not Path(places.pop().partition('=')[2]).exists()
    return run.losses(), run.said


def test_a_killed_process_costs_two_steps_at_most(tmp_path):
    config = write_run(tmp_path, checkpoint=IN_MEMORY, steps=40)
    losses, said = killed(config, tmp_path / 'killed', 3)
    assert losses == undisturbed(config, tmp_path / 'straight', 2)
    assert said.count('memory of this machine') == 3
    assert 'attempts in a row without a new checkpoint' not in said


@pytest.mark.parametrize(('before', 'after'), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_from_memory(before, after, tmp_path):
    """The weights are sharded over the processes, and the memory has no other copy of them."""
    faults = {'heartbeat_seconds': 60}  # nothing starts a process again that is slow
    batch = {'tokens': 256, 'sequence_length': 16}
    config = write_run(tmp_path, checkpoint=IN_MEMORY, steps=30, batch=batch, faults=faults)
    run = Training(tmp_path / 'run')

    @contextlib.contextmanager
    def training(count, memory):
        address, mesh = f'127.0.0.1:{free_port("127.0.0.1")}', (f'mesh.d={count}', 'mesh.r=1', '--allow-changes')
        command = pretrax_command('train', str(config), f'run_dir={run.run_dir}', *mesh)
        variables = [identity(i, [''] * count, address) | devices_of(i, 1) | memory.environment for i in range(count)]
        processes = [subprocess.Popen(command, env=environment(**each)) for each in variables]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    with HostMemory() as memory:
        with training(before, memory) as processes:
            while not (run.run_dir / 'metrics.jsonl').is_file() or run.step() < 5:
                assert all(process.poll() is None for process in processes)
                time.sleep(0.01)
        kept = memory.newest()
        assert kept >= run.step() - 1 > 3
        with training(after, memory) as processes:
            assert [process.wait() for process in processes] == [0] * after
    assert run.events('began')[1]['step'] == kept
    straight = undisturbed(config, tmp_path / 'straight', before, f'mesh.d={before}', 'mesh.r=1')
    losses = run.losses()
    assert [losses[step] for step in range(1, kept + 1)] == [straight[step] for step in range(1, kept + 1)]
    np.testing.assert_allclose(list(losses.values()), list(straight.values()), rtol=1e-5)


# Steps that take a moment, so that a process is killed in the middle of a run.
SLOW = """
import time
from pretrax.checkpoint.memory import Memory
is_due = Memory.is_due
Memory.is_due = lambda self, step: time.sleep(0.05) or is_due(self, step)
"""
OTHERS = {
    'dense': {},
    'dropout': {'model': {'dropout': 0.1}},
}


@pytest.mark.slow
@pytest.mark.parametrize('feature', [*OTHERS, *FEATURES])
def test_a_killed_run_with_a_feature_goes_on_from_memory_as_if_it_had_not_been(feature, tmp_path):
    write_documents(tmp_path)
    (tmp_path / 'spikes.py').write_text(SPIKES)
    (tmp_path / 'slow.py').write_text(SLOW)
    more = json.loads(json.dumps((OTHERS | FEATURES)[feature]).replace('DIRECTORY', str(tmp_path)))
    steps, is_nnx = more.get('steps', 24), more.get('model', {}).get('name') == 'nnx'
    values = small_values('none', tmp_path) | {'data': {'name': 'synthetic', 'vocab_size': 96}} | more
    values |= {'mesh': {'d': 2}, 'schedule': {'name': 'constant', 'warmup': 2}, 'steps': steps}
    values |= {
        'checkpoint': IN_MEMORY | more.get('checkpoint', {}),
        'faults': {'heartbeat_seconds': 3} | more.get('faults', {}),
    }
    values['log'] = {'every': 1, 'report': False}  # without the noise scale, which has lines of its own
    values['plugins'] = [*more.get('plugins', []), str(tmp_path / 'slow.py')]
    if not is_nnx:
        sizes = {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}}
        values['model'] = sizes | more.get('model', {})
    values['optimizer'] = {'learning_rate': 1e-2, 'weight_decay': 0.1} | more.get('optimizer', {})
    if cache := values.get('distill', {}).get('cache'):
        said = values | {'distill': {'teacher': TEACHER, 'temperature': 2.0}, 'plugins': [], 'mesh': {'d': 8}}
        prepare_cache(config_from_values(said), Path(cache), 96, lambda _: None)
    config = tmp_path / 'run.yaml'
    config.write_text(json.dumps({key: value for key, value in values.items() if key != 'run_dir'}))
    losses, said = killed(config, tmp_path / 'killed', 2)
    assert said.count('memory of this machine') == 2
    assert losses == undisturbed(config, tmp_path / 'straight', 2)
