"""Ctrl-C before the first step: exit code 130 and no traceback, while modules are imported,
data is read and the step compiles.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preloaded import programs

# Python runs this file at its start. Ctrl-C comes while a module is imported, or in a callback there.
AT_IMPORT = """
import os, signal, sys, weakref

class AtImport:
    def find_spec(self, name, path, target=None):
        if name == os.environ['AT']:
            if 'CALLBACK' in os.environ:
                dies = AtImport()
                signals = weakref.ref(dies, lambda _: os.kill(os.getpid(), signal.SIGINT))
                del dies
            else:
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, AtImport())
"""


@pytest.mark.parametrize(
    ('module', 'verb', 'more'),
    [
        ('pretrax.cli', 'train', {}),
        ('typer', 'train', {'CALLBACK': ''}),
        ('pretrax.config.schema', 'train', {}),
        ('jax._src.core', 'train', {}),
        ('jax', 'train', {'CALLBACK': ''}),
        ('pretrax.view.charts.curves', 'plot', {}),
        ('pretrax.launch.local', 'launch local -n 2', {}),
        ('pretrax.experiments.bench', 'bench', {}),
    ],
)
def test_ctrl_c_while_a_module_is_imported(tmp_path, module, verb, more):
    (tmp_path / 'sitecustomize.py').write_text(AT_IMPORT)
    run = subprocess.run(
        [Path(sys.executable).with_name('pretrax'), *verb.split(), 'quickstart'], capture_output=True, text=True,
        cwd=tmp_path, env=os.environ | {'PYTHONPATH': str(tmp_path), 'AT': module} | more,
    )  # fmt: skip
    assert (run.returncode, run.stderr.strip()) == (130, '')
    assert not (tmp_path / 'runs').exists()


PLUGIN = """
import os, signal
from pretrax.config import register
from pretrax.data.batches.synthetic import SyntheticSource
from bigram import Bigram

def interrupted(place):
    if os.environ['AT'] == place:
        os.kill(os.getpid(), signal.SIGINT)

@register('data', 'interrupted')
def data(request):
    interrupted('data')
    return SyntheticSource(request, 96, 20)

class Interrupted(Bigram):
    def loss(self, *arguments, **named):
        interrupted('compilation')
        return super().loss(*arguments, **named)

@register('model', 'interrupted')
def model(request):
    return Interrupted(request.vocab_size)
"""


@pytest.mark.parametrize('place', ['data', 'compilation'])
def test_ctrl_c_before_the_first_step(tmp_path, place):
    (tmp_path / 'plugin.py').write_text(PLUGIN)
    values = {
        'name': 'run', 'steps': 2, 'plugins': ['plugin.py'], 'model': {'name': 'interrupted'},
        'data': {'name': 'interrupted'}, 'batch': {'tokens': 64, 'sequence_length': 16},
        'optimizer': {'learning_rate': 0.1},
    }  # fmt: skip
    (tmp_path / 'run.yaml').write_text(json.dumps(values))
    run = subprocess.run(
        [programs() / 'python', '-m', 'pretrax', 'train', 'run.yaml'], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {'PYTHONPATH': str(Path(__file__).parents[1]), 'AT': place, 'XLA_FLAGS': ''},
    )  # fmt: skip
    assert (run.returncode, run.stderr.strip()) == (130, '')
    assert not list((tmp_path / 'runs' / 'run').glob('checkpoints/*'))
