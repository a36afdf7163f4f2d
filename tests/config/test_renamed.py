"""Former names of options: what a user writes is answered with the name of today, and what pretrax stored is read."""

import json
from pathlib import Path

import pytest

from config.smallest import VALUES
from former import content, stored_config
from pretrax.config import from_manifest, from_values, load, read_resolved, register
from pretrax.errors import UserError
from pretrax.experiments.scaling_file import read_scaling, size_config
from pretrax.experiments.search_file import read_search
from pretrax.experiments.sweep import read_sweep
from pretrax.model.option_names import RENAMED
from pretrax.view.record.settings import parse_settings, value_of

FLAT = 'name: a\nsteps: 2\nmodel:\n  n_layers: 2\n  d_model: 64\n  n_heads: 2\n  norm: layernorm\n'
REST = 'data: {text: stdlib}\nbatch: {tokens: 1024, sequence_length: 128}\noptimizer: {learning_rate: 0.1}\n'


@pytest.mark.parametrize(('name', 'key'), RENAMED.items())
def test_every_former_name_is_answered_with_the_key_of_today(name, key):
    with pytest.raises(UserError) as error:
        from_values(VALUES, [f'model.{name}=x'])
    assert str(error.value) == f'override: model.{name} is now model.{key}: write model.{key}=x'


def test_a_file_is_answered_with_its_lines_and_the_command(tmp_path):
    path = tmp_path / 'a b.yaml'
    path.write_text(FLAT + REST)
    with pytest.raises(UserError) as error:
        load(path, ['model.window=8'])
    assert str(error.value).splitlines() == [
        f'{path}:6: model.n_heads is now model.attention.n_heads',
        f'{path}:7: model.norm is now model.norm.kind',
        'override: model.window is now model.attention.window: write model.attention.window=8',
        f"run: pretrax config upgrade '{path}'",
    ]


def test_many_former_names_take_ten_lines(tmp_path):
    path = tmp_path / 'a.yaml'
    path.write_text(FLAT.partition('model:')[0] + 'model:\n' + ''.join(f'  {name}: x\n' for name in RENAMED) + REST)
    with pytest.raises(UserError) as error:
        load(path)
    lines = str(error.value).splitlines()
    assert len(lines) <= 10
    assert lines[-2:] == [f'and {len(RENAMED) - 7} more', f'run: pretrax config upgrade {path}']


def test_a_former_name_below_a_file_of_today_is_not_lost(tmp_path):
    """Merging would replace the former value by the section, without a word."""
    (tmp_path / 'base.yaml').write_text('model: {attention: blockwise}\n')
    (tmp_path / 'a.yaml').write_text(
        'extends: base.yaml\nname: a\nsteps: 2\nmodel: {n_layers: 1, d_model: 8, attention: {n_heads: 1}}\n' + REST
    )
    with pytest.raises(
        UserError, match=r'base.yaml:1: model.attention is now model.attention.kernel\nrun: .*base.yaml$'
    ):
        load(tmp_path / 'a.yaml')


@pytest.mark.parametrize(
    ('given', 'hint'),
    [
        ({'attention': {'n_head': 2}}, r'model.attention.n_head is not .*\n +write model.attention.n_heads=2'),
        ({'n_head': 2}, r'model.n_head is not .*\n +write model.attention.n_heads=2'),
        ({'eps': 1e-6}, r'model.eps is not .*\n +did you mean model.norm.eps\?'),
        ({'attention': {'norm_eps': 1e-6}}, r'model.attention.norm_eps is not .*\n +write model.norm.eps=1e-06'),
        ({'attention': {'d_model': 8}}, r'model.attention.d_model is not .*\n +write model.d_model=8'),
        ({'experts': {'router': {'zloss': 1}}}, r'model.experts.router.zloss is not .*\n +did you mean z_loss\?'),
        ({'attention': {'window': -3}},
        r'model.attention.window is -3; expected at least 0\n +window: tokens that a token sees'),
        ({'rope': 3}, r'model.rope is 3; expected a mapping of keys to values'),
        ({'norm': {'kind': 'x'}}, r"model.norm.kind is 'x'; expected 'rmsnorm' or 'layernorm'"),
    ],
)  # fmt: skip
def test_mistakes_in_a_section_name_the_key_and_the_nearest(given, hint):
    with pytest.raises(UserError, match=hint):
        from_values(VALUES | {'model': VALUES['model'] | given})


def test_another_model_may_have_options_of_these_names():
    @register('model', 'with-flat-names')
    def with_flat_names(request, *, n_heads: int = 1, window: int = 2, attention: str = 'x') -> None: ...

    config = from_values(VALUES | {'model': {'name': 'with-flat-names', 'n_heads': 4, 'window': 3}}, ['model.window=5'])
    assert config.model.model_dump() == {'name': 'with-flat-names', 'n_heads': 4, 'window': 5, 'attention': 'x'}
    assert from_manifest(config.model_dump(mode='json')) == config


@pytest.mark.parametrize(
    ('text', 'read'),
    [
        ('grid: {model.n_heads: [2, 4]}\nsteps: 2\n', lambda path: read_sweep(path, path.parent)),
        ('parameters: {model.n_heads: [2, 4]}\ntrials: 2\n', read_search),
        ('sizes: [{model.n_heads: 2}]\nbudgets: [1.0e+12]\n', lambda path: size_config(path, read_scaling(path), 0,
        {})),
    ],
)  # fmt: skip
def test_files_of_several_runs_are_named(tmp_path, text, read):
    (tmp_path / 'base.yaml').write_text(json.dumps(VALUES))
    path = tmp_path / 'several.yaml'
    path.write_text('base: base.yaml\n' + text)
    with pytest.raises(UserError) as error:
        read(path)
    assert f'{path}: model.n_heads is now model.attention.n_heads' in str(error.value)
    assert f'run: pretrax config upgrade {path}' in str(error.value)
    assert 'override' not in str(error.value)


def test_a_stored_configuration_is_read(tmp_path):
    config = from_manifest(stored_config())
    path = tmp_path / 'config.yaml'
    path.write_text(content('runs/old/config.yaml'))
    assert read_resolved(path) == load(path) == config
    assert config.model.options.attention.window == 8  # type: ignore[attr-defined]
    assert load(path, ['model.attention.window=4']).model.options.attention.window == 4  # type: ignore[attr-defined]
    [line] = [number for number, text in enumerate(path.read_text().splitlines(), 1) if text.startswith('  window: 8')]
    assert load(path).origins['model', 'attention', 'window'] == f'{path}:{line}'


def test_pages_of_runs_show_the_settings_under_the_keys_of_today():
    settings, _ = parse_settings(content('runs/old/config.yaml'))
    found = {setting.key: setting.value for setting in settings}
    assert found['model.attention.window'] == 8
    assert found['model.attention.kernel'] == 'blockwise'
    assert found['model.rope.scaling.kind'] == 'linear'
    assert not found.keys() & {f'model.{name}' for name in RENAMED}
    today = parse_settings('model:\n  attention:\n    n_heads: 2\n  norm:\n    kind: null\n')[0]
    assert [setting.key for setting in today] == ['model.attention.n_heads', 'model.norm.kind']
    plugin = parse_settings('model:\n  name: mine\n  n_heads: 2\n')[0]
    assert value_of(plugin, 'model.n_heads') == 2


def test_files_of_today_are_not_asked_to_be_upgraded(tmp_path):
    path: Path = tmp_path / 'a.yaml'
    path.write_text(FLAT.replace('n_heads: 2', 'attention: {n_heads: 2}').replace('norm: layernorm', 'norm: {}') + REST)
    assert load(path).model.options.attention.n_heads == 2  # type: ignore[attr-defined]
