"""MaxText's configurations: YAML over the defaults in its base.yml. github.com/AI-Hypercomputer/maxtext"""

import math
from pathlib import Path
from typing import Any

from pretrax.config.source import read_file
from pretrax.errors import UserError
from pretrax.model.choices import presets
from pretrax.model.families import families
from pretrax.tables import read_table
from pretrax.translate.maxtext_training import data, optimizer, run_and_logs, schedule
from pretrax.translate.translation import Translation

SOURCE = "MaxText's base.yml"
_TABLES = read_table(Path(__file__).with_suffix('.yaml'))
DEFAULTS: dict[str, Any] = _TABLES['defaults']
TYPICAL: list[str] = _TABLES['typical'].split()
PRESETS: dict[str, str] = _TABLES['presets'] | {name: name for name in _TABLES['same_names'].split()}
SAVE: dict[str, Any] = _TABLES['save']
_BLOCKS: dict[str, dict[str, Any]] = _TABLES['blocks']
_SIZES: list[str] = _TABLES['sizes'].split()
_ONE_IS_OFF = ('shared_experts', 'interleave_moe_layer_step', 'routed_scaling_factor', 'partial_rotary_factor')
_COMPUTE = {'bfloat16': 'bf16', 'float32': 'f32', 'float16': 'fp16'}
# A quantization of MaxText: precision.matmul, and how that differs. 'te_': kernels of Transformer Engine.
_MATMUL = {
    'int8': ('int8',),
    'fp8': ('fp8',),
    'te_fp8_currentscaling': ('fp8',),
    'te_fp8_delayedscaling': ('fp8', 'a scale is that of the current values, not of earlier steps'),
    'te_mxfp8': ('mxfp8',),
    'te_nvfp4': ('nvfp4', 'no Hadamard transform precedes the rounding'),
    'te_nvfp4_no_rht': ('nvfp4',),
}
_ACTIVATIONS = {
    ('silu', 'linear'): 'swiglu',
    ('gelu', 'linear'): 'geglu',
    ('gelu',): 'gelu',
}
_OFF = (False, 0, -1, '', None, 'none', [])


def read(path: Path) -> dict[str, Any]:
    """The keys of a file, over those of the files that its base_config names, one after the other."""
    values, file = read_file(path).values, path
    seen = {path.resolve()}
    base = values.get('base_config')
    while isinstance(base, str) and base and Path(base).name != 'base.yml':
        # As in MaxText: relative to the file, or else to the directory `configs`.
        folders = [file.parent, *(folder for folder in file.resolve().parents if folder.name == 'configs')]
        found = next((folder / base for folder in folders if (folder / base).is_file()), None)
        if found is None:
            raise UserError(
                f'{file}: base_config is {base}, which is not a file beside it\n'
                '  copy it there; only base.yml is built into this translation'
            )
        if found.resolve() in seen:
            raise UserError(f'{file}: base_config is {base}, which is based on this file; expected another one')
        seen.add(found.resolve())
        below = read_file(found).values
        values, file, base = below | values, found, below.get('base_config')
    return {key: None if value == 'None' else value for key, value in values.items()}


def translate(t: Translation, stem: str, devices: int | None) -> None:
    """Fills in a translation. `devices`: how many the batch per device is meant for; None: the product of the mesh."""
    run_and_logs(t, stem)
    steps = schedule(t)
    _model(t, stem)
    _precision(t)
    data(t)
    _batch(t, _mesh(t), devices)
    optimizer(t)
    assert steps == t.values['steps']
    if t.text('training_objective', 'causal_lm') == 'causal_lm':
        t.not_needed('the next token is predicted', 'training_objective')
    t.no_equivalent('the next token is predicted; diffusion is not here', *t.matching('training_objective'))
    if t.number('dense_init_scale', 1) == 1:
        t.not_needed('1', 'dense_init_scale')
    t.no_equivalent('model.init.kind and model.init.std say how weights are drawn', *t.matching('dense_init_scale'))
    for row in _TABLES['no_equivalent']:
        for key in t.matching(*row['keys'].split()):
            if t.get(key) in _OFF:
                t.not_needed('off in this file', key)
            else:
                t.no_equivalent(row['reason'], key)
    for row in _TABLES['not_needed']:
        t.not_needed(row['reason'], *t.matching(*row['keys'].split()))


def _model(t: Translation, stem: str) -> None:
    name = t.text('model_name')
    if name not in ('default', ''):
        if name not in PRESETS:
            raise UserError(
                f'{t.file}: model_name is {name}, whose sizes this translation does not have\n'
                f"  put the lines of MaxText's configs/models/{name}.yml in the file, and remove model_name\n"
                f'  known: {", ".join(PRESETS)}'
            )
        t.set('model.preset', PRESETS[name], 'model_name')
        for key, value in _TABLES['deviations'].get(name, {}).items():
            t.set(f'model.{key}', value, note=f"that of MaxText's {name}.yml, which differs from the preset")
        if t.get('override_model_config', False) is True:
            t.no_equivalent('write it in model: if it differs from the preset', *t.matching(*_SIZES))
            t.no_equivalent('the preset is used unchanged', 'override_model_config')
        else:
            t.not_needed('model_name decides it, as in MaxText', *t.matching(*_SIZES))
        sizes = presets()[PRESETS[name]]
        if (families()[sizes['family']] | sizes).get('experts.n_experts'):
            _routing(t)
    else:
        _sizes(t, stem)
        t.not_needed('the sizes are given', 'model_name')
    if t.number('dropout_rate', 0) and t.get('enable_dropout', True) is True:
        t.set('model.dropout', t.number('dropout_rate'), 'dropout_rate')
    t.not_needed('dropout is model.dropout, 0 by default', 'enable_dropout', *t.matching('dropout_rate'))
    policy = t.text('remat_policy')
    t.set('model.save', SAVE.get(policy, 'none'), 'remat_policy')
    if policy == 'custom':
        t.changed(
            'write the activations to keep or to offload in model.save (docs/numerics.md#activations)', 'remat_policy'
        )
    elif policy not in SAVE:
        t.changed(f'expected one of {", ".join(SAVE)}; all is recomputed', 'remat_policy')
    t.set('model.layers', 'scan' if t.flag('scan_layers') else 'unroll', 'scan_layers')
    kernel = {'cudnn_flash_te': 'cudnn', 'flash': 'auto', 'autoselected': 'auto'}.get(t.text('attention'))
    if kernel == 'cudnn':
        t.changed('the kernel is chosen, and printed; model.attention.kernel: cudnn forces this one', 'attention')
    elif kernel:
        t.not_needed('the kernel is chosen, and printed', 'attention')
    else:
        t.no_equivalent('the kernel is chosen; model.attention.kernel: blockwise is plain XLA', 'attention')
    if t.integer('num_vocab_tiling', 1) > 1:
        t.set('model.loss_chunks', t.integer('num_vocab_tiling'), 'num_vocab_tiling')
        t.changed('chunks of each sequence, not of all tokens', 'num_vocab_tiling')
    t.not_needed('the logits exist as a whole', *t.matching('num_vocab_tiling'))
    if t.number('z_loss_multiplier', 0):
        t.set('model.z_loss', t.number('z_loss_multiplier'), 'z_loss_multiplier')
    if t.integer('mtp_num_layers', 0):
        t.set('model.multi_token.n_layers', t.integer('mtp_num_layers'), 'mtp_num_layers')
        t.set('model.multi_token.loss', t.number('mtp_loss_scaling_factor', 0.1), 'mtp_loss_scaling_factor')
    t.not_needed('there is no multi-token prediction', *t.matching('mtp_*', 'z_loss_multiplier'))


def _routing(t: Translation) -> None:
    """How tokens are distributed among experts: choices of the training, not of the model."""
    if t.number('capacity_factor', -1) > 0:
        t.set('model.experts.capacity', t.number('capacity_factor'), 'capacity_factor')
    if 'load_balance_loss_weight' in t.given or 'model.preset' not in t.values:
        t.set('model.experts.router.balance_loss', t.number('load_balance_loss_weight', 0), 'load_balance_loss_weight')


def _sizes(t: Translation, stem: str) -> None:
    """The sizes of a model without a name. `global_parameter_scale` multiplies heads, widths and layers in turn."""
    block = t.text('decoder_block')
    if block not in _BLOCKS:
        if stem in PRESETS:
            raise UserError(
                f'{t.file}: decoder_block is {block}, whose sizes are not translated one by one\n'
                f'  write model_name: {stem} in place of the sizes; this translation knows that model'
            )
        raise UserError(
            f'{t.file}: decoder_block is {block}; without model_name, expected one of {", ".join(_BLOCKS)}\n'
            '  give model_name, or write model: yourself (docs/models.md)'
        )
    for key, value in _BLOCKS[block].items():
        t.set(f'model.{key}', value, 'decoder_block')
    scale = t.integer('global_parameter_scale')
    exponent = round(math.log2(scale)) if scale > 0 else -1
    if exponent < 0 or 2**exponent != scale:
        raise t.mistake('global_parameter_scale', scale, 'a power of 2')
    thirds, rest = divmod(exponent, 3)
    for target, key, factor in (
        ('n_layers', 'base_num_decoder_layers', thirds),
        ('d_model', 'base_emb_dim', thirds + (rest > 1)),
        ('attention.n_heads', 'base_num_query_heads', thirds + (rest > 0)),
        ('attention.n_kv_heads', 'base_num_kv_heads', thirds + (rest > 0)),
        ('feed_forward.d_ff', 'base_mlp_dim', thirds + (rest > 0)),
    ):
        scaled = ('global_parameter_scale',) if factor else ()
        t.set(f'model.{target}', 2**factor * t.integer(key), key, *scaled)
    t.not_needed('it is 1', *t.matching('global_parameter_scale'))
    t.set('model.attention.d_head', t.integer('head_dim'), 'head_dim')
    t.set('model.vocab_size', t.integer('vocab_size'), 'vocab_size')
    t.set('model.norm.eps', t.number('normalization_layer_epsilon'), 'normalization_layer_epsilon')
    given = t.get('mlp_activations')
    activation = (
        _ACTIVATIONS.get(tuple(given)) if isinstance(given, list) and all(isinstance(a, str) for a in given) else None
    )
    if activation is None:
        raise t.mistake('mlp_activations', given, "['silu', 'linear'], ['gelu', 'linear'] or ['gelu']")
    t.set('model.feed_forward.activation', activation, 'mlp_activations')
    t.set('model.embedding.tied', t.flag('logits_via_embedding'), 'logits_via_embedding')
    if block.startswith('gemma'):
        _gemma(t, block)
    elif t.flag('logits_via_embedding') and t.flag('normalize_embedding_logits'):
        multiplier = round(t.values['model.d_model'] ** -0.5, 9)
        t.set('model.head.multiplier', multiplier, 'normalize_embedding_logits', note='1 / sqrt(base_emb_dim)')
    t.not_needed('for tied embeddings', *t.matching('normalize_embedding_logits'))
    t.set('model.rope.base', float(t.number('rope_max_timescale')), 'rope_max_timescale')
    _more_choices(t)


def _gemma(t: Translation, block: str) -> None:
    """MaxText's Gemma embedding contains sqrt(d_model), so it divides logits; here embeddings are multiplied."""
    if t.flag('normalize_embedding_logits'):
        t.not_needed('the family multiplies embeddings instead', *t.matching('normalize_embedding_logits'))
    else:
        multiplier = round(t.values['model.d_model'] ** 0.5, 9)
        t.set('model.head.multiplier', multiplier, 'normalize_embedding_logits', note='sqrt(base_emb_dim)')
    if block == 'gemma2':
        layers = 2 * t.values['model.n_layers']
        t.set(
            'model.n_layers',
            layers,
            'base_num_decoder_layers',
            note='2 x base_num_decoder_layers: a local and a global layer each',
        )
        t.set('model.attention.query_pre_attn_scalar', float(t.integer('head_dim')), 'head_dim')
        if t.integer('sliding_window_size', 0) > 0:
            t.set('model.attention.window', t.integer('sliding_window_size'), 'sliding_window_size')
        norms = {t.flag('use_post_attn_norm'), t.flag('use_post_ffw_norm')}
        if len(norms) == 2:
            raise t.mistake('use_post_ffw_norm', t.flag('use_post_ffw_norm'), 'the value of use_post_attn_norm')
        t.set('model.block.norms', 'sandwich' if norms == {True} else 'pre', 'use_post_attn_norm', 'use_post_ffw_norm')


def _more_choices(t: Translation) -> None:
    for target, key in (('attention.softcap', 'attn_logits_soft_cap'), ('head.softcap', 'final_logits_soft_cap')):
        if t.number(key, 0):
            t.set(f'model.{target}', t.number(key), key)
    for target, key in (
        ('attention.qkv_bias', 'attention_bias'),
        ('feed_forward.bias', 'mlp_bias'),
        ('attention.sinks', 'attention_sink'),
    ):
        if t.flag(key) or (target == 'attention.qkv_bias' and t.values['model.family'] == 'qwen2'):
            t.set(f'model.{target}', t.flag(key), key)
    if t.number('partial_rotary_factor', 1) != 1:
        t.set('model.rope.fraction', t.number('partial_rotary_factor'), 'partial_rotary_factor')
    if t.flag('use_qk_norm'):
        t.set('model.attention.qk_norm', 'head', 'use_qk_norm')
    if t.text('attention_type', 'global') == 'local_sliding':
        t.set('model.attention.window', t.integer('sliding_window_size'), 'sliding_window_size', 'attention_type')
    if t.number('local_rope_max_timescale', -1) > 0:
        t.set('model.rope.local_base', float(t.number('local_rope_max_timescale')), 'local_rope_max_timescale')
    experts = t.integer('num_experts')
    if experts > 1:
        t.set('model.experts.n_experts', experts, 'num_experts')
        t.set('model.experts.experts_per_token', t.integer('num_experts_per_tok'), 'num_experts_per_tok')
        _routing(t)
        t.not_needed('weights of the chosen experts sum to one', *t.matching('norm_topk_prob'))
        if 'base_moe_mlp_dim' in t.given:
            t.set('model.feed_forward.d_ff', t.integer('base_moe_mlp_dim'), 'base_moe_mlp_dim')
    elif t.values['model.family'] in ('mixtral', 'qwen3-moe'):
        raise t.mistake('num_experts', experts, f'more than 1 with decoder_block {t.text("decoder_block")}')
    t.not_needed(
        'there are no experts',
        *t.matching(
            'num_experts*', 'capacity_factor', 'load_balance_loss_weight', 'base_moe_mlp_dim', 'norm_topk_prob'
        ),
    )
    kind = t.text('rope_type', 'default')
    if kind == 'llama3.1' and t.get('rope_use_scale', True):
        scaling = {
            'kind': 'llama3',
            'factor': 8.0,
            'low_freq_factor': 1.0,
            'high_freq_factor': 4.0,
            'original_length': 8192,
        }
        t.set(
            'model.rope.scaling',
            scaling,
            'rope_type',
            'rope_use_scale',
            note="rope_type, with the numbers of MaxText's class",
        )
    elif kind == 'yarn':
        scaling = {
            'kind': 'yarn',
            'factor': float(t.number('rope_factor', 40)),
            'original_length': t.integer('original_max_position_embeddings', 4096),
        }
        t.set('model.rope.scaling', scaling, 'rope_type', 'rope_factor', 'original_max_position_embeddings')
    used = ('sliding_window_size', 'attention_type', 'attn_logits_soft_cap', 'final_logits_soft_cap', 'attention_bias',
    'mlp_bias',
            'attention_sink', 'use_qk_norm', 'local_rope_max_timescale', 'rope_*', 'original_max_position_embeddings',
            'max_position_embeddings', 'beta_fast', 'beta_slow', 'mscale')  # fmt: skip
    t.not_needed('not used with these choices', *t.matching(*used))
    for key in t.matching(*_SIZES):
        if t.get(key) in _OFF or (key in _ONE_IS_OFF and t.get(key) == 1):
            t.not_needed('off in this file', key)
    t.not_needed('for latent attention', *t.matching('*_lora_rank', 'qk_*_head_dim', 'v_head_dim'))
    t.no_equivalent('write what it means in model: (docs/models.md)', *t.matching(*_SIZES))


def _precision(t: Translation) -> None:
    dtype, quantization = t.text('dtype'), t.text('quantization')
    if dtype not in _COMPUTE:
        raise t.mistake('dtype', dtype, 'one of ' + ', '.join(_COMPUTE))
    t.set('precision.compute', _COMPUTE[dtype], 'dtype')
    if quantization in _MATMUL:
        matmul, *differences = _MATMUL[quantization]
        t.set('precision.matmul', matmul, 'quantization')
        exempt = 'the first and last layer stay in the compute dtype (precision.exempt)'
        t.changed('; '.join([exempt, *differences]), 'quantization')
    elif quantization:
        t.no_equivalent('precision.matmul has int8, fp8, mxfp8 and nvfp4', 'quantization')
    t.not_needed('products are in the compute dtype', *t.matching('quantization'))
    for key in t.matching('weight_dtype', 'mu_dtype'):
        if t.text(key) in ('float32', ''):
            t.not_needed('weights and moments are f32', key)
        else:
            t.no_equivalent('weights and moments are always f32; memory.offload saves memory', key)
    parts = [
        part
        for part, key in (('optimizer', 'optimizer_memory_host_offload'), ('weights', 'parameter_memory_host_offload'))
        if t.flag(key)
    ]
    if parts:
        t.set('memory.offload', parts, 'optimizer_memory_host_offload', 'parameter_memory_host_offload')
    t.not_needed('off in this file', *t.matching('*_memory_host_offload'))


def _mesh(t: Translation) -> int | None:
    """Sets the mesh, and returns the product of its axes, or None if one of them is auto."""
    slices = next((n for key in ('compile_topology_num_slices', 'num_slices') if (n := t.integer(key, -1)) > 0), 1)
    axes: dict[str, int | str] = dict.fromkeys('rdectp', 1)
    keys: dict[str, list[str]] = {axis: [] for axis in axes}
    for name, axis in _TABLES['axes'].items():
        for network in ('dcn', 'ici'):
            key = f'{network}_{name}_parallelism'
            default = -1 if key in ('dcn_data_parallelism', 'ici_fsdp_parallelism') else 1
            value = t.integer(key, default)
            keys[axis].append(key)
            if value == -1 and network == 'dcn':
                value = slices
            before = axes[axis]
            axes[axis] = 'auto' if value == -1 or before == 'auto' else int(before) * value
    data_is_free = t.integer('dcn_data_parallelism', -1) == -1 and t.integer('ici_data_parallelism', 1) == 1
    if axes['d'] == 'auto' and data_is_free and slices == 1:
        axes['r'] = 'auto'  # the number of slices
    for axis, value in axes.items():
        given = [key for key in keys[axis] if key in t.given]
        if value != 1 or given:
            t.set(f'mesh.{axis}', value, *(given or keys[axis][:1]), note=', '.join(given) or "MaxText's default")
    t.changed(
        'it shards the batch and all weights, as fsdp does',
        *(k for k in t.given if 'fsdp_transpose_parallelism' in k and t.get(k) != 1),
    )
    t.changed(
        'it shards heads and widths, as tensor does',
        *(
            k
            for k in t.given
            if 'tensor_' in k and k.endswith('_parallelism') and t.get(k) != 1 and 'tensor_parallelism' not in k
        ),
    )
    rounds = t.integer('num_pipeline_repeats', -1)
    if axes['p'] != 1 and rounds > 0:
        t.set('model.pipeline.rounds', rounds, 'num_pipeline_repeats')
    micro = t.integer('num_pipeline_microbatches', -1)
    if micro > 0:
        t.no_equivalent(
            'batch.micro, in sequences per device, is chosen so that the bubble is small', 'num_pipeline_microbatches'
        )
    t.not_needed('chosen', *t.matching('num_pipeline_*'))
    for key in t.matching('*_parallelism'):
        if t.get(key) in (0, 1, -1):
            t.not_needed('the axis has size 1', key)
        else:
            t.no_equivalent('pretrax has the axes r, d, e, c, t and p (docs/parallelism.md)', key)
    numbers = [value for value in axes.values() if isinstance(value, int)]
    return math.prod(numbers) if len(numbers) == len(axes) else None


def _batch(t: Translation, product: int | None, devices: int | None) -> None:
    count = devices or product or 1
    rows, accumulation = t.number('per_device_batch_size'), t.integer('gradient_accumulation_steps')
    length = t.integer('max_target_length')
    tokens = round(rows * count * accumulation) * length
    note = (
        'per_device_batch_size x devices x gradient_accumulation_steps x max_target_length = '
        f'{rows:g} x {count} x {accumulation} x {length}'
    )
    t.set('batch.tokens', tokens, 'per_device_batch_size', 'gradient_accumulation_steps', note=note)
    t.set('batch.sequence_length', length, 'max_target_length')
    if accumulation > 1 and rows >= 1:
        t.set('batch.micro', int(rows), 'per_device_batch_size')
    if devices is None and product is None:
        reason = (
            'batch.tokens counts all devices, and the number of them is not in the file: translate with --devices N'
        )
        t.changed(reason, 'per_device_batch_size')
    else:
        t.changed(
            f'batch.tokens counts all {count} devices, and stays the same on another number of them',
            'per_device_batch_size',
        )
    t.not_needed('1', *t.matching('gradient_accumulation_steps'))
