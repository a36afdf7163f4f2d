"""MaxText's configurations: its defaults, its named models, its mesh, and its batch per device."""

import pytest
import yaml

from former import flat
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
    assert not translation.grouped_keys(Fate.UNKNOWN)
    assert translation.fates['enable_checkpointing'][0] is Fate.NO_EQUIVALENT


def test_the_global_parameter_scale_gives_maxtext_s_16b(tmp_path):
    """configs/scale/16b.yaml has the sizes of MaxText's tables of TPU runs, which set this key to 16."""
    text = (
        'global_parameter_scale: 16\nper_device_batch_size: 6\ndataset_type: synthetic\nlogits_via_embedding: false\n'
    )
    _, config = translated('maxtext', tmp_path / '16b.yml', text, devices=256)
    published = given(load('scale/16b').model)
    options = flat(config.model.options.model_dump(exclude_none=True))
    assert {key: options[key] for key in published} == published
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
        ({'dcn_data_parallelism': 2, 'ici_fsdp_parallelism': 4, 'ici_context_parallelism': 2}, {'r': 2, 'd': 4, 'c': 2},
        16),
        ({'dcn_pipeline_parallelism': 4, 'ici_fsdp_parallelism': 2, 'ici_fsdp_transpose_parallelism': 2}, {'p': 4,
        'd': 4}, 16),
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
    from pretrax.translate.maxtext import PRESETS, SAVE

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
    ('quantization', 'matmul', 'difference'),
    [
        ('fp8', 'fp8', 'first and last layer'),
        ('te_fp8_delayedscaling', 'fp8', 'not of earlier steps'),
        ('te_mxfp8', 'mxfp8', 'first and last layer'),
        ('te_nvfp4', 'nvfp4', 'Hadamard'),
    ],
)
def test_a_quantization_becomes_the_dtype_of_the_products(tmp_path, quantization, matmul, difference):
    translation, config = translated(
        'maxtext', tmp_path / 'a.yml', f'max_target_length: 128\nquantization: {quantization}\n'
    )
    assert config.precision.matmul == matmul
    assert difference in translation.fates['quantization'][1]


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('model_name: gpt3-175b', 'sizes this translation does not have'),
        ('decoder_block: gpt_oss', 'decoder_block is gpt_oss'),
        ('global_parameter_scale: 3', 'a power of 2'),
        ('mlp_activations: [relu]', 'mlp_activations'),
        ('base_config: mine.yml', 'not a file beside it'),
        ('base_config: a.yml', 'based on this file'),
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


def test_a_base_is_looked_for_in_the_directory_of_configurations_and_may_have_a_base(tmp_path):
    folder = tmp_path / 'configs' / 'gpu'
    folder.mkdir(parents=True)
    (tmp_path / 'configs' / 'low.yml').write_text('base_config: base.yml\nmax_target_length: 512\nsteps: 7\n')
    (folder / 'middle.yml').write_text('base_config: low.yml\nsteps: 8\n')
    _, config = translated('maxtext', folder / 'a.yml', 'base_config: middle.yml\nper_device_batch_size: 1\n')
    assert (config.batch.sequence_length, config.steps) == (512, 8)


def test_a_gemma2_layer_of_maxtext_is_two_and_its_embedding_holds_the_scale(tmp_path):
    """configs/models/gemma2-2b.yml: 13 blocks of a local and a global layer.
    Gemma 2 2B has 26 layers (arXiv:2408.00118).
    """
    text = """\
base_emb_dim: 2304
base_num_query_heads: 8
base_num_kv_heads: 4
base_mlp_dim: 9216
base_num_decoder_layers: 13
head_dim: 256
mlp_activations: ["gelu", "linear"]
vocab_size: 256128
decoder_block: "gemma2"
normalization_layer_epsilon: 1.e-06
logits_via_embedding: true
final_logits_soft_cap: 30.0
attn_logits_soft_cap: 50.0
sliding_window_size: 4096
use_post_attn_norm: true
use_post_ffw_norm: true
dataset_type: synthetic
"""
    translation, config = translated('maxtext', tmp_path / 'gemma2.yml', text)
    _, published = translated('maxtext', tmp_path / 'b.yml', 'model_name: gemma2-2b\ndataset_type: synthetic\n')
    padding = (256_128 - 256_000) * 2304
    length = config.batch.sequence_length
    counts = [count_parameters(given(one.model), 256_000, length) for one in (config, published)]
    assert counts[0] - counts[1] == padding
    options = config.model.options
    assert (options.block.norms, options.attention.window, options.head.multiplier) == ('sandwich', 4096, None)
    assert not translation.grouped_keys(Fate.NO_EQUIVALENT)
    assert not translation.grouped_keys(Fate.UNKNOWN)


def test_a_named_model_keeps_what_maxtext_changes_in_it_and_the_routing_of_the_run(tmp_path):
    text = 'model_name: qwen3-30b-a3b\ncapacity_factor: 1.25\nload_balance_loss_weight: 0.01\ndataset_type: synthetic\n'
    _, config = translated('maxtext', tmp_path / 'a.yml', text)
    options = config.model.options
    assert (options.rope.base, options.experts.capacity, options.experts.router.balance_loss) == (1e7, 1.25, 0.01)
    _, dense = translated('maxtext', tmp_path / 'b.yml', 'model_name: mistral-7b\ndataset_type: synthetic\n')
    assert (dense.model.options.rope.base, dense.model.options.attention.window) == (1e6, 0)


def test_a_file_of_sizes_that_has_a_preset_is_refused_with_the_name(tmp_path):
    (tmp_path / 'deepseek2-16b.yml').write_text('decoder_block: deepseek\nbase_emb_dim: 2048\n')
    with pytest.raises(UserError, match='write model_name: deepseek2-16b'):
        translate('maxtext', tmp_path / 'deepseek2-16b.yml')


@pytest.mark.parametrize(
    ('text', 'key', 'fate'),
    [
        ('student_overrides: {model_name: a}\n', 'student_overrides', Fate.NO_EQUIVALENT),
        ('rl: {num_generations: 2}\n', 'rl', Fate.NO_EQUIVALENT),
        ('training_objective: block_diffusion\n', 'training_objective', Fate.NO_EQUIVALENT),
        ('training_objective: causal_lm\n', 'training_objective', Fate.NOT_NEEDED),
        ('adamw_mask: [norm]\n', 'adamw_mask', Fate.NO_EQUIVALENT),
        ('adamw_mask: []\n', 'adamw_mask', Fate.NOT_NEEDED),
        ('dense_init_scale: 0.5\n', 'dense_init_scale', Fate.NO_EQUIVALENT),
        ('enable_wandb: true\nwandb_project_name: p\n', 'wandb_project_name', Fate.TRANSLATED),
        ('skip_step_on_spikes: true\n', 'skip_step_on_spikes', Fate.CHANGED),
        ('dataset_type: grain\ngrain_train_files: a*.parquet\ngrain_file_type: parquet\n', 'grain_train_files',
        Fate.TRANSLATED),
        ('dataset_type: grain\ngrain_train_files: a*\n', 'grain_train_files', Fate.NO_EQUIVALENT),
        ('dataset_type: grain\ngrain_train_files: x_text_document\ngrain_file_type: mmap\n', 'grain_train_files',
        Fate.CHANGED),
    ],
)  # fmt: skip
def test_fates_of_keys_of_new_releases(tmp_path, text, key, fate):
    translation, _ = translated('maxtext', tmp_path / 'a.yml', f'max_target_length: 128\n{text}')
    assert translation.fates[key][0] is fate
    assert not translation.grouped_keys(Fate.UNKNOWN)
