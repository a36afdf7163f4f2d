"""The options of the decoder: the keys that the section `model:` of a configuration may write. No JAX here.

Each is declared once, with its type, limits, description and default, its former name, and what it changes. An option
that is left out comes from the preset (presets.yaml), then from the family (families.py), then it is the default.
`architecture.resolve` gives every option a value.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from pretrax.model.families import FAMILY_NAMES, PRESET_NAMES, SAVED_NAMES
from pretrax.model.mup import Mup
from pretrax.model.rope_scaling import RopeScaling

if TYPE_CHECKING:  # as an `Architecture` has them
    type Choice[T] = T
    type LayerNumbers = tuple[int, ...]
else:

    class Choice:
        """The type of an option that a configuration may leave out: None until it is resolved."""

        def __class_getitem__(cls, item: Any) -> Any:
            return item | None

    LayerNumbers = Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...]


Effect = Literal['weights', 'forward', 'training', 'nothing']


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What an option has besides its pydantic field.

    Attributes:
        choice: its value if neither the configuration nor the preset nor the family gives one; `...`: it has none, or
            it follows from other options.
        former: its name in pretrax 0.1, whose section `model:` was flat; '': the same; None: 0.1 did not have it.
        changes: what another value changes. 'weights': which there are, their sizes or their meaning, so that those of
            a checkpoint do not fit; 'forward': only what is computed with the same weights; 'training': only that;
            'nothing': only how it is computed.
    """

    choice: Any = ...
    former: str | None = ''
    changes: Effect = 'weights'


def option(
    choice: Any = ..., *, default: Any = None, former: str | None = '', changes: Effect = 'weights', **field: Any
) -> Any:
    """The pydantic field of an option, with its `Declaration`; `default` if the configuration leaves it out."""
    declared = Field(default=default, **field)
    declared.metadata.append(Declaration(choice, former, changes))
    return declared


class Section(BaseModel):
    """A section of options, which may have sections of its own."""

    model_config = ConfigDict(extra='forbid', frozen=True)

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """The declarations of all options by dotted key: 'attention.window'."""
        declared: dict[str, Declaration] = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section):
                inner = type(field.default).declarations()
                declared |= {f'{name}.{key}': declaration for key, declaration in inner.items()}
            else:
                declared[name] = next((x for x in field.metadata if isinstance(x, Declaration)), Declaration())
        return declared

    def dotted(self) -> dict[str, Any]:
        """The options that are not None, by dotted key."""
        options: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Section):
                options |= {f'{name}.{key}': inner for key, inner in value.dotted().items()}
            elif value is not None:
                options[name] = value
        return options

    @classmethod
    def from_dotted(cls, options: Mapping[str, Any]) -> Self:
        """The inverse of `dotted`, without validation. Keys of other sections are ignored."""
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section):
                inner = {
                    key.removeprefix(f'{name}.'): value for key, value in options.items() if key.startswith(f'{name}.')
                }
                values[name] = type(field.default).from_dotted(inner)
            elif name in options:
                values[name] = options[name]
        return cls.model_construct(**values)


class NormOptions(Section):
    """The norms."""

    kind: Choice[Literal['rmsnorm', 'layernorm']] = option(
        former='norm', description='kind of all norms (default: of the family)'
    )
    eps: Choice[float] = option(
        former='norm_eps',
        changes='forward',
        gt=0,
        description='added to the variance in norms (default: of the family)',
    )
    offset: Choice[float] = option(
        0.0, former='norm_offset', description='added to the scales of norms: 1 if weights are stored minus 1'
    )
    bias: Choice[bool] = option(
        former='norm_bias', description='biases on the norms, if kind is layernorm (default: model.bias)'
    )


class BlockOptions(Section):
    """How a layer combines attention and feed-forward with the residual stream."""

    norms: Choice[Literal['pre', 'post', 'sandwich']] = option(
        'pre',
        former='block_norms',
        description='norms before attention and feed-forward (default), after them, or both',
    )
    parallel: Choice[bool] = option(
        False,
        former='parallel_block',
        description='attention and feed-forward of a layer have the same input (default: one after the other)',
    )
    shared_norm: Choice[bool] = option(
        False, description='with parallel: one norm before both attention and feed-forward'
    )
    residual_multiplier: Choice[float] = option(
        1.0,
        changes='forward',
        gt=0,
        description='what attention and feed-forward add to the residual stream, times this (default 1)',
    )
    layer_scale: Choice[bool] = option(
        False, former=None, description="a layer's output is multiplied by a number that is learned (default no)"
    )
    dropout: Choice[float] = option(
        former='residual_dropout',
        changes='training',
        ge=0,
        lt=1,
        description='share that training drops of what attention and feed-forward add to the residual stream '
        '(default: model.dropout)',
    )


class LatentOptions(Section):
    """Latent attention: keys and values, and queries,
    are projected through narrow latents (multi-head latent attention).
    """

    kv_rank: Choice[int] = option(
        0, ge=0, description='width of the latent of keys and values (default 0: ordinary attention)'
    )
    q_rank: Choice[int] = option(
        0, ge=0, description='width of the latent of queries (default 0: queries are projected from the hidden states)'
    )
    d_rope: Choice[int] = option(
        0, gt=0, description='width of the part of queries and keys with positions (default 64)'
    )
    d_nope: Choice[int] = option(
        0, gt=0, description='width of the part of queries and keys without positions (default attention.d_head)'
    )


class AttentionOptions(Section):
    """Attention."""

    n_heads: Choice[int] = option(gt=0, description='query heads')
    n_kv_heads: Choice[int] = option(gt=0, description='key and value heads (default n_heads)')
    d_head: Choice[int] = option(gt=0, description='width of a head (default d_model / n_heads)')
    qk_norm: Choice[Literal['none', 'head', 'each_head', 'full', 'l2']] = option(
        'none',
        description='norm of queries and keys: of each head with one scale for all or a scale each, or of all heads '
        'together; l2: of each head after its rotation, without a scale (default none)',
    )
    v_norm: Choice[bool] = option(
        False, former=None, description='RMSNorm of each value head, without a scale (default no)'
    )
    window: Choice[int] = option(
        0, changes='forward', ge=0, description='tokens that a token sees, itself included (default 0: all)'
    )
    window_type: Choice[Literal['sliding', 'chunked']] = option(
        'sliding',
        changes='forward',
        description="sliding: the last tokens (default); chunked: those of the token's chunk, of `window` tokens each",
    )
    global_every: Choice[int] = option(
        0, changes='forward', ge=0, description='every n-th layer has no window (default 0: never)'
    )
    global_d_head: Choice[int] = option(
        0, former=None, ge=0, description='width of a head in layers without a window (default 0: d_head)'
    )
    global_n_kv_heads: Choice[int] = option(
        0, former=None, ge=0, description='key and value heads in layers without a window (default 0: n_kv_heads)'
    )
    global_k_as_v: Choice[bool] = option(
        False,
        former=None,
        description='values of layers without a window are the projections that their keys are made of (default no)',
    )
    query_pre_attn_scalar: float | None = option(
        None, changes='forward', gt=0, description='attention scores are divided by its square root (default d_head)'
    )
    temperature: Choice[float] = option(
        0.0,
        former='attention_temperature',
        changes='forward',
        ge=0,
        description='queries of layers without positions are multiplied by 1 + this log(1 + floor(position / '
        'temperature_length)), positions from 1 (default 0: not)',
    )
    temperature_length: Choice[int] = option(
        8192, changes='forward', gt=0, description='see temperature (default 8192)'
    )
    softcap: Choice[float] = option(
        0.0,
        former='attention_softcap',
        changes='forward',
        ge=0,
        description='attention scores become cap * tanh(score / cap) (default 0: no cap)',
    )
    sinks: Choice[bool] = option(
        False,
        former='attention_sinks',
        description='each head may attend to nothing: one more score, which is learned (default no)',
    )
    gate: Choice[bool] = option(
        False, former='attention_gate', description="attention's output is gated by a sigmoid of the token"
    )
    qkv_bias: Choice[bool] = option(description='biases on queries, keys and values (default: model.bias)')
    o_bias: Choice[bool] = option(description="bias on attention's output (default: model.bias)")
    dropout: Choice[float] = option(
        former='attention_dropout',
        changes='training',
        ge=0,
        lt=1,
        description='share of the attention probabilities that training drops (default: model.dropout)',
    )
    kernel: Literal['auto', 'cudnn', 'splash', 'blockwise'] = option(
        default='auto',
        former='attention',
        changes='nothing',
        description='the implementation; auto: chosen by device and sizes',
    )
    context: Literal['auto', 'ring', 'all_to_all'] = option(
        default='auto', changes='nothing', description='how attention treats sequences that are sharded over mesh.c'
    )
    latent: Choice[LatentOptions] = Field(
        default=LatentOptions(), description='latent attention; null: ordinary attention'
    )


class RopeOptions(Section):
    """Rotary positions, and the layers that have none."""

    base: Choice[float] = option(
        10000.0, former='rope_base', changes='forward', gt=0, description='base of the frequencies (default 10000)'
    )
    local_base: float | None = option(
        None,
        former='local_rope_base',
        changes='forward',
        gt=0,
        description='base of layers with a window, whose frequencies are not scaled (default: base)',
    )
    scaling: RopeScaling | None = option(
        None, former='rope_scaling', changes='forward', description='how frequencies are scaled for longer contexts'
    )
    fraction: Choice[float] = option(
        1.0,
        former='rotary_fraction',
        changes='forward',
        gt=0,
        le=1,
        description='part of each head that rope rotates, its first dimensions (default 1)',
    )
    nope_every: Choice[int] = option(
        0, changes='forward', ge=0, description='every n-th layer has no positions (default 0: never)'
    )
    nope_global: Choice[bool] = option(
        False, changes='forward', description='layers without a window have no positions, if others have a window'
    )


class RecurrentOptions(Section):
    """Gated delta nets and state-space models."""

    n_heads: Choice[int] = option(former='linear_heads', gt=0, description='heads (default 2 d_model / d_head)')
    n_key_heads: Choice[int] = option(
        former='linear_key_heads',
        gt=0,
        description='heads of keys and queries, the groups of Mamba 2 (default n_heads)',
    )
    d_head: Choice[int] = option(
        128, former='linear_d_head', gt=0, description='width of a value in a head (default 128)'
    )
    d_key: Choice[int] = option(
        128,
        former='linear_d_key',
        gt=0,
        description='width of a key in a head, the state size of Mamba 2 (default 128)',
    )
    conv_width: Choice[int] = option(
        4, gt=1, description='tokens that the causal convolution of a token sees, itself included (default 4)'
    )
    conv_bias: Choice[bool] = option(False, description='biases of the causal convolution (default false)')


class FeedForwardOptions(Section):
    """The feed-forward."""

    d_ff: Choice[int] = option(
        ge=0, description='width (default 4 d_model, or 8/3 if gated); 0: layers have no feed-forward'
    )
    activation: Choice[Literal['swiglu', 'swiglu_oai', 'geglu', 'gelu', 'gelu_erf', 'relu2']] = option(
        description='swiglu, swiglu_oai and geglu are gated (default: of the family)'
    )
    swiglu_limit: Choice[float] = option(
        7.0, changes='forward', gt=0, description='swiglu_oai clamps gate and up to it (default 7)'
    )
    bias: Choice[bool] = option(
        former='mlp_bias', description='biases on the feed-forward, on experts and their router (default: model.bias)'
    )


class EmbeddingOptions(Section):
    """The embedding."""

    scale: Choice[bool] = option(
        False, former='scale_embedding', changes='forward', description='embeddings times sqrt(d_model)'
    )
    multiplier: Choice[float] = option(
        1.0, former='embedding_multiplier', changes='forward', gt=0, description='embeddings times this (default 1)'
    )
    tied: Choice[bool] = option(description='the unembedding is the embedding')
    dropout: Choice[float] = option(
        former='embedding_dropout',
        changes='training',
        ge=0,
        lt=1,
        description="share of the first layer's input that training drops (default: model.dropout)",
    )


class HeadOptions(Section):
    """The unembedding and the logits."""

    softcap: Choice[float] = option(
        0.0,
        former='final_softcap',
        changes='forward',
        ge=0,
        description='logits become cap * tanh(logit / cap) (default 0: no cap)',
    )
    bias: Choice[bool] = option(False, former='unembed_bias', description='bias on the unembedding (default false)')
    multiplier: Choice[float] = option(
        1.0, former='logit_multiplier', changes='forward', gt=0, description='logits times this (default 1)'
    )


class RouterOptions(Section):
    """How tokens are distributed among experts."""

    scores: Choice[Literal['softmax', 'sigmoid']] = option(
        'softmax',
        former='router_scores',
        description='how the router scores experts: softmax over all of them (default), or sigmoid of each',
    )
    bias: Choice[bool] = option(
        False,
        former='router_bias',
        description='a bias of each expert, added to its score when experts are chosen, balances the load (default no)',
    )
    bias_rate: Choice[float] = option(
        0.001,
        former='router_bias_rate',
        changes='training',
        ge=0,
        description='with bias: how far each step moves the biases, up if an expert has less than an even load '
        '(default 0.001)',
    )
    n_groups: Choice[int] = option(
        1, former='n_expert_groups', gt=0, description='groups of neighboring experts (default 1: none)'
    )
    groups_per_token: Choice[int] = option(
        1, gt=0, description="groups that a token's experts are chosen from: those with the highest group_scores"
    )
    group_scores: Choice[Literal['max', 'top2']] = option(
        'max', description="a group's score: its highest, or the sum of its two highest (default max)"
    )
    normalize: Choice[bool] = option(
        True, former='normalize_router', description="a token's weights on its experts sum to one"
    )
    scale: Choice[float] = option(
        1.0,
        former='router_scale',
        changes='forward',
        gt=0,
        description="multiplies a token's weights on its experts, after normalize (default 1)",
    )
    weigh_inputs: Choice[bool] = option(
        False, description="a token's weights multiply what its experts read, not what they give (default no)"
    )
    balance_loss: Choice[float] = option(
        0.01, changes='training', ge=0, description='weight of the load-balance loss (default 0.01)'
    )
    balance_over: Choice[Literal['sequence', 'batch']] = option(
        'sequence',
        changes='training',
        description='whether the load is balanced in each sequence (default) or over the batch',
    )
    z_loss: Choice[float] = option(
        0.0,
        former='router_z_loss',
        changes='training',
        ge=0,
        description="weight of mean(log(Z)^2) of the router's logits",
    )


class ExpertsOptions(Section):
    """A mixture of experts."""

    n_experts: Choice[int] = option(
        0, ge=0, description='feed-forwards that a router chooses from (default 0: one feed-forward, no router)'
    )
    experts_per_token: Choice[int] = option(2, gt=0, description='experts per token (default 2)')
    dense_layers: Choice[LayerNumbers] = option(
        (), description='layers without experts: the first n, or a list of numbers from 0 (default 0: none)'
    )
    every: Choice[int] = option(
        1, former='expert_every', gt=0, description='every n-th layer has experts (default 1: all)'
    )
    d_ff_dense: Choice[int] = option(
        0, gt=0, description='width of the feed-forward of layers without experts (default: that of all active experts)'
    )
    d_shared: Choice[int] = option(
        0, ge=0, description='width of the shared expert, which every token uses (default 0: none)'
    )
    shared_gate: Choice[bool] = option(False, description="the shared expert's output is gated by the token")
    capacity: float | None = option(
        None,
        changes='training',
        gt=0,
        description='tokens per expert and sequence, relative to an even share; null: no limit',
    )
    router: RouterOptions = Field(default=RouterOptions(), description='how tokens are distributed among experts')


class MultiTokenOptions(Section):
    """Multi-token prediction."""

    n_layers: Choice[int] = option(
        0,
        former='mtp_layers',
        changes='training',
        ge=0,
        description='modules that each predict one more token ahead (default 0: none)',
    )
    loss: Choice[float] = option(
        0.3,
        former='mtp_loss',
        changes='training',
        ge=0,
        description='weight of the losses of the modules together (default 0.3)',
    )


class InitOptions(Section):
    """How weights are drawn."""

    kind: Choice[Literal['scaled', 'normal', 'truncated', 'xavier']] = option(
        'scaled',
        former='init',
        changes='training',
        description='how weights are drawn: normal; scaled: projections into the residual stream by depth; truncated '
        'at 3 '
        'standard deviations; xavier (default scaled)',
    )
    std: float = option(
        default=0.02,
        former='init_std',
        changes='training',
        gt=0,
        description='standard deviation of the initial weights',
    )


class PipelineOptions(Section):
    """Pipeline stages, which mesh.p counts."""

    rounds: int = option(
        default=1,
        changes='nothing',
        former='pipeline_rounds',
        gt=0,
        description='times a micro-batch goes around the stages of mesh.p; more rounds make the bubble smaller',
    )
    schedule: Literal['auto', 'interleaved', '1f1b'] = option(
        default='auto',
        changes='nothing',
        former='pipeline_schedule',
        description='when stages of mesh.p run backward: after all micro-batches (interleaved), or after each (1f1b)',
    )


class PublishedOptions(Section):
    """Where the options that are left out come from."""

    preset: str | None = option(description='a published model: ' + ', '.join(PRESET_NAMES))
    family: Literal[FAMILY_NAMES] | None = option(
        description='a published architecture, which supplies the other keys of the model (default llama)'
    )
    bias: Choice[bool] = option(description='biases on every linear layer and norm')
    mup: Mup | None = option(
        None,
        changes='training',
        description='initial values, multipliers and learning rates follow the width (muP), so that a learning rate '
        'found '
        'for a narrow model fits wider ones (default: they do not)',
    )
    dropout: float = option(
        default=0.0,
        ge=0,
        lt=1,
        description='share of the numbers that training drops, where attention.dropout, block.dropout or '
        'embedding.dropout is null',
    )


class DecoderOptions(Section):
    """The sizes and parts of the decoder."""

    n_layers: Choice[int] = option(gt=0, description='number of layers')
    d_model: Choice[int] = option(gt=0, description='width of the residual stream')
    vocab_size: Choice[int] = option(gt=0, description="number of token ids (default: the data's)")
    max_sequence_length: Choice[int] = option(
        gt=0, description='number of learned positions (default: the sequence length)'
    )
    positions: Choice[Literal['rope', 'learned']] = option(
        description='rope rotates queries and keys; learned: a vector for each position (default: of the family)'
    )
    layer_types: tuple[Literal['full', 'window', 'delta', 'mamba'], ...] | None = option(
        None,
        description='of each layer: attention (full, or with the window), a gated delta net, or a state-space model '
        '(Mamba 2); in the place of attention.global_every; a shorter list repeats',
    )
    z_loss: float = option(
        default=0.0,
        changes='training',
        ge=0,
        description='weight of mean(log(Z)^2), which keeps the logits from drifting',
    )
    norm: NormOptions = Field(default=NormOptions(), description='the norms')
    block: BlockOptions = Field(
        default=BlockOptions(), description='how a layer combines attention and feed-forward with the residual stream'
    )
    attention: AttentionOptions = Field(default=AttentionOptions(), description='attention')
    rope: RopeOptions = Field(default=RopeOptions(), description='rotary positions, and the layers that have none')
    recurrent: RecurrentOptions = Field(
        default=RecurrentOptions(), description='gated delta nets and state-space models'
    )
    feed_forward: FeedForwardOptions = Field(default=FeedForwardOptions(), description='the feed-forward')
    embedding: EmbeddingOptions = Field(default=EmbeddingOptions(), description='the embedding')
    head: HeadOptions = Field(default=HeadOptions(), description='the unembedding and the logits')
    experts: ExpertsOptions = Field(default=ExpertsOptions(), description='a mixture of experts')
    multi_token: MultiTokenOptions = Field(default=MultiTokenOptions(), description='multi-token prediction')
    init: InitOptions = Field(default=InitOptions(), description='how weights are drawn')


class ExecutionOptions(Section):
    """How the decoder runs; the results are the same."""

    layers: Literal['auto', 'scan', 'unroll'] = option(
        default='auto', changes='nothing', description='scan: one layer in a loop; unroll: all layers in the program'
    )
    save: (
        Literal['all', 'none', 'attention', 'dots', 'full']
        | dict[Literal['input', *SAVED_NAMES], Literal['keep', 'recompute', 'offload']]
    ) = option(
        default='all',
        changes='nothing',
        description='activations for the backward pass: all, a list of names (none, attention, dots, full), or '
        'keep, recompute or offload by name (others: recompute)',
    )
    loss_chunks: int = option(
        default=1,
        changes='nothing',
        gt=0,
        description='chunks of a sequence whose logits exist one at a time; the backward pass recomputes them',
    )
    batch_parts: int = option(
        default=1,
        changes='nothing',
        gt=0,
        description="parts of a device's sequences in a layer; communication over t of one runs beside the products "
        'of another',
    )
    pipeline: PipelineOptions = Field(default=PipelineOptions(), description='pipeline stages, which mesh.p counts')
