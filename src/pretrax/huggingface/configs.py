"""Converts between Hugging Face's config.json and pretrax's model options, with one table per family. Imports no JAX.

A table is a list of fields. Each field can be read into options and written from an architecture. A field of config.json
that no table row mentions is rejected by name, unless it is in HARMLESS: nothing is dropped silently.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.layers import NoPositions, Rope, Windows
from pretrax.model.families import Architecture, TransformerOptions, resolve

Options = dict[str, Any]
REQUIRED = object()

# Fields that do not affect what a decoder computes: bookkeeping, other heads, execution options.
HARMLESS = (
    '_name_or_path', '_attn_implementation*', 'architectures', 'auto_map', 'bos_token_id', 'cache_implementation',
    'chunk_size_feed_forward',
    'dtype', 'eos_token_id', 'finetuning_task', 'id2label', 'initializer_range', 'is_decoder', 'is_encoder_decoder',
    'label2id', 'model_type', 'n_ctx', 'num_labels', 'output_attentions', 'output_hidden_states', 'output_router_logits',
    'pad_token_id', 'pretraining_tp', 'problem_type', 'return_dict', 'summary_*', 'task_specific_params', 'torch_dtype',
    'torchscript', 'transformers_version', 'unsloth_*', 'use_cache', 'use_return_dict',
)  # fmt: skip
# pretrax applies no dropout, not even in training. A note reports it if a checkpoint was trained with dropout.
DROPOUT = ('attention_dropout', 'attn_pdrop', 'dropout', 'embd_pdrop', 'resid_pdrop', 'router_jitter_noise')


@dataclass(frozen=True)
class Renamed:
    """A field that corresponds to one option. `default` is the value if the field is absent."""

    field: str
    option: str
    default: Any = REQUIRED  # a value, or a function of the configuration

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, config: Mapping[str, Any]) -> Options:
        value = config.get(self.field)
        if value is None:
            if self.default is REQUIRED:
                raise UserError(f'config.json has no {self.field}')
            value = self.default(config) if callable(self.default) else self.default
        return {} if value is None else {self.option: value}

    def write(self, arch: Architecture) -> dict[str, Any]:
        value = getattr(arch, self.option)
        if isinstance(self.default, int) and isinstance(value, float) and value.is_integer():
            value = int(value)  # transformers checks field types
        return {self.field: value}


@dataclass(frozen=True)
class Enumerated:
    """A field whose values correspond to options: `{'silu': {'activation': 'swiglu'}}`. If absent, the first applies."""

    field: str
    choices: Mapping[Any, Options]

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, config: Mapping[str, Any]) -> Options:
        value = config.get(self.field, next(iter(self.choices)))
        if isinstance(value, list | dict) or value not in self.choices:
            raise UserError(
                f'config.json: {self.field} is {value!r}; supported: {", ".join(map(repr, self.choices))}\n'
                'pretrax does not support this variant'
            )
        return dict(self.choices[value])

    def write(self, arch: Architecture) -> dict[str, Any]:
        for value, options in self.choices.items():
            if all(getattr(arch, name) == option for name, option in options.items()):
                return {self.field: value}
        return {}


def only(field: str, *values: Any) -> Enumerated:
    """A field that must have one of these values."""
    return Enumerated(field, {value: {} for value in values})


@dataclass(frozen=True)
class Cap:
    """A soft cap. null means no cap; an absent field means `absent`."""

    field: str
    option: str
    absent: float | None

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, config: Mapping[str, Any]) -> Options:
        return {self.option: config.get(self.field, self.absent) or 0.0}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {self.field: getattr(arch, self.option) or None}


@dataclass(frozen=True)
class Unused:
    """Fields without effect in the models that the other rows accept."""

    fields: tuple[str, ...]

    def read(self, config: Mapping[str, Any]) -> Options:
        return {}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Experts:
    """Experts in every layer, balanced over the batch. `fields` are those that could disable experts in some layers."""

    fields: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any]) -> Options:
        for name in self.fields:
            if config.get(name) not in (None, [], 1):
                raise UserError(
                    f'config.json: {name} is {config[name]}, so some layers have no experts\n'
                    'pretrax supports experts in every layer or in none'
                )
        return {'balance_over': 'batch'}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {}


Field = Renamed | Enumerated | Rope | Windows | NoPositions | Cap | Unused | Experts


@dataclass(frozen=True)
class ConfigTable:
    """A family in Hugging Face: its model type, its class and its fields.

    Args:
        family: the pretrax family whose options the fields override.
        names: key of its table of names in `names.TABLES`.
    """

    model_type: str
    architecture: str
    family: str
    names: str
    fields: tuple[Field, ...]


def _heads(config: Mapping[str, Any]) -> Any:
    return config.get('num_attention_heads')


_TIED = Enumerated('tie_word_embeddings', {False: {'tied': False}, True: {'tied': True}})
_TIED_UNLESS_SAID = Enumerated('tie_word_embeddings', {True: {'tied': True}, False: {'tied': False}})
_SWIGLU = Enumerated('hidden_act', {'silu': {'activation': 'swiglu'}, 'swish': {'activation': 'swiglu'}})
_NO_ATTENTION_BIAS = only('attention_bias', False)
_GEGLU = {'gelu_pytorch_tanh': {'activation': 'geglu'}, None: {'activation': 'geglu'}}
_SIZES = (
    Renamed('vocab_size', 'vocab_size'),
    Renamed('hidden_size', 'd_model'),
    Renamed('intermediate_size', 'd_ff'),
    Renamed('num_hidden_layers', 'n_layers'),
    Renamed('num_attention_heads', 'n_heads'),
    Renamed('num_key_value_heads', 'n_kv_heads', _heads),
    Renamed('head_dim', 'd_head', None),
    Renamed('max_position_embeddings', 'max_sequence_length', 2048),
    Renamed('rms_norm_eps', 'norm_eps', 1e-6),
)

_BALANCE = Renamed('router_aux_loss_coef', 'balance_loss', 0.001)
_QWEN_MOE = (
    *(Renamed('moe_intermediate_size', 'd_ff') if size.fields == ('intermediate_size',) else size for size in _SIZES),
    _SWIGLU, _TIED, Rope(), Windows(by_layer=True, switch=True), _BALANCE,
    Renamed('num_experts', 'n_experts', lambda config: config.get('num_local_experts')),
    Renamed('num_experts_per_tok', 'experts_per_token'), Experts(('decoder_sparse_step', 'mlp_only_layers')),
    Enumerated('norm_topk_prob', {False: {'normalize_router': False}, True: {'normalize_router': True}}),
    # Fields of layers without experts, which do not exist here, and an alias of num_experts
    Unused(('intermediate_size', 'num_local_experts')),
)  # fmt: skip

_GEMMA2 = (
    Enumerated('hidden_activation', _GEGLU), _TIED_UNLESS_SAID, _NO_ATTENTION_BIAS,
    only('use_bidirectional_attention', None, False), Renamed('query_pre_attn_scalar', 'query_pre_attn_scalar', 256),
)  # fmt: skip

TABLES = (
    ConfigTable(
        'gpt2', 'GPT2LMHeadModel', 'gpt2', 'gpt2',
        (
            Renamed('vocab_size', 'vocab_size'),
            Renamed('n_embd', 'd_model'),
            Renamed('n_layer', 'n_layers'),
            Renamed('n_head', 'n_heads'),
            Renamed('n_inner', 'd_ff', lambda config: 4 * config['n_embd'] if 'n_embd' in config else None),
            Renamed('n_positions', 'max_sequence_length', 1024),
            Renamed('layer_norm_epsilon', 'norm_eps', 1e-5),
            Enumerated('activation_function', {'gelu_new': {'activation': 'gelu'}, 'gelu_pytorch_tanh': {'activation': 'gelu'}}),
            _TIED_UNLESS_SAID,
            only('scale_attn_weights', True),
            only('scale_attn_by_inverse_layer_idx', False),
            only('reorder_and_upcast_attn', False, True),
            only('add_cross_attention', False),
        ),
    ),
    ConfigTable(
        'llama', 'LlamaForCausalLM', 'llama', 'llama',
        (*_SIZES, _SWIGLU, _TIED, Rope(), _NO_ATTENTION_BIAS, only('mlp_bias', False)),
    ),
    ConfigTable('mistral', 'MistralForCausalLM', 'mistral', 'llama', (*_SIZES, _SWIGLU, _TIED, Rope(), Windows())),
    ConfigTable(
        'qwen2', 'Qwen2ForCausalLM', 'qwen2', 'qwen2',
        (*_SIZES, _SWIGLU, _TIED, Rope(), Windows(by_layer=True, switch=True), only('use_mrope', False)),
    ),
    ConfigTable(
        'qwen3', 'Qwen3ForCausalLM', 'qwen3', 'qwen3',
        (*_SIZES, _SWIGLU, _TIED, Rope(), Windows(by_layer=True, switch=True), _NO_ATTENTION_BIAS),
    ),
    ConfigTable(
        'mixtral', 'MixtralForCausalLM', 'mixtral', 'mixtral',
        (*_SIZES, _SWIGLU, _TIED, Rope(), Windows(), Experts(), _BALANCE, Renamed('num_local_experts', 'n_experts', 8),
         Renamed('num_experts_per_tok', 'experts_per_token', 2)),
    ),
    ConfigTable(
        'qwen2_moe', 'Qwen2MoeForCausalLM', 'qwen2-moe', 'qwen2-moe',
        (*_QWEN_MOE, Renamed('shared_expert_intermediate_size', 'd_shared', 5632), only('qkv_bias', True)),
    ),
    ConfigTable('qwen3_moe', 'Qwen3MoeForCausalLM', 'qwen3-moe', 'qwen3-moe', (*_QWEN_MOE, _NO_ATTENTION_BIAS)),
    ConfigTable(
        'gemma', 'GemmaForCausalLM', 'gemma', 'llama',
        # the released files say 'gelu', but their code computes the tanh approximation
        (*_SIZES, Enumerated('hidden_act', _GEGLU | {'gelu': {'activation': 'geglu'}}), Enumerated('hidden_activation', _GEGLU),
         _TIED_UNLESS_SAID, Rope(), _NO_ATTENTION_BIAS, only('use_bidirectional_attention', None, False)),
    ),
    ConfigTable(
        'gemma2', 'Gemma2ForCausalLM', 'gemma2', 'gemma2',
        (*_SIZES, *_GEMMA2, Cap('attn_logit_softcapping', 'attention_softcap', 50.0),
         Cap('final_logit_softcapping', 'final_softcap', 30.0), Rope(), Windows(by_layer=True, pattern=2)),
    ),
    ConfigTable(
        'gemma3_text', 'Gemma3ForCausalLM', 'gemma3', 'gemma3',
        (*_SIZES, *_GEMMA2, Cap('attn_logit_softcapping', 'attention_softcap', None),
         Cap('final_logit_softcapping', 'final_softcap', None), Rope(1e6, local=1e4),
         Windows(by_layer=True, pattern=6)),
    ),
    ConfigTable(
        'olmo2', 'Olmo2ForCausalLM', 'olmo2', 'olmo2', (*_SIZES, _SWIGLU, _TIED, Rope(), _NO_ATTENTION_BIAS),
    ),
    ConfigTable(
        'smollm3', 'SmolLM3ForCausalLM', 'smollm3', 'llama',
        (*_SIZES, _SWIGLU, _TIED_UNLESS_SAID, Rope(2e6), Windows(by_layer=True, switch=True), NoPositions(),
         _NO_ATTENTION_BIAS, only('mlp_bias', False)),
    ),
    ConfigTable(
        'phi3', 'Phi3ForCausalLM', 'phi3', 'phi3',
        (*_SIZES, _SWIGLU, _TIED, Rope(), Windows(), only('partial_rotary_factor', 1.0), _NO_ATTENTION_BIAS,
         Unused(('original_max_position_embeddings',))),  # belongs to a scaling that Rope rejects
    ),
)  # fmt: skip

BY_TYPE = {table.model_type: table for table in TABLES}
# Options that may differ because they do not affect the forward pass.
_NOT_COMPUTED = ('init_std', 'z_loss', 'balance_loss', 'balance_over', 'router_z_loss', 'capacity')


def table_of(config: Mapping[str, Any]) -> ConfigTable:
    """The table for a config.json. Raises UserError if the family is not supported."""
    kind = config.get('model_type')
    if kind not in BY_TYPE:
        architecture = ', '.join(config.get('architectures') or []) or 'none named'
        raise UserError(
            f"config.json: model_type is '{kind}' (architectures: {architecture}), which pretrax does not support\n"
            f'supported: {", ".join(sorted(BY_TYPE))}'
        )
    return BY_TYPE[kind]


def read_options(config: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """The options for a config.json, and notes for the user.

    Raises:
        UserError: the family has no table, or no row knows a field; the message names it.
    """
    table = table_of(config)
    if 'quantization_config' in config:
        raise UserError(
            'config.json: quantization_config is set, but quantized weights cannot be trained\n'
            'use the checkpoint that they were made from'
        )
    known = {name for field in table.fields for name in field.fields}
    strange = [name for name, value in config.items() if name not in known and not _is_harmless(name, value)]
    if strange:
        said = ', '.join(f'{name} ({str(config[name])[:60]})' for name in strange[:5])
        raise UserError(
            f'config.json has fields that pretrax does not know for {table.model_type}: {said}\n'
            'they may change what the model computes, so the model is not imported\n'
            'if they do not, remove them from config.json'
        )
    options: Options = {'family': table.family}
    for field in table.fields:
        options |= field.read(config)
    dropped = {name: config[name] for name in DROPOUT if config.get(name)}
    notes = [
        f'{name} = {value} of config.json is not applied: pretrax has no dropout' for name, value in dropped.items()
    ]
    return options, notes


def write_config(arch: Architecture, family: str | None = None) -> tuple[dict[str, Any], ConfigTable]:
    """The config.json for an architecture, and the Hugging Face family that computes it.

    Args:
        arch: the architecture of the decoder.
        family: the pretrax family to try first.

    Raises:
        UserError: no family computes this architecture; the message names the nearest one and the differences.
    """
    nearest: tuple[int, str, dict[str, str]] | None = None
    for table in sorted(TABLES, key=lambda table: table.family != family):
        config = {'architectures': [table.architecture], 'model_type': table.model_type}
        for field in table.fields:
            config |= field.write(arch)
        try:
            differences = _differences(config, arch)
        except (UserError, ValueError) as error:  # the family does not allow these sizes
            differences = {'': str(error).splitlines()[0]}
        if not differences:
            return config, table
        if nearest is None or len(differences) < nearest[0]:
            nearest = len(differences), table.architecture, differences
    assert nearest is not None
    said = '; '.join(f'{name}: {what}' if name else what for name, what in nearest[2].items())
    raise UserError(
        f'no class of transformers computes this architecture; the nearest is {nearest[1]}, but\n  {said}\n'
        'to export, train with the options of one family'
    )


def _differences(config: dict[str, Any], arch: Architecture) -> dict[str, str]:
    """The differences between an architecture and its config.json, found by reading the config.json back."""
    options, _ = read_options(config)
    back = resolve(TransformerOptions(**options), arch.vocab_size, arch.max_sequence_length)
    return compare(back, arch, 'in the class', 'here')


def compare(one: Architecture, other: Architecture, of_one: str, of_other: str) -> dict[str, str]:
    """The options by which two architectures compute different results, as text."""
    found = {}
    for field in dataclasses.fields(Architecture):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if a != b and field.name not in _NOT_COMPUTED:
            found[field.name] = f'{a} {of_one}, {b} {of_other}'
    return found


def _is_harmless(name: str, value: Any) -> bool:
    return name in DROPOUT or any(fnmatch.fnmatch(name, pattern) for pattern in HARMLESS)
