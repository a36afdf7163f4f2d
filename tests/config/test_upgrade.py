"""`pretrax config upgrade` rewrites files with former names, and keeps everything else."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
import yaml

from former import content, flat, unpacked
from pretrax.cli import main
from pretrax.config import load, upgrade_file
from pretrax.config.upgrade import upgraded_text
from pretrax.errors import UserError

MODELS = json.loads(content('models.json'))


def upgraded(text: str) -> str:
    return upgraded_text(text, 'a.yaml', 'transformer')[0]


@pytest.fixture(scope='module')
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configurations of the repository before their keys were in sections, upgraded."""
    directory = unpacked(tmp_path_factory.mktemp('former'))
    for name in MODELS:
        upgrade_file(directory / name)
    return directory


@pytest.mark.parametrize('name', [name for name, model in MODELS.items() if model and 'name' in model])
def test_an_upgraded_file_means_what_it_meant(former: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / 'examples' / 'nnx_gpt2')
    config = load(former / name)
    section = config.model.options.model_dump()
    section = flat(section) if config.model.name == 'transformer' else section
    read = {'name': config.model.name} | {key: value for key, value in section.items() if value is not None}
    assert json.loads(json.dumps(read)) == MODELS[name]


@pytest.mark.parametrize('name', MODELS)
def test_an_upgraded_file_keeps_its_comments_and_its_length(former: Path, name: str) -> None:
    def comments(text: str) -> list[str]:
        return sorted(re.findall(r'(?<=#).*', text))

    before, after = content(name), (former / name).read_text()
    assert comments(after) == comments(before)
    assert len(after.splitlines()) <= len(before.splitlines()) + 1
    assert max(map(len, after.splitlines())) <= max(120, *map(len, before.splitlines()))
    assert upgraded(after) == after


BLOCK = """\
# a run
name: a   # of a test

model:
  # the sizes
  n_layers: 2
  d_model: 64
  # query heads
  n_heads: 2
  window: 8      # tokens

  n_kv_heads: 1
  rope_scaling:   # longer
    kind: linear
    # twice
    factor: 2.0
  norm: layernorm
  # the end
steps: 3
"""
BLOCK_TODAY = """\
# a run
name: a   # of a test

model:
  # the sizes
  n_layers: 2
  d_model: 64
  attention:
    # query heads
    n_heads: 2
    window: 8      # tokens

    n_kv_heads: 1
  rope:
    scaling:   # longer
      kind: linear
      # twice
      factor: 2.0
  norm: {kind: layernorm}
  # the end
steps: 3
"""


@pytest.mark.parametrize(
    ('before', 'after'),
    [
        (BLOCK, BLOCK_TODAY),
        (
            'model: {n_heads: 2, d_model: 8, d_ff: 3, n_kv_heads: 1, router_z_loss: 0.1}\n',
            'model: {attention: {n_heads: 2, n_kv_heads: 1}, d_model: 8, feed_forward: {d_ff: 3}, experts: {router: '
            '{z_loss: 0.1}}}\n',
        ),
        (  # lines and comments in braces
            'model: {\n  n_heads: 2,  # heads\n  d_model: 8,\n  window: 3  # seen\n}\n',
            'model: {\n  attention: {n_heads: 2,  # heads\n  window: 3},  # seen\n  d_model: 8\n}\n',
        ),
        ('model: {attention: {n_heads: 2}, window: 3}\n', 'model: {attention: {n_heads: 2, window: 3}}\n'),
        ('model:\n  attention: {n_heads: 2}\n  window: 3\n', 'model:\n  attention: {n_heads: 2, window: 3}\n'),
        ('model:\n  attention:\n    n_heads: 2\n  window: 3\n', 'model:\n  attention: {n_heads: 2, window: 3}\n'),
        ('model: {norm: layernorm, norm_eps: 1.0e-6}\n', 'model: {norm: {kind: layernorm, eps: 1.0e-6}}\n'),
        ('model: {attention: auto, init: xavier}', 'model: {attention: {kernel: auto}, init: {kind: xavier}}'),
        ('model: {"n_heads": 2}\n', 'model: {attention: {n_heads: 2}}\n'),
        ('model: {n_heads: &n 2, n_kv_heads: *n}\n', 'model: {attention: {n_heads: &n 2, n_kv_heads: *n}}\n'),
        (
            'steps: 3\nmodel: {n_heads: 2}\nseed: "${model.n_heads}"\n',
            'steps: 3\nmodel: {attention: {n_heads: 2}}\nseed: "${model.attention.n_heads}"\n',
        ),
        (
            'base: x.yaml\nchange: {model.n_layers: 2, model.d_ff: 8}\ngrid:\n'
            '  model.attention: [auto, cudnn]  # kernels\n',
            'base: x.yaml\nchange: {model.n_layers: 2, model.feed_forward.d_ff: 8}\ngrid:\n'
            '  model.attention.kernel: [auto, cudnn]  # kernels\n',
        ),
        (
            "base: x.yaml\nrows: [{model: {n_heads: 2}}, {'model.window': 3}]\n"
            "parameters: {model.init_std: {low: 1, high: 2}}\n",
            "base: x.yaml\nrows: [{model: {attention: {n_heads: 2}}}, {'model.attention.window': 3}]\n"
            'parameters: {model.init.std: {low: 1, high: 2}}\n',
        ),
        ('grid: {model.attention: [{window: 3}]}\n', 'grid: {model.attention: [{window: 3}]}\n'),
        ('model: {name: mine, n_heads: 2}\n', 'model: {name: mine, n_heads: 2}\n'),
        ('data: {n_heads: 2}\n', 'data: {n_heads: 2}\n'),
    ],
)  # fmt: skip
def test_layouts(before: str, after: str) -> None:
    assert upgraded(before) == after
    assert yaml.safe_load(upgraded(before)) == yaml.safe_load(after)
    assert upgraded(after) == after


def test_a_line_that_becomes_too_long_is_broken() -> None:
    keys = 'family: llama, n_layers: 2, d_model: 64, n_heads: 2, n_kv_heads: 1, d_ff: 192, init: xavier, '
    keys += 'mup: {base_width: 64}'
    text = upgraded(f'model: {{{keys}}}\n')
    assert max(map(len, text.splitlines())) <= 120
    assert text.count('\n') == 2


@pytest.mark.parametrize(
    'text', ['model: {n_heads: 2, window: "${.n_heads}"}\n', 'model: {window: 3, attention: {window: 4}}\n']
)
def test_what_cannot_be_rewritten_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / 'a.yaml'
    path.write_text(text)
    with pytest.raises(UserError):
        upgrade_file(path)
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ['a.yaml']


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, link, out = tmp_path / 'a.yaml', tmp_path / 'link.yaml', tmp_path / 'out.yaml'
    path.write_text(BLOCK)
    path.chmod(0o600)
    link.symlink_to(path)

    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as stopped:
            main(['config', 'upgrade', *map(str, arguments)])
        return int(stopped.value.code or 0)

    assert run(path, '--out', out) == 0
    assert (path.read_text(), out.read_text()) == (BLOCK, BLOCK_TODAY)
    assert capsys.readouterr().out.splitlines()[0] == f'{path}: model.n_heads -> model.attention.n_heads'
    assert run(link) == 0
    assert link.is_symlink()
    assert path.read_text() == BLOCK_TODAY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    capsys.readouterr()
    before = os.stat(path)
    assert run(path) == 0
    assert capsys.readouterr().out == f'{path}: nothing to change\n'
    assert os.stat(path).st_mtime_ns == before.st_mtime_ns
    assert run(path, link, '--out', out) == 2
    assert run(tmp_path / 'none.yaml') == 2
    assert run() == 2


def test_the_model_of_the_base_decides(tmp_path: Path) -> None:
    (tmp_path / 'base.yaml').write_text('model: {name: mine}\n')
    path = tmp_path / 'a.yaml'
    path.write_text('extends: base.yaml\nmodel: {n_heads: 2}\n')
    assert upgrade_file(path) == []
    path.write_text('base: base.yaml\ngrid: {model.n_heads: [2]}\n')
    assert upgrade_file(path) == []
