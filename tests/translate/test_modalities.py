"""Modalities' configurations: components, references between them, and the batch per rank."""

from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml

from pretrax.config import build
from pretrax.data.options import TextOptions
from pretrax.errors import UserError
from pretrax.translate import Fate, translate
from pretrax.translate.modalities import flat
from small import count_parameters
from translate.translated import given, translated

FILE = Path(__file__).parents[2] / 'examples' / 'coming-from' / 'modalities.yml'
TEXT = FILE.read_text()


def test_the_getting_started_file_becomes_the_same_training(tmp_path):
    translation, config = translated('modalities', tmp_path / 'getting_started.yaml', TEXT, devices=4)
    assert not translation.grouped_keys(Fate.UNKNOWN)
    assert not translation.grouped_keys(Fate.NO_EQUIVALENT)
    # 8 sequences of 512 tokens, twice, on each of 4 ranks
    assert config.batch.tokens == 8 * 512 * 2 * 4
    assert config.steps == 25_165_824 // config.batch.tokens
    assert config.data.options.tokens == './data/mem_map/train.pbin'
    assert config.data.options.validation_tokens == './data/mem_map/test.pbin'
    assert (config.optimizer.learning_rate, config.schedule.options.final) == (6e-4, 0.1)
    assert (config.eval.every, config.checkpoint.every, config.seed) == (24, 48, 42)
    # Two embeddings; per layer q, k, v, o with half as many key and value heads, a SwiGLU of 256, two norms; the last
    # norm
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256 + 2 * 128
    assert count_parameters(given(config.model), 50304, 512) == 2 * 50304 * 128 + 2 * layer + 128


def test_references_between_values_are_resolved_and_the_environment_is_not_read(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '64')
    values = flat(
        {
            'a': {'b': 3, 'text': 'x/${a.b}', 'circle': '${c}'},
            'c': '${a.circle}',
            'd': ['${a.b}', 1],
            'ranks': '${cuda_env:WORLD_SIZE}',
            'list': [{'e': '${a.b}'}],
            'missing': '${no.such}',
        }
    )
    assert values['a.text'] == 'x/3'
    assert values['list.0.e'] == 3
    assert values['ranks'] == '${cuda_env:WORLD_SIZE}'
    assert values['missing'] == '${no.such}'


def test_a_device_mesh_gives_the_axes_and_the_ranks(tmp_path):
    values = yaml.safe_load(TEXT)
    del values['wrapped_model']
    values['device_mesh'] = {
        'component_key': 'device_mesh',
        'variant_key': 'default',
        'config': {
            'device_type': 'cuda',
            'data_parallel_replicate_degree': 2,
            'data_parallel_shard_degree': 4,
            'tensor_parallel_degree': 2,
            'world_size': '${cuda_env:WORLD_SIZE}',
        },
    }
    _, config = translated('modalities', tmp_path / 'a.yaml', yaml.safe_dump(values))
    assert (config.mesh.r, config.mesh.d, config.mesh.t) == (2, 4, 2)
    assert config.batch.tokens == 8 * 512 * 2 * 8  # tensor-parallel ranks share their sequences


@pytest.mark.parametrize(
    ('variant', 'options', 'name'),
    [
        ('step_lr', {'step_size': 100, 'gamma': 0.5}, 'step'),
        ('dummy_lr', {}, 'constant'),
        ('constant_lr', {'factor': 0.5, 'total_iters': 3}, 'piecewise'),
        ('linear_lr', {'start_factor': 0.01, 'end_factor': 1.0, 'total_iters': 100}, 'piecewise'),
        ('cosine_annealing_lr', {'t_max': 100, 'eta_min': 1e-5}, 'cosine'),
        ('linear_warmup_cosine_annealing_lr', {'warmup_steps': 10, 'total_steps': 100, 'initial_lr': 0,
        'final_lr': 6e-5, 'max_lr': 6e-4}, 'cosine'),
        ('of_mine', {'speed': 3}, 'constant'),
    ],
)  # fmt: skip
def test_every_scheduler_becomes_a_schedule_or_is_reported(tmp_path, variant, options, name):
    values = yaml.safe_load(TEXT)
    values['scheduler'] = {'component_key': 'scheduler', 'variant_key': variant, 'config': options}
    translation, config = translated('modalities', tmp_path / 'a.yaml', yaml.safe_dump(values))
    assert config.schedule.name == name
    if variant == 'of_mine':
        assert translation.fates['scheduler.config.speed'][0] is Fate.NO_EQUIVALENT


@pytest.mark.parametrize(
    ('before', 'after', 'message'),
    [
        ('n_layer: 2', 'layers: 2', '0 models'),
        ('variant_key: adam_w', 'variant_key: lamb', "variant_key is 'lamb'"),
        ('activation_type: swiglu', 'activation_type: relu', 'activation_type'),
        ('n_head_q: 8', 'n_head_q: ${cuda_env:WORLD_SIZE}', 'n_head_q'),
        ('    n_embd: 128\n    dropout', '    n_embd: 130\n    dropout', 'd_model'),
        ('lm_head_norm_config: {norm_type: rms_norm', 'lm_head_norm_config: {norm_type: layer_norm', 'the norms'),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(tmp_path, before, after, message):
    assert before in TEXT
    (tmp_path / 'a.yaml').write_text(TEXT.replace(before, after))
    with pytest.raises(UserError, match=message):
        translate('modalities', tmp_path / 'a.yaml')


@pytest.mark.parametrize(
    ('variant', 'options', 'multiplier'),
    [
        ('constant_lr', {'factor': 0.25}, lambda step: 0.25 if step < 30 else 1.0),
        ('linear_lr', {'start_factor': 0.1, 'end_factor': 0.7}, lambda step: 0.1 + 0.6 * min(step / 30, 1)),
    ],
)
def test_the_rates_are_those_of_pytorch(tmp_path, variant, options, multiplier):
    """The closed forms in the documentation of torch.optim.lr_scheduler.ConstantLR and LinearLR."""
    values = yaml.safe_load(TEXT)
    values['scheduler'] = {
        'component_key': 'scheduler',
        'variant_key': variant,
        'config': {'total_iters': 30} | options,
    }
    _, config = translated('modalities', tmp_path / 'a.yaml', yaml.safe_dump(values))
    ours = build('schedule', config.schedule, config.steps)
    for step in range(40):
        assert float(ours(jnp.asarray(step))) == pytest.approx(multiplier(step), abs=1e-6), step


def test_a_warm_start_is_reported_with_what_to_do(tmp_path):
    """In the form of tutorials/warmstart/configs/warmstart_config.yaml."""
    values = yaml.safe_load(TEXT)
    folder = '${settings.warmstart_checkpoint_paths.checkpoint_folder_path}'
    values['settings']['warmstart_checkpoint_paths'] = '${warmstart_env:checkpoint_paths}'
    values['settings']['training_progress']['num_seen_steps'] = {
        'component_key': 'number_conversion',
        'variant_key': 'num_seen_steps_from_checkpoint_path',
        'config': {'checkpoint_path': folder},
    }
    values['checkpoint_loading'] = {
        'component_key': 'checkpoint_loading',
        'variant_key': 'dcp',
        'config': {'global_rank': 0},
    }
    values['app_state'] = {
        'component_key': 'app_state',
        'variant_key': 'dcp',
        'config': {'checkpoint_dir_path': folder},
    }
    translation, _ = translated('modalities', tmp_path / 'a.yaml', yaml.safe_dump(values))
    assert not translation.grouped_keys(Fate.UNKNOWN)
    fate, reason = translation.fates['settings.warmstart_checkpoint_paths']
    assert fate is Fate.NO_EQUIVALENT
    assert 'init_from' in reason


def with_training_data(values, variant, **config):
    values['train_dataset'] = {'component_key': 'dataset', 'variant_key': variant, 'config': config}
    return yaml.safe_dump(values)


def test_raw_text_is_text_and_never_tokens(tmp_path):
    text = with_training_data(
        yaml.safe_load(TEXT), 'mem_map_dataset', raw_data_path='a.jsonl', index_path='a.idx', jq_pattern='.raw_content'
    )
    translation, config = translated('modalities', tmp_path / 'a.yaml', text)
    assert (config.data.options.text, config.data.options.field) == ('a.jsonl', 'raw_content')
    assert isinstance(config.data.options, TextOptions)
    assert translation.fates['test_dataset.config.raw_data_path'][0] is Fate.NO_EQUIVALENT


@pytest.mark.parametrize(
    ('variant', 'config'), [('combined', {'datasets': [{'instance_key': 'test_dataset'}]}), ('dummy_dataset',
    {'num_samples': 3})]
)  # fmt: skip
def test_held_out_data_never_becomes_training_data(tmp_path, variant, config):
    translation, found = translated(
        'modalities', tmp_path / 'a.yaml', with_training_data(yaml.safe_load(TEXT), variant, **config)
    )
    assert isinstance(found.data.options, TextOptions)
    assert 'TO DO' in translation.comments['data.text']
    assert translation.fates['train_dataset.variant_key'][0] is Fate.NO_EQUIVALENT
    assert not translation.grouped_keys(Fate.UNKNOWN)


def test_a_dataset_inside_its_loader_is_found(tmp_path):
    values = yaml.safe_load(TEXT)
    values['train_dataloader']['config']['dataset'] = values.pop('train_dataset')
    _, config = translated('modalities', tmp_path / 'a.yaml', yaml.safe_dump(values))
    assert config.data.options.tokens == './data/mem_map/train.pbin'


def test_components_are_recognized_by_their_kind_under_any_name(tmp_path):
    values = yaml.safe_load(TEXT)
    values['my_loss'] = values.pop('loss_fn')
    values['model_raw']['config']['prediction_key'] = 'logits'
    values['my_stages'] = {
        'component_key': 'pipeline', 'variant_key': 'staged', 'config': {'pp_schedule_name': 'gpipe',
        'num_layers_per_stage': 1},
    }  # fmt: skip
    values['my_profiler'] = {
        'component_key': 'steppable_profiler',
        'variant_key': 'kernel_tracing',
        'config': {'num_wait_steps': 1},
    }
    values['collate_fn'] = {
        'component_key': 'collate_fn',
        'variant_key': 'mask_loss_collator_wrapper',
        'config': {'loss_ignore_index': -100},
    }
    translation, _ = translated('modalities', tmp_path / 'a.yaml', yaml.safe_dump(values))
    assert not translation.grouped_keys(Fate.UNKNOWN)
    assert translation.fates['my_stages.config.pp_schedule_name'][0] is Fate.NOT_NEEDED
    for key in ('my_profiler.config.num_wait_steps', 'collate_fn.config.loss_ignore_index'):
        assert translation.fates[key][0] is Fate.NO_EQUIVALENT


def test_a_cycle_of_beta1_is_reported(tmp_path):
    translation, _ = translated('modalities', tmp_path / 'a.yaml', TEXT)
    assert 'beta1' in translation.fates['scheduler.variant_key'][1]
    values = yaml.safe_load(TEXT)
    values['scheduler']['config']['cycle_momentum'] = False
    translation, _ = translated('modalities', tmp_path / 'b.yaml', yaml.safe_dump(values))
    assert 'beta1' not in translation.fates['scheduler.variant_key'][1]
