"""The notebook of examples/nnx_gpt2, executed as a user would: from its first cell to its last, in its own directory."""

import json
import math
import os
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

EXAMPLE = Path(__file__).parents[2] / 'examples' / 'nnx_gpt2'


@pytest.mark.slow
def test_the_notebook_trains_and_writes_text(tmp_path, monkeypatch):
    for name in ('IPYTHONDIR', 'JUPYTER_RUNTIME_DIR', 'JUPYTER_CONFIG_DIR'):
        monkeypatch.setenv(name, str(tmp_path / name))
    place = shutil.copytree(EXAMPLE, tmp_path / 'example', ignore=shutil.ignore_patterns('__pycache__', 'runs'))
    notebook = nbformat.read(EXAMPLE / 'walk_through.ipynb', as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert notebook.nbformat == 4
    assert not any(cell.outputs or cell.execution_count for cell in code)  # outputs are not kept in the repository

    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}  # as a user's: no 8 devices
    client = nbclient.NotebookClient(notebook, timeout=300, resources={'metadata': {'path': str(place)}})
    client.execute(env=environment)

    lines = (place / 'runs' / 'nnx-walk-through' / 'metrics.jsonl').read_text().splitlines()
    losses = [metrics['loss'] for metrics in map(json.loads, lines) if 'loss' in metrics]
    assert len(losses) == 10
    assert abs(losses[0] - math.log(300)) < 0.2
    assert losses[-1] < losses[0] - 0.5
    plot, text = printed(code[-2]), printed(code[-1])
    assert [float(line.split()[1]) for line in plot.splitlines()] == [round(loss, 3) for loss in losses]
    assert text.startswith('def ')
    assert len(text) > 20


def printed(cell):
    return ''.join(output.text for output in cell.outputs if output.output_type == 'stream' and output.name == 'stdout')
