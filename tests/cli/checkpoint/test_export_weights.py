"""`pretrax checkpoint export-weights`."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoint_verbs import arrays, said
from pretrax.huggingface import tensor_files


@pytest.mark.parametrize('largest', [5_000_000_000, 8000])
def test_weights_leave_as_safetensors_of_our_names(largest, run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensor_files, 'LARGEST_FILE', largest)
    assert said(capsys, 'export-weights', run, tmp_path / 'out')[0] in (0, None)
    files = sorted((tmp_path / 'out').glob('*.safetensors'))
    assert (len(files) > 1) == (largest == 8000) == (tmp_path / 'out' / 'model.safetensors.index.json').exists()
    found = {name: values for file in files for name, values in load_file(file).items()}
    ours = arrays(run, 8)
    assert found.keys() == ours.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(found[name], values)
    assert said(capsys, 'export-weights', run, tmp_path / 'out')[0] == 2
    assert said(capsys, 'export-weights', run, tmp_path / 'half', '--dtype', 'int8')[0] == 2
