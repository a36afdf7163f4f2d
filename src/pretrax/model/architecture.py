"""The architecture of a decoder: its sizes and parts, and how its layers differ. No JAX here."""

import dataclasses
import math
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrax.errors import UserError


class RopeScaling(BaseModel):
    """How the frequencies of RoPE are scaled; `rope.py` has the formulas."""

    model_config = ConfigDict(extra='forbid', frozen=True)

    kind: Literal['none', 'linear', 'llama3'] = Field(description='none turns the scaling of a preset off')
    factor: float = Field(1.0, ge=1, description='how much longer contexts are')
    low_freq_factor: float = Field(
        1.0, gt=0, description='llama3: frequencies with fewer turns than this in original_length are scaled'
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description='llama3: frequencies with more turns than this are unchanged'
    )
    original_length: int = Field(8192, gt=0, description='llama3: the context length before scaling')

    @model_validator(mode='after')
    def _has_a_range(self) -> Self:
        if self.kind == 'llama3' and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f'low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}'
            )
        return self

    def __str__(self) -> str:
        return f'{self.kind} x{self.factor:g}'


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """How the layers of a decoder may differ."""

    window: int  # tokens that a token sees, itself included; 0: all
    rope_base: float | None  # None: no rotation
    rope_scaling: RopeScaling | None


@dataclasses.dataclass(frozen=True)
class Scores:
    """How attention scores are computed from products of queries and keys, and which keys are visible."""

    divisor: float
    softcap: float  # 0: none
    window: int  # tokens that a token sees, itself included; 0: all

    def sees(self, distance: Any) -> Any:
        """Whether a token sees the token `distance` positions before it: a number or an array."""
        return (distance >= 0) & (distance < self.window) if self.window else distance >= 0


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Sizes and parts of the decoder."""

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
    norm_offset: float
    block_norms: str
    qk_norm: str
    positions: str
    rope_base: float
    local_rope_base: float | None
    rope_scaling: RopeScaling | None
    nope_every: int
    window: int
    global_every: int
    query_pre_attn_scalar: float | None
    attention_softcap: float
    final_softcap: float
    activation: str
    bias: bool
    qkv_bias: bool
    scale_embedding: bool
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
        parts = [
            *['embedding times sqrt(width)'] * self.scale_embedding,
            self.norm + (f' ({self.norm_offset:g} + w)' if self.norm_offset else ''),
            *[f'{self.block_norms}-norms'] * (self.block_norms != 'pre'),
            *[f'queries and keys normed ({self.qk_norm})'] * (self.qk_norm != 'none'),
            self._describe_positions(),
            *self._describe_attention(),
            self.activation,
            *['biases' if self.bias else 'biases of q, k, v'] * self.qkv_bias,
            *[f'logits capped at {self.final_softcap:g}'] * bool(self.final_softcap),
            *['tied'] * self.tied,
        ]
        return (
            f'{self.n_layers} layers, width {self.d_model}, {heads}, feed-forward {self.d_ff}, '
            f'vocabulary {self.vocab_size}{padded}; {", ".join(parts)}'
        )

    def _describe_positions(self) -> str:
        if self.positions != 'rope':
            return self.positions
        more = [f'base {self.rope_base:g}'] if self.rope_base != 10000 else []
        if self.local_rope_base is not None:
            more.append(f'base {self.local_rope_base:g} in layers with a window')
        if self.rope_scaling is not None:
            more.append(str(self.rope_scaling))
        if self.nope_every:
            more.append(f'none in every {ordinal(self.nope_every)} layer')
        return 'rope' + (f' ({", ".join(more)})' if more else '')

    def _describe_attention(self) -> list[str]:
        parts = []
        if self.window:
            every = f' but in every {ordinal(self.global_every)} layer' if self.global_every else ''
            parts.append(f'window {self.window}{every}')
        if self.query_pre_attn_scalar not in (None, self.d_head):
            parts.append(f'scores over sqrt({self.query_pre_attn_scalar:g})')
        if self.attention_softcap:
            parts.append(f'scores capped at {self.attention_softcap:g}')
        return parts

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, which alternate: layer i has kinds[i % len(kinds)]."""
        return tuple(self._kind(i) for i in range(math.lcm(self.global_every or 1, self.nope_every or 1)))

    def _kind(self, i: int) -> LayerKind:
        everywhere = self.global_every and (i + 1) % self.global_every == 0
        window = 0 if everywhere else self.window
        if self.positions != 'rope' or (self.nope_every and (i + 1) % self.nope_every == 0):
            return LayerKind(window, None, None)
        if window and self.local_rope_base is not None:
            return LayerKind(window, self.local_rope_base, None)
        return LayerKind(window, self.rope_base, self.rope_scaling)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: it sees everything."""
        return tuple(self.kinds[i % len(self.kinds)].window for i in range(self.n_layers))

    @property
    def score_divisor(self) -> float:
        """The divisor of the products of queries and keys."""
        return math.sqrt(self.query_pre_attn_scalar or self.d_head)

    def scores(self, kind: LayerKind) -> Scores:
        """The attention scores of a layer."""
        return Scores(self.score_divisor, self.attention_softcap, kind.window)

    @property
    def n_norms(self) -> int:
        """Norms of the residual stream in a layer."""
        return 4 if self.block_norms == 'sandwich' else 2

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation != 'gelu'

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter in the types of the weights."""
        return {
            'layers': self.n_layers, 'M': self.d_model, 'H': self.n_heads, 'K': self.n_kv_heads, 'D': self.d_head,
            'F': self.d_ff, 'V': self.padded_vocab_size, 'P': self.max_sequence_length, 'E': self.n_experts,
            'F_shared': self.d_shared,
        }  # fmt: skip

    @property
    def n_matmul_params(self) -> int:
        """Weights in matrix products per token: all but embeddings, norms, biases and the experts that a token does not use."""
        attention = self.d_model * self.d_head * (2 * self.n_heads + 2 * self.n_kv_heads)
        mlp = self.d_model * self.d_ff * (3 if self.gated else 2)
        if self.n_experts:
            shared = self.d_model * (3 * self.d_shared + self.shared_gate)
            mlp = self.experts_per_token * mlp + shared + self.d_model * self.n_experts
        return self.n_layers * (attention + mlp) + self.vocab_size * self.d_model

    @property
    def n_idle_params(self) -> int:
        """Weights of the experts that a token does not use."""
        idle = max(0, self.n_experts - self.experts_per_token)
        return self.n_layers * idle * 3 * self.d_model * self.d_ff

    def check_mesh(self, mesh: dict[str, int], sequence_length: int) -> None:
        """Raises UserError if the mesh does not divide the model; it names the nearest size that does."""
        t, d, e = mesh['t'], mesh['d'], mesh['e']
        if e > 1 and not self.n_experts:
            raise UserError(f'mesh.e = {e} shards experts, and the model has none\nuse mesh.d instead')
        if self.n_experts and self.capacity is not None and mesh['c'] > 1:
            raise UserError(
                f'model.capacity needs whole sequences, and mesh.c = {mesh["c"]} shards them\n'
                'use model.capacity=null or mesh.c=1'
            )
        if self.n_experts % e:
            fits = [n for n in range(1, e + 1) if self.n_experts % n == 0]
            raise UserError(
                f'model.n_experts = {self.n_experts} is not divisible by mesh.e = {e}\nuse mesh.e={fits[-1]}'
            )
        split = {
            'model.n_heads': self.n_heads, 'model.n_kv_heads': self.n_kv_heads, 'model.d_ff': self.d_ff,
            'model.d_shared': self.d_shared,
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


def ordinal(n: int) -> str:
    """2 -> '2nd'."""
    return f'{n}{"th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")}'
