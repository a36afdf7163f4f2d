"""`pretrax checkpoint diff`."""

import shutil

import numpy as np
import pytest

from checkpoint_verbs import arrays, edit_manifest, said


def test_diff_orders_arrays_by_how_far_they_lie_apart(run, capsys):
    """Against NumPy, and against itself."""
    _, out, _ = said(capsys, 'diff', run / 'checkpoints' / '6', run, '--most', '3')
    a, b = arrays(run, 6), arrays(run, 8)
    apart = {name: np.linalg.norm(b[name].astype(np.float64) - a[name]) for name in a}
    first = sorted(apart, key=lambda name: -apart[name])[:3]
    shown = [line.split() for line in out.splitlines() if line.split()[-1] in a]
    assert [line[-1] for line in shown] == first
    for norm, relative, *_, name in shown:
        assert float(norm) == pytest.approx(apart[name], rel=1e-3)
        assert float(relative) == pytest.approx(apart[name] / np.linalg.norm(a[name]), rel=1e-2)
    assert 'configuration: 0 values differ' in out
    _, out, _ = said(capsys, 'diff', run, run, '--optimizer')
    assert f'weights: {len(a)} of {len(a)} arrays of one shape are equal' in out
    assert 'optimizer: 0 arrays differ in shape' in out


def test_diff_of_two_models_names_keys_and_shapes(run, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / 'other')
    edit_manifest(other, 8, lambda m: m['description']['config']['model'].update(d_model=32))
    _, out, _ = said(capsys, 'diff', run, other)
    assert 'configuration: 1 values differ\n  model.d_model: 16 -> 32' in out
