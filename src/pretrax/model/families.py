"""Model families as rows of choices, published sizes as data, and the options a configuration may write.

A family fixes what the decoder is made of; a preset is a family with published sizes. Every choice can be overridden:
`model: {preset: gpt2-124m, n_layers: 6}`. No JAX here, so that configurations are checked quickly.
"""

import dataclasses
import difflib
import math
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import UserError

FAMILIES: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the released code's choices
    'gpt2': {
        'norm': 'layernorm', 'norm_eps': 1e-5, 'positions': 'learned', 'activation': 'gelu', 'bias': True, 'tied': True,
    },
    # Touvron et al. 2023, arXiv:2302.13971, section 2.2
    'llama': {
        'norm': 'rmsnorm', 'norm_eps': 1e-5, 'positions': 'rope', 'activation': 'swiglu', 'bias': False, 'tied': False,
    },
}  # fmt: skip


def _gpt2(n_layers: int, d_model: int, n_heads: int) -> dict[str, Any]:
    sizes = {'n_layers': n_layers, 'd_model': d_model, 'n_heads': n_heads, 'd_ff': 4 * d_model}
    return {'family': 'gpt2', 'vocab_size': 50257, 'max_sequence_length': 1024, **sizes}


def _llama(vocab_size: int, n_layers: int, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int, **more: Any) -> Any:
    sizes = {'n_layers': n_layers, 'd_model': d_model, 'n_heads': n_heads, 'n_kv_heads': n_kv_heads, 'd_ff': d_ff}
    return {'family': 'llama', 'vocab_size': vocab_size, **sizes, **more}


def _seqax(d_model: int, n_heads: int, d_ff: int) -> dict[str, Any]:
    return _llama(32768, 8, d_model, n_heads, n_heads, d_ff, d_head=128)


PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, table 2 (layers, width), with the head counts of the released models
    'gpt2-124m': _gpt2(12, 768, 12),
    'gpt2-355m': _gpt2(24, 1024, 16),
    'gpt2-774m': _gpt2(36, 1280, 20),
    'gpt2-1.5b': _gpt2(48, 1600, 25),
    # Touvron et al. 2023, arXiv:2307.09288, and the released configurations
    'llama2-7b': _llama(32000, 32, 4096, 32, 32, 11008),
    'llama2-13b': _llama(32000, 40, 5120, 40, 40, 13824),
    'llama2-70b': _llama(32000, 80, 8192, 64, 8, 28672),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3
    'llama3-8b': _llama(128256, 32, 4096, 32, 8, 14336, rope_base=500000.0),
    'llama3-70b': _llama(128256, 80, 8192, 64, 8, 28672, rope_base=500000.0),
    'llama3-405b': _llama(128256, 126, 16384, 128, 8, 53248, rope_base=500000.0),
    # The C4 configurations of seqax (MatX-inc/seqax, configs/c4_a100x8_*.yaml)
    'seqax-84m': _seqax(512, 8, 4096),
    'seqax-270m': _seqax(1024, 16, 8192),
    'seqax-540m': _seqax(2048, 16, 8192),
    'seqax-1b': _seqax(2048, 16, 16384),
    'seqax-2b': _seqax(4096, 16, 16384),
}

SAVED_NAMES = ('q', 'k', 'v', 'attention', 'gate', 'up', 'attention_out', 'mlp_out')


class TransformerOptions(BaseModel):
    """What a configuration may say of the decoder. What it leaves out comes from the preset, then from the family."""

    model_config = ConfigDict(extra='forbid', frozen=True)

    preset: str | None = Field(None, description='a published model: ' + ', '.join(PRESETS))
    family: Literal['gpt2', 'llama'] | None = Field(None, description='a row of choices (default llama)')
    n_layers: int | None = Field(None, gt=0)
    d_model: int | None = Field(None, gt=0, description='width of the residual stream')
    n_heads: int | None = Field(None, gt=0, description='query heads')
    n_kv_heads: int | None = Field(None, gt=0, description='key and value heads (default n_heads)')
    d_head: int | None = Field(None, gt=0, description='width of a head (default d_model / n_heads)')
    d_ff: int | None = Field(None, gt=0, description='width of the feed-forward (default 4 d_model, or 8/3 if gated)')
    vocab_size: int | None = Field(None, gt=0, description="default: the data's")
    max_sequence_length: int | None = Field(None, gt=0, description='learned positions (default: the sequence length)')
    norm: Literal['rmsnorm', 'layernorm'] | None = None
    norm_eps: float | None = Field(None, gt=0)
    positions: Literal['rope', 'learned'] | None = None
    rope_base: float | None = Field(None, gt=0, description='default 10000')
    activation: Literal['swiglu', 'gelu'] | None = None
    bias: bool | None = Field(None, description='biases on every linear layer and norm')
    tied: bool | None = Field(None, description='the unembedding is the embedding')
    n_experts: int | None = Field(
        None, ge=0, description='feed-forwards a router chooses from (default 0: one, no router)'
    )
    experts_per_token: int | None = Field(None, gt=0, description='experts that a token visits (default 2)')
    d_shared: int | None = Field(
        None, ge=0, description='width of the expert that every token visits (default 0: none)'
    )
    shared_gate: bool | None = Field(None, description="the shared expert's output is gated by the token")
    normalize_router: bool | None = Field(None, description="a token's weights on its experts add up to one")
    capacity: float | None = Field(
        None, gt=0, description='places an expert has in a sequence, over its even share; null: as many as needed'
    )
    balance_loss: float | None = Field(None, ge=0, description='weight of the load-balance loss (default 0)')
    balance_over: Literal['sequence', 'batch'] | None = Field(
        None, description='what experts are to be balanced over (default: each sequence)'
    )
    router_z_loss: float | None = Field(None, ge=0, description="weight of mean(log(Z)^2) of the router's logits")
    init_std: float = Field(0.02, gt=0, description='standard deviation of the initial weights')
    z_loss: float = Field(0.0, ge=0, description='weight of mean(log(Z)^2), which keeps the logits from drifting')
    layers: Literal['auto', 'scan', 'unroll'] = Field('auto', description='one layer in a loop, or all of them')
    save: Literal['all', 'none'] | dict[Literal[SAVED_NAMES], Literal['keep', 'recompute']] = Field(
        'all', description='activations for the backward pass: all, none, or keep/recompute by name (others: recompute)'
    )
    attention: Literal['auto', 'cudnn', 'splash', 'blockwise'] = Field('auto', description='kernel')

    @model_validator(mode='after')
    def _fits_together(self) -> Self:
        _choose(self)
        return self


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Every choice made: sizes and the parts of the decoder."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    padded_vocab_size: int  # rows of the embedding: a multiple of 128, for the matrix units and for sharding over t
    max_sequence_length: int
    norm: str
    norm_eps: float
    positions: str
    rope_base: float
    activation: str
    bias: bool
    tied: bool
    n_experts: int
    experts_per_token: int
    d_shared: int
    shared_gate: bool
    normalize_router: bool
    capacity: float | None
    balance_loss: float
    balance_over: str
    router_z_loss: float
    init_std: float
    z_loss: float

    def describe(self) -> str:
        """One line for the start-up report."""
        heads = f'{self.n_heads} heads of {self.d_head}' + (
            f' ({self.n_kv_heads} for keys and values)' if self.n_kv_heads != self.n_heads else ''
        )
        padded = f' (padded to {self.padded_vocab_size})' if self.padded_vocab_size != self.vocab_size else ''
        parts = [self.norm, self.positions, self.activation, *['biases'] * self.bias, *['tied'] * self.tied]
        return (
            f'{self.n_layers} layers, width {self.d_model}, {heads}, feed-forward {self.d_ff}, '
            f'vocabulary {self.vocab_size}{padded}; {", ".join(parts)}'
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter in the types of the weights."""
        return {
            'layers': self.n_layers, 'M': self.d_model, 'H': self.n_heads, 'K': self.n_kv_heads, 'D': self.d_head,
            'F': self.d_ff, 'V': self.padded_vocab_size, 'P': self.max_sequence_length, 'E': self.n_experts,
            'S': self.d_shared,
        }  # fmt: skip

    @property
    def n_matmul_params(self) -> int:
        """Weights that take part in a matrix product for every token: all but embeddings, norms and biases."""
        attention = self.d_model * self.d_head * (2 * self.n_heads + 2 * self.n_kv_heads)
        mlp = self.d_model * self.d_ff * (3 if self.activation == 'swiglu' else 2)
        return self.n_layers * (attention + mlp) + self.vocab_size * self.d_model

    def check_mesh(self, mesh: dict[str, int], sequence_length: int) -> None:
        """Raises UserError where the mesh does not divide the model, naming the nearest mesh axis that does."""
        t, d = mesh['t'], mesh['d']
        split = {
            'model.n_heads': self.n_heads, 'model.n_kv_heads': self.n_kv_heads, 'model.d_ff': self.d_ff,
            'batch.sequence_length': sequence_length, 'the padded vocabulary': self.padded_vocab_size,
        }  # fmt: skip
        for name, size in split.items():
            if size % t:
                fits = [n for n in range(1, t + 1) if size % n == 0]
                raise UserError(f'{name} = {size} is not divisible by mesh.t = {t}\nuse mesh.t={fits[-1]}')
        if self.d_model % d:
            fits = [n for n in range(1, d + 1) if self.d_model % n == 0]
            raise UserError(f'model.d_model = {self.d_model} is not divisible by mesh.d = {d}\nuse mesh.d={fits[-1]}')
        if self.positions == 'learned' and self.max_sequence_length % t:
            raise UserError(
                f'model.max_sequence_length = {self.max_sequence_length} is not divisible by mesh.t = {t}\n'
                f'use model.max_sequence_length={-(-self.max_sequence_length // t) * t}'
            )


_NO_EXPERTS = {
    'n_experts': 0, 'experts_per_token': 2, 'd_shared': 0, 'shared_gate': False, 'normalize_router': True,
    'capacity': None, 'balance_loss': 0.0, 'balance_over': 'sequence', 'router_z_loss': 0.0,
}  # fmt: skip


def _choose(options: TransformerOptions) -> dict[str, Any]:
    """What is said, then the preset, then the family; and what follows from them without knowing the data."""
    said = {key: value for key, value in options.model_dump().items() if value is not None}
    if options.preset is not None and options.preset not in PRESETS:
        near = difflib.get_close_matches(options.preset, PRESETS, 1)
        hint = f'; did you mean {near[0]}?' if near else ''
        raise UserError(f"preset: there is no '{options.preset}'{hint} known: {', '.join(PRESETS)}")
    chosen = {**PRESETS.get(options.preset or '', {}), **said}
    family = chosen.get('family', 'llama')
    chosen = {'n_kv_heads': chosen.get('n_heads'), 'rope_base': 10000.0, **_NO_EXPERTS, **FAMILIES[family], **chosen}
    missing = [name for name in ('n_layers', 'd_model', 'n_heads') if name not in chosen]
    if missing:
        raise UserError(f'model: {", ".join(missing)} missing\ngive a preset, or n_layers, d_model and n_heads')
    if 'd_head' not in chosen:
        if chosen['d_model'] % chosen['n_heads']:
            raise UserError(
                f'model.d_model = {chosen["d_model"]} is not divisible by model.n_heads = {chosen["n_heads"]}\n'
                f'give model.d_head, or make d_model a multiple of n_heads'
            )
        chosen['d_head'] = chosen['d_model'] // chosen['n_heads']
    if 'd_ff' not in chosen:  # gated: 2/3 of 4 d_model, so that three matrices cost what two did (Shazeer 2020)
        gated = math.ceil(8 * chosen['d_model'] / 3 / 64) * 64
        chosen['d_ff'] = gated if chosen['activation'] == 'swiglu' else 4 * chosen['d_model']
    if chosen['n_heads'] % chosen['n_kv_heads']:
        raise UserError(
            f'model.n_heads = {chosen["n_heads"]} is not divisible by model.n_kv_heads = {chosen["n_kv_heads"]}'
        )
    if chosen['positions'] == 'rope' and chosen['d_head'] % 2:
        raise UserError(f'model.d_head = {chosen["d_head"]} is odd, and rope turns pairs\nuse an even d_head')
    return chosen


def resolve(options: TransformerOptions, vocab_size: int, sequence_length: int) -> Architecture:
    """Fills in an architecture from what the configuration says, its preset, its family and the data.

    Args:
        options: as written.
        vocab_size: of the data's tokenizer.
        sequence_length: of the batches.

    Raises:
        UserError: unknown preset, a missing size, sizes that do not fit together or do not fit the data.
    """
    chosen = _choose(options)
    chosen.setdefault('vocab_size', vocab_size)
    chosen.setdefault('max_sequence_length', sequence_length)
    if chosen['vocab_size'] < vocab_size:
        raise UserError(
            f"model.vocab_size = {chosen['vocab_size']} is smaller than the tokenizer's {vocab_size}\n"
            f'leave it out, or use model.vocab_size={vocab_size}'
        )
    if chosen['positions'] == 'learned' and chosen['max_sequence_length'] < sequence_length:
        raise UserError(
            f'batch.sequence_length = {sequence_length} exceeds model.max_sequence_length = '
            f'{chosen["max_sequence_length"]}, for which positions are learned'
        )
    chosen['padded_vocab_size'] = math.ceil(chosen['vocab_size'] / 128) * 128
    return Architecture(**{field.name: chosen[field.name] for field in dataclasses.fields(Architecture)})
