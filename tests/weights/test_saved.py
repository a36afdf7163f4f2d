"""A run that an earlier pretrax began, with flat keys of `model:`, is read, resumed and generates as it did."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from former import flat, unpacked
from pretrax.checkpoint import find_checkpoint, read_description, read_manifest
from pretrax.checkpoint.manifest import manifest_content
from pretrax.cli import main
from pretrax.config import load, upgrade_file
from pretrax.errors import UserError
from pretrax.model.option_names import RENAMED
from pretrax.run.resume import check_unchanged
from pretrax.weights.origin import open_origin
from pretrax.weights.saved import model_section, stated_options

FLAT = {
    'family': 'mistral', 'n_layers': 2, 'd_model': 8, 'n_heads': 2, 'n_kv_heads': 1, 'd_ff': 16, 'window': 8,
    'global_every': 2,
    'norm_eps': 1e-6, 'final_softcap': 20.0, 'init_std': 0.1, 'residual_dropout': 0.1, 'attention': 'blockwise',
    'layers': 'scan',
}  # fmt: skip


@pytest.fixture
def former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the file, the text and the run."""
    monkeypatch.chdir(unpacked(tmp_path))
    return tmp_path


def test_its_configuration_resumes_it(former: Path) -> None:
    with pytest.raises(UserError, match=r'run: pretrax config upgrade old.yaml$'):
        load('old.yaml')
    as_stored = load('runs/old/config.yaml')
    upgrade_file(Path('old.yaml'))
    said: list[str] = []
    for config in (load('old.yaml'), as_stored):
        check_unchanged(config, False, said.append)
    assert said == []
    with pytest.raises(UserError, match=r'another configuration:\n +model.attention.window: 8 -> 4\n'):
        check_unchanged(load('old.yaml', ['model.attention.window=4']), False, said.append)


def test_its_model_is_taken_over(former: Path) -> None:
    origin = open_origin('runs/old')
    assert origin.arch is not None
    options = flat(stated_options('runs/old', 'distill.teacher').model_dump(exclude_none=True))
    assert FLAT.items() <= options.items()
    assert {
        name: origin.arch.option(RENAMED[name]) for name in ('window', 'norm_eps', 'final_softcap', 'residual_dropout')
    } == {name: FLAT[name] for name in ('window', 'norm_eps', 'final_softcap', 'residual_dropout')}
    assert origin.arch.rope.scaling is not None
    assert origin.arch.rope.scaling.factor == 2.0
    assert model_section('runs/old')['attention']['window'] == 8
    run = {'name': 'new', 'steps': 2, 'init_from': 'runs/old', 'data': {'text': 'text.txt', 'tokenizer': 'bytes'}}
    sizes = {'batch': {'tokens': 64, 'sequence_length': 32}, 'optimizer': {'learning_rate': 0.1}}
    Path('new.yaml').write_text(
        json.dumps(run | sizes | {'model': {'attention': {'window': 4}, 'rope': {'scaling': None}}})
    )
    config = load('new.yaml')
    known = flat(config.model.options.model_dump(exclude_none=True))
    assert known | {'vocab_size': 257} == options | {'window': 4}
    assert config.origins['model', 'norm', 'eps'] == 'init_from runs/old'
    assert config.origins['model', 'attention', 'window'].startswith('new.yaml:')


def test_two_checkpoints_differ_by_what_changed(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One with the former keys, and one with those of today, whose window is another."""
    shutil.copytree('runs/old', 'runs/other')
    config = load('runs/old/config.yaml', ['model.attention.window=4']).model_dump(mode='json')
    directory, step = find_checkpoint(Path('runs/other'))
    manifest = read_manifest(directory, step)
    manifest.description['config']['model'] = config['model']
    content = manifest_content(step, manifest.description, manifest.arrays, manifest.files)
    Path('runs/other/checkpoints/2/manifest.json').write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(['checkpoint', 'diff', 'runs/old', 'runs/other'])
    assert not stopped.value.code
    assert None not in flat(model_section('runs/other')).values()
    assert 'configuration: 1 values differ\n  model.attention.window: 8 -> 4\n' in capsys.readouterr().out


@pytest.mark.slow
def test_it_goes_on_with_the_same_numbers(former: Path) -> None:
    def output_of(*arguments: str) -> str:
        one_device = dict(os.environ) | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
        command = [sys.executable, '-m', 'pretrax', *arguments]
        return subprocess.run(command, env=one_device, capture_output=True, text=True, check=True).stdout

    upgrade_file(Path('old.yaml'))
    output_of('train', 'old.yaml')
    found: dict[str, float] = {}
    for line in Path('runs/old/metrics.jsonl').read_text().splitlines():
        found |= json.loads(line)
    expected = json.loads(Path('expected.json').read_text())
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert read_description(*find_checkpoint(Path('runs/old')))['config']['model']['attention']['window'] == 8
    text = output_of('generate', 'runs/old', '--prompt', 'the ', '--temperature', '0', '--tokens', '8')
    assert text.startswith(Path('generated.txt').read_text().rstrip('\n'))
