"""The notebooks, executed as a user would: from the first cell to the last, in a copy of their directory."""

import json
import math
import os
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted([*REPOSITORY.glob('notebooks/*.ipynb'), *REPOSITORY.glob('examples/**/*.ipynb')])
# The quickstart with less work, for notebooks that name it.
SMALL = """
extends: {quickstart}
model: {{n_layers: 1, d_model: 64}}
data: {{text: text.py, vocab_size: 300}}
batch: {{tokens: 1024, sequence_length: 64}}
schedule: {{warmup: 1}}
eval: {{batches: 1}}
sample: {{tokens: 8}}
"""


def execute(path, directory, monkeypatch, **replaced):
    """Runs a notebook in a copy of its directory. Returns that directory and the code cells with their outputs."""
    for name in ('IPYTHONDIR', 'JUPYTER_RUNTIME_DIR', 'JUPYTER_CONFIG_DIR'):
        monkeypatch.setenv(name, str(directory / name))
    place = shutil.copytree(path.parent, directory / 'copy', ignore=shutil.ignore_patterns('__pycache__', 'runs'))
    (place / 'small.yaml').write_text(SMALL.format(quickstart=REPOSITORY / 'configs' / 'quickstart.yaml'))
    (place / 'text.py').write_text(Path(json.decoder.__file__).read_text() * 6)
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    for cell in notebook.cells:
        for old, new in replaced.items():
            cell.source = cell.source.replace(old, new)
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}  # as a user's: no 8 devices
    client = nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': str(place)}})
    client.execute(env=environment)
    return place, [cell for cell in notebook.cells if cell.cell_type == 'code']


def printed(cell):
    return ''.join(output.text for output in cell.outputs if output.output_type == 'stream' and output.name == 'stdout')


def pictures(cells):
    return [cell for cell in cells if any('image/png' in output.get('data', {}) for output in cell.outputs)]


def losses(place, name):
    lines = (place / 'runs' / name / 'metrics.jsonl').read_text().splitlines()
    return [metrics['loss'] for metrics in map(json.loads, lines) if 'loss' in metrics]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_keeps_no_outputs_and_says_what_to_change_elsewhere(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == 'code')
    assert all(place in notebook.cells[0].source for place in ('Colab', 'Kaggle', 'Cloud TPU VM'))
    assert path.relative_to(REPOSITORY).as_posix() in (REPOSITORY / 'docs' / 'notebooks.md').read_text()


@pytest.mark.slow
def test_the_module_trains_and_writes_text(tmp_path, monkeypatch):
    path = REPOSITORY / 'examples' / 'nnx_gpt2' / 'walk_through.ipynb'
    place, cells = execute(path, tmp_path, monkeypatch)
    found = losses(place, 'nnx-walk-through')
    assert len(found) == 10
    assert abs(found[0] - math.log(300)) < 0.2
    assert found[-1] < found[0] - 0.5
    assert len(pictures(cells)) == 1
    text = printed(cells[-1])
    assert text.startswith('def ')
    assert len(text) > 20


@pytest.mark.slow
def test_the_first_run_trains_and_is_continued(tmp_path, monkeypatch):
    replaced = {"'quickstart'": "'small.yaml'", 'STEPS = 150': 'STEPS = 10'}
    place, cells = execute(REPOSITORY / 'notebooks' / 'first_run.ipynb', tmp_path, monkeypatch, **replaced)
    assert len(pictures(cells)) == 1
    assert printed(cells[-1]).endswith('20 steps\n')
    found = losses(place, 'first')
    assert found[-1] < found[0]


@pytest.mark.slow
def test_the_profile_has_the_time_of_each_part(tmp_path, monkeypatch):
    replaced = {"'quickstart'": "'small.yaml'", 'data.vocab_size=512': 'data.vocab_size=280'}
    path = REPOSITORY / 'notebooks' / 'reading_a_profile.ipynb'
    _, cells = execute(path, tmp_path, monkeypatch, **replaced)
    assert len(pictures(cells)) == 2
    table = next(text for text in map(printed, cells) if 'what takes most time' in text)
    assert 'layers/attention/attend' in table
    assert printed(cells[-1]).count('ms before') == 2


@pytest.mark.slow
def test_the_sharded_model_has_the_losses_of_one_device_and_the_collectives_that_the_text_names(tmp_path, monkeypatch):
    _, cells = execute(REPOSITORY / 'notebooks' / 'sharded_by_hand.ipynb', tmp_path, monkeypatch)
    texts = [printed(cell) for cell in cells]
    by_data, by_weights, error, by_both, same = [
        text for text in texts if 'all-' in text or 'psum' in text or 'largest' in text
    ]
    assert [line.split()[0] for line in by_data.splitlines()] == ['all-reduce']
    kinds = sorted(line.split()[0] for line in by_weights.splitlines())
    assert kinds == ['all-gather'] * 3 + ['all-reduce'] + ['reduce-scatter'] * 3
    assert "psum('t', x)" in error
    assert by_both.count('all-gather') == by_both.count('reduce-scatter') == 3
    differences = [float(line.split()[-6].rstrip(',')) for line in same.splitlines()]
    assert len(differences) == 3
    assert max(differences) < 1e-3
    assert len(pictures(cells)) == 1
