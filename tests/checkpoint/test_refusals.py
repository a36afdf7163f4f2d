"""A checkpoint that cannot be restored is refused in words.

Each in a process of its own: Orbax leaves reads behind that it no longer waits for, and pytest would blame a later test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.test_store import saved, state_on
from small import mesh_of

RESTORE = """
import pathlib, jax
from checkpoint.test_store import restored
from small import LLAMA, mesh_of, transformer
from train.bigram import Bigram

class Wider(Bigram):
    def init(self, key):
        return jax.tree.map(lambda w: jax.numpy.zeros([2 * n for n in w.shape]), super().init(key))

restored(pathlib.Path({directory!r}), 2, mesh_of(), {model})
"""


def refusal_of(directory, model):
    code = RESTORE.format(directory=str(directory), model=model)
    environment = os.environ | {'PYTHONPATH': str(Path(__file__).parents[1])}
    run = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    return run.stderr


def test_damage_is_told(tmp_path):
    """Files of arrays that are cut in half: the state is not restored wrong."""
    saved(tmp_path, state_on(mesh_of()))
    arrays = [path for path in (tmp_path / '2' / 'state').rglob('*') if path.parent.name == 'd']
    largest = max(arrays, key=lambda path: path.stat().st_size)
    assert largest.stat().st_size > 10_000
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    complaint = refusal_of(tmp_path, 'Bigram()')
    assert f'UserError: the checkpoint {tmp_path / "2"} cannot be restored' in complaint
    assert 'is not valid for value of size' in complaint


@pytest.mark.parametrize('model', ['Wider()', 'transformer(LLAMA)'])
def test_another_model_is_refused(model, tmp_path):
    """Of other weights, or of the same ones in another size."""
    saved(tmp_path, state_on(mesh_of(), steps=0))
    complaint = refusal_of(tmp_path, model)
    assert f'UserError: the checkpoint {tmp_path / "2"} cannot be restored' in complaint
    assert 'may not be the one that wrote it' in complaint
