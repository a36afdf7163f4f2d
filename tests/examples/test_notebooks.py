"""The notebooks, executed as a user would: from the first cell to the last, in a copy of their directory."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

from run_notebooks import digest

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
def test_a_notebook_is_valid_has_the_outputs_of_its_cells_and_says_what_to_change_elsewhere(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert all(place in notebook.cells[0].source for place in ('Colab', 'Kaggle', 'Cloud TPU VM'))
    cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert notebook.metadata.get('executed') == digest(notebook), (
        f'uv run just notebooks {path.relative_to(REPOSITORY)}'
    )
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert pictures(cells)
    assert not any(output.output_type == 'error' for cell in cells for output in cell.outputs)
    paths = [line for cell in cells for line in printed(cell).splitlines() if re.search(r'(^|[\s"\'=])/\w+/', line)]
    assert not paths, 'a path of the machine that ran it'


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_the_first_cell_of_code_installs_pretrax_if_a_line_of_it_is_turned_on(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    first = next(cell for cell in notebook.cells if cell.cell_type == 'code')
    assert all(line.startswith('# ') for line in first.source.splitlines())
    [cuda, tpu] = [line for line in first.source.splitlines() if line.startswith('# %pip install -q ')]
    assert '[cuda' in cuda
    assert '[tpu' in tpu
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
    assert printed(cells[-1]).count('busy time before') == 3


@pytest.mark.slow
def test_the_sharded_model_has_the_losses_of_one_device_and_the_collectives_that_the_text_names(tmp_path, monkeypatch):
    _, cells = execute(REPOSITORY / 'notebooks' / 'sharded_by_hand.ipynb', tmp_path, monkeypatch)
    texts = [printed(cell) for cell in cells]
    plain, hlo, by_data, by_weights, error, by_both, same = [
        text for text in texts if re.search('collectives|all-|psum|largest', text)
    ]
    assert plain == 'collectives: 0\n'
    hlo = ' '.join(hlo.split())
    assert hlo.startswith(
        '%all-reduce = (f32[], f32[256,32]{1,0}, f32[8,32,256]{2,1,0}, f32[256,256]{1,0}) all-reduce('
    )
    assert "replica_groups=mesh['d'=4,'t'=2] {'d'}" in hlo
    assert by_data == 'all-reduce     over d f32[] f32[256,32] f32[8,32,256] f32[256,256]\ncollectives: 1\n'
    assert sorted(line.split()[0] for line in by_weights.splitlines()[:-1]) == (
        ['all-gather'] * 3 + ['all-reduce'] + ['reduce-scatter'] * 3
    )
    assert "psum('t', x)" in error
    assert by_both.count('all-gather     over d') == by_both.count('reduce-scatter over d') == 3
    over_t = [line for line in by_both.splitlines() if 'over t' in line]
    assert over_t == ['all-reduce     over t f32[64,256]', 'all-reduce     over t f32[64,8,32]']
    differences = [float(line.split()[-6].rstrip(',')) for line in same.splitlines()]
    assert len(differences) == 3
    assert max(differences) < 1e-3
    assert len(pictures(cells)) == 1
