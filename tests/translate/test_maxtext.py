"""MaxText's configurations: its defaults, its named models, its mesh, and its batch per device."""

import pytest
import yaml

from pretrax.config import load
from pretrax.errors import UserError
from pretrax.translate import Fate, translate
from small import count_parameters
from translate.translated import given, translated

# In the form of configs/gpu/models/llama2_7b.yml
LLAMA = """\
base_config: "base.yml"
run_name: "gpu_train_test"
hardware: "gpu"
steps: 30
per_device_batch_size: 4
max_target_length: 4096
model_name: "llama2-7b"
enable_checkpointing: False
attention: "cudnn_flash_te"
remat_policy: "minimal_with_context"
use_iota_embed: True
scan_layers: False
dataset_type: "synthetic"
async_checkpointing: False
max_segments_per_seq: 32
"""


def test_llama2_7b_has_6_74b_parameters(tmp_path):
    translation, config = translated('maxtext', tmp_path / 'llama2_7b.yml', LLAMA, devices=8)
    assert count_parameters(given(config.model), 32000, 4096) == 6_738_415_616  # arXiv:2307.09288
    assert config.batch.tokens == 4 * 8 * 4096
    assert (config.name, config.steps) == ('gpu_train_test', 30)
    assert not translation.of_fate(Fate.UNKNOWN)
    assert translation.fates['enable_checkpointing'][0] is Fate.NO_EQUIVALENT


def test_the_global_parameter_scale_gives_maxtext_s_16b(tmp_path):
    """configs/scale/16b.yaml has the sizes of MaxText's tables of TPU runs, which set this key to 16."""
    text = (
        'global_parameter_scale: 16\nper_device_batch_size: 6\ndataset_type: synthetic\nlogits_via_embedding: false\n'
    )
    _, config = translated('maxtext', tmp_path / '16b.yml', text, devices=256)
    published = given(load('scale/16b').model)
    assert {key: getattr(config.model.options, key) for key in published} == published
    assert config.batch.tokens == load('scale/16b').batch.tokens


def test_defaults_are_those_of_base_yml(tmp_path):
    translation, config = translated('maxtext', tmp_path / 'a.yml', 'base_config: base.yml\n')
    assert config.steps == 150_001
    assert (config.schedule.name, config.schedule.options.warmup) == ('cosine', 15_000)
    assert config.optimizer.learning_rate == 3e-5
    assert config.batch.sequence_length == 2048
    assert config.optimizer.no_decay == ()  # optax.adamw without a mask
    assert 'default of' in translation.comments['optimizer.learning_rate']


@pytest.mark.parametrize(
    ('keys', 'mesh', 'devices'),
    [
        ({}, {'r': 'auto', 'd': 'auto'}, None),
        ({'ici_fsdp_parallelism': 8, 'ici_tensor_parallelism': 4}, {'r': 1, 'd': 8, 't': 4}, 32),
        ({'dcn_data_parallelism': 2, 'ici_fsdp_parallelism': 4, 'ici_context_parallelism': 2}, {'r': 2, 'd': 4, 'c': 2}, 16),
        ({'dcn_pipeline_parallelism': 4, 'ici_fsdp_parallelism': 2, 'ici_fsdp_transpose_parallelism': 2}, {'p': 4, 'd': 4}, 16),
        ({'ici_expert_parallelism': 4, 'ici_fsdp_parallelism': 1}, {'e': 4, 'd': 1}, 4),
    ],
)  # fmt: skip
def test_the_axes_become_a_mesh_and_its_product_counts_the_batch(tmp_path, keys, mesh, devices):
    text = yaml.safe_dump({'per_device_batch_size': 2, 'max_target_length': 128, **keys})
    translation, config = translated('maxtext', tmp_path / 'a.yml', text)
    assert {axis: getattr(config.mesh, axis) for axis in mesh} == mesh
    assert config.batch.tokens == 2 * 128 * (devices or 1)
    assert ('--devices' in translation.fates['per_device_batch_size'][1]) == (devices is None)


def test_every_remat_policy_and_every_named_model_is_a_configuration(tmp_path):
    from pretrax.translate.maxtext_keys import PRESETS, SAVE

    for number, (policy, name) in enumerate(zip([*SAVE, *['full'] * len(PRESETS)], PRESETS, strict=False)):
        text = f'remat_policy: {policy}\nmodel_name: {name}\ndataset_type: synthetic\n'
        translated('maxtext', tmp_path / f'{number}.yml', text)


def test_a_schedule_longer_than_the_run_does_not_fall_to_its_end(tmp_path):
    text = 'steps: 100\nlearning_rate_schedule_steps: 200\nmax_target_length: 128\n'
    _, config = translated('maxtext', tmp_path / 'a.yml', text)
    points = config.schedule.options.points
    assert config.schedule.options.warmup == 20
    assert points[-1][0] >= 100
    assert 0.5 < points[-1][1] < 0.65  # half of the cosine from 1 to 0.1


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('model_name: gpt3-175b', 'sizes this translation does not have'),
        ('decoder_block: gpt_oss', 'decoder_block is gpt_oss'),
        ('global_parameter_scale: 3', 'a power of 2'),
        ('mlp_activations: [relu]', 'mlp_activations'),
        ('base_config: mine.yml', 'not a file beside it'),
        ('dtype: [1]', 'dtype is'),
        ('steps: many', 'steps is'),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(tmp_path, line, message):
    (tmp_path / 'a.yml').write_text(f'max_target_length: 128\n{line}\n')
    with pytest.raises(UserError, match=message):
        translate('maxtext', tmp_path / 'a.yml')


def test_a_base_beside_the_file_is_read_too(tmp_path):
    (tmp_path / 'mine.yml').write_text('max_target_length: 512\nsteps: 7\nmy_key: 1\n')
    translation, config = translated('maxtext', tmp_path / 'a.yml', 'base_config: mine.yml\nsteps: 9\n')
    assert (config.batch.sequence_length, config.steps) == (512, 9)
    assert translation.fates['my_key'][0] is Fate.UNKNOWN
