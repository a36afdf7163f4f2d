"""The options of the decoder: the keys that the section `model:` of a configuration may write. No JAX here.

Each is declared once, with its type, limits, description and default, its former name, and what it changes. An option
that is left out comes from the preset (presets.yaml), then from the family (families.yaml), then it is the default.
`architecture.resolve` gives every option a value.
"""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pretrax.model.families import FAMILY_NAMES, PRESET_NAMES, SAVED_NAMES
from pretrax.model.mup import Mup
from pretrax.model.options.attention import AttentionOptions, RopeOptions
from pretrax.model.options.feed_forward import ExpertsOptions, FeedForwardOptions
from pretrax.model.options.section import Choice, Section, Share, option


class NormOptions(Section):
    """The norms."""

    kind: Choice[Literal['rmsnorm', 'layernorm']] = option(
        former='norm', description='kind of all norms (default: of the family)'
    )
    eps: Choice[PositiveFloat] = option(
        former='norm_eps', changes='forward', description='added to the variance in norms (default: of the family)'
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
    residual_multiplier: Choice[PositiveFloat] = option(
        1.0,
        changes='forward',
        description='what attention and feed-forward add to the residual stream, times this (default 1)',
    )
    layer_scale: Choice[bool] = option(
        False, former=None, description="a layer's output is multiplied by a number that is learned (default no)"
    )
    dropout: Choice[Share] = option(
        former='residual_dropout',
        changes='training',
        description='share that training drops of what attention and feed-forward add to the residual stream '
        '(default: model.dropout)',
    )


class RecurrentOptions(Section):
    """Gated delta nets and state-space models."""

    n_heads: Choice[PositiveInt] = option(former='linear_heads', description='heads (default 2 d_model / d_head)')
    n_key_heads: Choice[PositiveInt] = option(
        former='linear_key_heads', description='heads of keys and queries, the groups of Mamba 2 (default n_heads)'
    )
    d_head: Choice[PositiveInt] = option(
        128, former='linear_d_head', description='width of a value in a head (default 128)'
    )
    d_key: Choice[PositiveInt] = option(
        128, former='linear_d_key', description='width of a key in a head, the state size of Mamba 2 (default 128)'
    )
    conv_width: Choice[int] = option(
        4, gt=1, description='tokens that the causal convolution of a token sees, itself included (default 4)'
    )
    conv_bias: Choice[bool] = option(False, description='biases of the causal convolution (default false)')


class EmbeddingOptions(Section):
    """The embedding."""

    scale: Choice[bool] = option(
        False, former='scale_embedding', changes='forward', description='embeddings times sqrt(d_model)'
    )
    multiplier: Choice[PositiveFloat] = option(
        1.0, former='embedding_multiplier', changes='forward', description='embeddings times this (default 1)'
    )
    tied: Choice[bool] = option(description='the unembedding is the embedding')
    dropout: Choice[Share] = option(
        former='embedding_dropout',
        changes='training',
        description="share of the first layer's input that training drops (default: model.dropout)",
    )


class HeadOptions(Section):
    """The unembedding and the logits."""

    softcap: Choice[NonNegativeFloat] = option(
        0.0,
        former='final_softcap',
        changes='forward',
        description='logits become cap * tanh(logit / cap) (default 0: no cap)',
    )
    bias: Choice[bool] = option(False, former='unembed_bias', description='bias on the unembedding (default false)')
    multiplier: Choice[PositiveFloat] = option(
        1.0, former='logit_multiplier', changes='forward', description='logits times this (default 1)'
    )

    def describe(self) -> list[str]:
        """For the start-up report."""
        return [f'logits capped at {self.softcap:g}'] * bool(self.softcap)


class MultiTokenOptions(Section):
    """Multi-token prediction."""

    n_layers: Choice[NonNegativeInt] = option(
        0,
        former='mtp_layers',
        changes='training',
        description='modules that each predict one more token ahead (default 0: none)',
    )
    loss: Choice[NonNegativeFloat] = option(
        0.3,
        former='mtp_loss',
        changes='training',
        description='weight of the losses of the modules together (default 0.3)',
    )


class InitOptions(Section):
    """How weights are drawn."""

    kind: Choice[Literal['scaled', 'normal', 'truncated', 'xavier']] = option(
        'scaled',
        former='init',
        changes='training',
        description='how weights are drawn: normal; scaled: projections into the residual stream by depth; truncated '
        'at 3 standard deviations; xavier (default scaled)',
    )
    std: PositiveFloat = option(
        default=0.02, former='init_std', changes='training', description='standard deviation of the initial weights'
    )


class PipelineOptions(Section):
    """Pipeline stages, which mesh.p counts."""

    rounds: PositiveInt = option(
        default=1,
        changes='nothing',
        former='pipeline_rounds',
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
        'found for a narrow model fits wider ones (default: they do not)',
    )
    dropout: Share = option(
        default=0.0,
        description='share of the numbers that training drops, where attention.dropout, block.dropout or '
        'embedding.dropout is null',
    )


class DecoderOptions(Section):
    """The sizes and parts of the decoder."""

    n_layers: Choice[PositiveInt] = option(description='number of layers')
    d_model: Choice[PositiveInt] = option(description='width of the residual stream')
    vocab_size: Choice[PositiveInt] = option(description="number of token ids (default: the data's)")
    max_sequence_length: Choice[PositiveInt] = option(
        description='number of learned positions (default: the sequence length)'
    )
    positions: Choice[Literal['rope', 'learned']] = option(
        description='rope rotates queries and keys; learned: a vector for each position (default: of the family)'
    )
    layer_types: tuple[Literal['full', 'window', 'delta', 'mamba'], ...] | None = option(
        None,
        description='of each layer: attention (full, or with the window), a gated delta net, or a state-space model '
        '(Mamba 2); in the place of attention.global_every; a shorter list repeats',
    )
    z_loss: NonNegativeFloat = option(
        default=0.0, changes='training', description='weight of mean(log(Z)^2), which keeps the logits from drifting'
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
    loss_chunks: PositiveInt = option(
        default=1,
        changes='nothing',
        description='chunks of a sequence whose logits exist one at a time; the backward pass recomputes them',
    )
    batch_parts: PositiveInt = option(
        default=1,
        changes='nothing',
        description="parts of a device's sequences in a layer; communication over t of one runs beside the products "
        'of another',
    )
    pipeline: PipelineOptions = Field(default=PipelineOptions(), description='pipeline stages, which mesh.p counts')
