"""The architecture of a decoder: its sizes and parts, and how its layers differ. No JAX here."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

from pretrax.errors import UserError
from pretrax.model.mup import Scaling
from pretrax.model.rope_scaling import RopeScaling

Mixer = Literal['attention', 'delta', 'mamba']


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """How the layers of a decoder may differ."""

    window: int  # tokens that a token sees, itself included; 0: all
    rope_base: float | None  # None: no rotation
    rope_scaling: RopeScaling | None
    experts: bool = False  # whether the feed-forward is a mixture of experts
    rotary_fraction: float = 1.0  # part of a head that is rotated
    mixer: Mixer = 'attention'  # what mixes the tokens: attention, a gated delta net, or a state-space model (Mamba 2)
    feed_forward: bool = True  # False: the layer has only its mixer

    def has(self, weight: str) -> bool:
        """Whether layers of this kind have a weight, if the decoder has it. `weight`: a field of `weights.Layer`."""
        return _HAS.get(weight, lambda _: True)(self)


_OF_DENSE = {'gate', 'up', 'down', 'gate_bias', 'up_bias', 'down_bias'}
_OF_ATTENTION = {
    'q', 'k', 'v', 'o', 'q_bias', 'k_bias', 'v_bias', 'o_bias', 'q_norm', 'k_norm', 'q_full_norm', 'k_full_norm', 'o_gate',
    'sinks', 'q_direct', 'q_a', 'q_a_norm', 'q_b', 'kv_a', 'kv_a_norm', 'kv_b',
}  # fmt: skip
_OF_STATES = {
    'linear_q', 'linear_k', 'linear_v', 'linear_z', 'linear_a', 'linear_q_conv', 'linear_k_conv', 'linear_v_conv',
    'linear_q_conv_bias', 'linear_k_conv_bias', 'linear_v_conv_bias', 'linear_dt_bias', 'linear_log_decay', 'linear_o',
}  # fmt: skip
_OF_EXPERTS = {
    'router', 'router_bias', 'router_logit_bias', 'expert_gate', 'expert_up', 'expert_down', 'expert_gate_bias', 'expert_up_bias',
    'expert_down_bias', 'shared_gate', 'shared_up', 'shared_down', 'shared_mix',
}  # fmt: skip
# Which kinds of layers have a weight; all have the others
_HAS: dict[str, Callable[[LayerKind], bool]] = {
    **dict.fromkeys(_OF_ATTENTION, lambda kind: kind.mixer == 'attention'),
    **dict.fromkeys(_OF_STATES, lambda kind: kind.mixer != 'attention'),
    **dict.fromkeys(('linear_beta', 'linear_norm'), lambda kind: kind.mixer == 'delta'),
    **dict.fromkeys(('linear_skip', 'linear_group_norm'), lambda kind: kind.mixer == 'mamba'),
    **dict.fromkeys(('norm2', 'norm2_bias', 'norm2_after'), lambda kind: kind.feed_forward),
    **dict.fromkeys(_OF_DENSE, lambda kind: kind.feed_forward and not kind.experts),
    **dict.fromkeys(_OF_EXPERTS, lambda kind: kind.experts),
}


CHUNK = 64  # tokens of a chunk, in layers with a state
UNGATED = ('gelu', 'gelu_erf', 'relu2')  # activations without a gate
DROPOUT = ('attention_dropout', 'residual_dropout', 'embedding_dropout')  # the options, and fields, of dropout


@dataclasses.dataclass(frozen=True)
class Scores:
    """How attention scores are computed from products of queries and keys, and which keys are visible."""

    divisor: float
    softcap: float  # 0: none
    window: int  # tokens that a token sees, itself included; 0: all
    dropout: float = 0.0  # the share of the probabilities that training drops
    chunked: bool = False  # a token sees only its chunk of `window` tokens

    def sees(self, distance: Any) -> Any:
        """Whether a token sees the token `distance` positions before it: a number or an array."""
        return (distance >= 0) & (distance < self.window) if self.window else distance >= 0

    def same_chunk(self, position: Any, other: Any) -> Any:
        """Whether chunked attention lets tokens at these positions of a document see each other."""
        return position // self.window == other // self.window if self.chunked else True


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Sizes and parts of the decoder."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    kv_rank: int  # width of the latent of keys and values; 0: no latent attention
    q_rank: int  # of queries; 0: they have no latent
    d_nope: int  # of each query and key, under latent attention: the part without positions, and with them
    d_rope: int
    d_ff: int
    vocab_size: int
    padded_vocab_size: int  # rows of the embedding: a multiple of 128, for the matrix units and for sharding over t
    max_sequence_length: int
    norm: str
    norm_eps: float
    norm_offset: float
    block_norms: str
    parallel_block: bool  # attention and feed-forward of a layer have the same input
    shared_norm: bool  # and the same norm before them
    qk_norm: str
    positions: str
    rope_base: float
    local_rope_base: float | None
    rope_scaling: RopeScaling | None
    rotary_fraction: float
    nope_every: int
    nope_global: bool  # layers without a window have no positions, if others have one
    window: int
    window_type: str
    global_every: int
    layer_types: tuple[str, ...] | None  # 'full', 'window', 'delta' or 'mamba', repeated; None: as global_every says
    query_pre_attn_scalar: float | None
    attention_temperature: float  # of layers without positions; 0: none
    temperature_length: int
    attention_softcap: float
    attention_sinks: bool
    final_softcap: float
    attention_gate: bool
    linear_heads: int  # of layers with a delta net or a state-space model; 0: there are none
    linear_key_heads: int
    linear_d_head: int
    linear_d_key: int
    conv_width: int
    conv_bias: bool
    activation: str
    swiglu_limit: float  # of swiglu_oai
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    norm_bias: bool
    unembed_bias: bool
    scale_embedding: bool
    embedding_multiplier: float
    residual_multiplier: float
    logit_multiplier: float
    tied: bool
    n_experts: int
    experts_per_token: int
    dense_layers: tuple[int, ...]  # numbers of layers without experts
    expert_every: int  # of the others, every n-th layer has experts
    d_ff_dense: int  # feed-forward of layers without experts in a decoder with experts
    d_shared: int
    shared_gate: bool
    router_scores: str
    router_bias: bool  # added to the scores when experts are chosen; moved towards an even load
    router_bias_rate: float
    n_expert_groups: int
    groups_per_token: int
    group_scores: str
    normalize_router: bool
    router_scale: float
    weigh_inputs: bool  # the router's weights multiply what experts read, not what they give
    capacity: float | None
    balance_loss: float
    balance_over: str
    router_z_loss: float
    mtp_layers: int  # modules that each predict one more token ahead
    mtp_loss: float  # weight of their losses together
    init: str
    init_std: float
    mup: Scaling | None  # how initial values and learning rates follow the width; None: they do not
    z_loss: float
    attention_dropout: float
    residual_dropout: float
    embedding_dropout: float

    def describe(self) -> str:
        """One line for the start-up report."""
        heads = f'{self.n_heads} heads of {self.d_query}' + (
            f' ({self.n_kv_heads} for keys and values)' if self.n_kv_heads != self.n_heads else ''
        )
        padded = f' (padded to {self.padded_vocab_size})' if self.padded_vocab_size != self.vocab_size else ''
        parts = [
            *['embedding times sqrt(width)'] * self.scale_embedding,
            *self._describe_multipliers(),
            self.norm + (f' ({self.norm_offset:g} + w)' if self.norm_offset else ''),
            *[f'{self.block_norms}-norms'] * (self.block_norms != 'pre'),
            *['attention and feed-forward in parallel' + ', one norm for both' * self.shared_norm]
            * self.parallel_block,
            *[f'queries and keys normed ({self.qk_norm})'] * (self.qk_norm != 'none'),
            *self._describe_mixers(),
            *[self._describe_positions()] * (self.n_heads > 0 or self.positions != 'rope'),
            *self._describe_attention(),
            *[self.activation + (f' (values up to {self.swiglu_limit:g})' if self.activation == 'swiglu_oai' else '')]
            * (self.d_ff > 0),
            *self._describe_biases(),
            *[f'logits capped at {self.final_softcap:g}'] * bool(self.final_softcap),
            *['tied'] * self.tied,
            *self._describe_dropout(),
            *([str(self.mup)] if self.mup else []),
            *[f'{self.mtp_layers + 1} tokens predicted (weight {self.mtp_loss:g})'] * bool(self.mtp_layers),
        ]
        mixers = [heads] * (self.n_heads > 0) + [
            f'{self.linear_heads} heads of {self.linear_d_head} with states of {self.linear_d_key}'
        ] * (self.linear_heads > 0)
        inside = f'feed-forward {self.d_ff}' if self.d_ff else 'no feed-forward'
        return (
            f'{self.n_layers} layers, width {self.d_model}, {", ".join(mixers)}, {inside}, '
            f'vocabulary {self.vocab_size}{padded}; {", ".join(parts)}'
        )

    def _describe_multipliers(self) -> list[str]:
        multipliers = {
            'embedding': self.embedding_multiplier,
            'residual branches': self.residual_multiplier,
            'logits': self.logit_multiplier,
        }
        return [f'{name} times {value:g}' for name, value in multipliers.items() if value != 1]

    def _describe_dropout(self) -> list[str]:
        rates = {
            'attention probabilities': self.attention_dropout, 'residual branches': self.residual_dropout,
            'embeddings': self.embedding_dropout,
        }  # fmt: skip
        found = [f'{rate:g} of {name}' for name, rate in rates.items() if rate]
        return ['dropout in training (' + ', '.join(found) + ')'] if found else []

    def _describe_biases(self) -> list[str]:
        biases = {
            'q, k, v': self.qkv_bias, 'attention output': self.o_bias, 'feed-forward': self.mlp_bias,
            'norms': self.norm_bias, 'unembedding': self.unembed_bias,
        }  # fmt: skip
        found = [name for name, has in biases.items() if has]
        return ['biases of ' + ', '.join(found)] if found else []

    def _describe_positions(self) -> str:
        if self.positions != 'rope':
            return self.positions
        more = [f'base {self.rope_base:g}'] if self.rope_base != 10000 else []
        if self.local_rope_base is not None:
            more.append(f'base {self.local_rope_base:g} in layers with a window')
        if self.rope_scaling is not None:
            more.append(str(self.rope_scaling))
        if self.rotary_fraction != 1:
            more.append(f'of {self.rotary_fraction:g} of each head')
        if self.nope_global and self.window:
            more.append('none in layers without a window')
        if self.nope_every:
            more.append(f'none in every {ordinal(self.nope_every)} layer')
        return 'rope' + (f' ({", ".join(more)})' if more else '')

    def _describe_mixers(self) -> list[str]:
        names = {'delta': 'a gated delta net', 'mamba': 'a state-space model (Mamba 2)'}
        counts = {mixer: sum(kind.mixer == mixer for kind in self.kinds) for mixer in names}
        return [f'{names[mixer]} in {count} of {self.n_layers} layers' for mixer, count in counts.items() if count]

    def _describe_attention(self) -> list[str]:
        parts = ['attention gated'] * self.attention_gate
        if self.kv_rank:
            of_queries = f', queries from {self.q_rank}' if self.q_rank else ''
            parts.append(
                f'latent attention (keys and values from {self.kv_rank}{of_queries}; rope in {self.d_rope} of '
                f'{self.d_query}; values of {self.d_head})'
            )
        if self.window:
            every = f' but in every {ordinal(self.global_every)} layer' if self.global_every else ''
            if self.layer_types is not None:
                every = f' in {sum(map(bool, self.windows))} of {self.n_layers} layers'
            parts.append(f'{"chunks of" if self.window_type == "chunked" else "window"} {self.window}{every}')
        if self.query_pre_attn_scalar not in (None, self.d_query):
            parts.append(f'scores over sqrt({self.query_pre_attn_scalar:g})')
        if self.attention_temperature:
            parts.append(
                f'temperature {self.attention_temperature:g} in steps of {self.temperature_length} tokens in layers '
                'without positions'
            )
        if self.attention_softcap:
            parts.append(f'scores capped at {self.attention_softcap:g}')
        if self.attention_sinks:
            parts.append('attention sinks')
        return parts

    @functools.cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(self._kind, range(self.n_layers)))

    def _kind(self, i: int) -> LayerKind:
        said = None if self.layer_types is None else self.layer_types[i % len(self.layer_types)]
        everywhere = said == 'full' if said else bool(self.global_every) and (i + 1) % self.global_every == 0
        window = 0 if everywhere else self.window
        experts = self.n_experts > 0 and has_experts(i, self.dense_layers, self.expert_every)
        if said in ('delta', 'mamba'):
            return LayerKind(0, None, None, experts, mixer=said, feed_forward=self.d_ff > 0)
        nowhere = (self.nope_every and (i + 1) % self.nope_every == 0) or (
            self.nope_global and self.window and not window
        )
        if self.positions != 'rope' or nowhere:
            return LayerKind(window, None, None, experts, feed_forward=self.d_ff > 0)
        if window and self.local_rope_base is not None:
            return LayerKind(
                window, self.local_rope_base, None, experts, self.rotary_fraction, feed_forward=self.d_ff > 0
            )
        return LayerKind(
            window, self.rope_base, self.rope_scaling, experts, self.rotary_fraction, feed_forward=self.d_ff > 0
        )

    def layers_with(self, weight: str) -> tuple[int, ...]:
        """The numbers of the layers that have a weight, if the decoder has it."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind.has(weight))

    def count(self, weight: str) -> int:
        """How many layers have a weight, if the decoder has it."""
        return len(self.layers_with(weight))

    @property
    def n_expert_layers(self) -> int:
        """Layers with a mixture of experts."""
        return self.count('router')

    @property
    def drops(self) -> bool:
        """Whether training has dropout."""
        return any(getattr(self, name) for name in DROPOUT)

    @property
    def n_routers(self) -> int:
        """Routers: one for each layer with experts, those of multi-token prediction included."""
        return self.n_expert_layers + self.mtp_layers * self.kinds[-1].experts

    @property
    def with_modules(self) -> 'Architecture':
        """The decoder with the layers of multi-token prediction as ordinary last layers, for estimates."""
        return dataclasses.replace(self, n_layers=self.n_layers + self.mtp_layers, mtp_layers=0)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: it sees everything, or has no attention."""
        return tuple(kind.window for kind in self.kinds)

    @property
    def attention_windows(self) -> tuple[int, ...]:
        """The window of each layer with attention; 0: it sees everything."""
        return tuple(kind.window for kind in self.kinds if kind.mixer == 'attention')

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        return self.linear_heads > 0

    @property
    def score_divisor(self) -> float:
        """The divisor of the products of queries and keys. With YaRN, DeepSeek's code divides it by mscale^2."""
        divisor, scaling = math.sqrt(self.query_pre_attn_scalar or self.d_query), self.rope_scaling
        if self.kv_rank and scaling is not None and scaling.kind == 'yarn' and scaling.mscale_all_dim:
            return divisor / scaling.yarn_mscale(scaling.mscale_all_dim) ** 2
        return divisor

    @property
    def d_query(self) -> int:
        """Width of a query or key head; that of a value is `d_head`."""
        return self.d_nope + self.d_rope if self.kv_rank else self.d_head

    def scores(self, kind: LayerKind) -> Scores:
        """The attention scores of a layer."""
        chunked = kind.window > 0 and self.window_type == 'chunked'
        return Scores(self.score_divisor, self.attention_softcap, kind.window, self.attention_dropout, chunked)

    @property
    def n_norms(self) -> int:
        """Norms of the residual stream in a layer."""
        return 4 if self.block_norms == 'sandwich' else 1 if self.shared_norm else 2

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation not in UNGATED

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter in the types of the weights."""
        return {
            'M': self.d_model, 'M_next': self.d_model, 'H': self.n_heads, 'K': self.n_kv_heads, 'D': self.d_head,
            'F': self.d_ff_dense if self.n_experts else self.d_ff, 'V': self.padded_vocab_size,
            'C_q': self.q_rank, 'C_latent': self.kv_rank, 'C_kv': self.kv_rank + self.d_rope, 'D_qk': self.d_query, 'D_rope': self.d_rope,
            'D_kv': self.d_nope + self.d_head, 'P': self.max_sequence_length, 'E': self.n_experts, 'F_expert': self.d_ff, 'F_shared': self.d_shared,
            'N_state': self.linear_heads, 'N_key': self.linear_key_heads, 'D_value': self.linear_d_head,
            'D_key': self.linear_d_key,
            'J': self.conv_width, 'N_shared': self.linear_heads // max(1, self.linear_key_heads),  # heads that share a key
        }  # fmt: skip

    @property
    def mean_d_head(self) -> float:
        """The mean width of a query or key head and of a value head."""
        return (self.d_query + self.d_head) / 2

    @property
    def n_matmul_params(self) -> int:
        """Weights in matrix products per token: all but embeddings, norms, biases and the experts that a token does not use."""
        linear = 3 * self.linear_heads * self.linear_d_head + 2 * self.linear_key_heads * self.linear_d_key
        per_head = self.linear_heads * (self.count('linear_a') + self.count('linear_beta'))
        states = self.d_model * (self.count('linear_v') * linear + per_head)
        matrices = 3 if self.gated else 2
        of_layers = states + self.count('q') * self.attention_params
        of_layers += self.count('up') * matrices * self.d_model * self.sizes['F']
        if self.n_experts:
            shared = 3 * self.d_shared + self.shared_gate
            per_token = self.experts_per_token * matrices * self.d_ff + shared + self.n_experts
            of_layers += self.n_expert_layers * self.d_model * per_token
        return of_layers + self.vocab_size * self.d_model + self.mtp_layers * self._module_params

    @property
    def _module_params(self) -> int:
        """`n_matmul_params` of a module of multi-token prediction."""
        matrices, inner = 3 if self.gated else 2, self.sizes['F']
        if self.kinds[-1].experts:
            inner = self.experts_per_token * self.d_ff
        width = 2 * self.d_model + matrices * inner + self.vocab_size
        if self.kinds[-1].experts:
            width += 3 * self.d_shared + self.shared_gate + self.n_experts
        return self.attention_params + self.d_model * width

    @property
    def attention_params(self) -> int:
        """Weights in matrix products of the attention of a layer."""
        M, H, D = self.d_model, self.n_heads, self.d_head
        if not self.kv_rank:
            return M * D * ((2 + self.attention_gate) * H + 2 * self.n_kv_heads)
        of_queries = self.q_rank * (M + H * self.d_query) if self.q_rank else M * H * self.d_query
        return of_queries + M * (self.kv_rank + self.d_rope) + H * (self.kv_rank * (self.d_nope + D) + M * D)

    @property
    def latent_params(self) -> int:
        """The part of `attention_params` that makes latents. Every device along t computes these products."""
        return self.d_model * (self.q_rank + self.kv_rank + self.d_rope) if self.kv_rank else 0

    @property
    def n_state_products(self) -> int:
        """Multiply-adds per token with states in a forward pass.

        A token reads the state and writes to it. In a delta net it also reads the value that the state has for its key.
        """
        size = self.linear_heads * self.linear_d_key * self.linear_d_head
        return size * sum({'attention': 0, 'mamba': 2, 'delta': 3}[kind.mixer] for kind in self.kinds)

    @property
    def n_idle_params(self) -> int:
        """Weights of the experts that a token does not use."""
        idle = max(0, self.n_experts - self.experts_per_token)
        biases = 2 * self.d_ff + self.d_model if self.mlp_bias else 0
        return self.n_routers * idle * (3 * self.d_model * self.d_ff + biases)

    @property
    def n_padding_params(self) -> int:
        """Weights in the rows that pad the vocabulary. They are stored, and are not part of the model."""
        width = self.d_model * (1 if self.tied else 2) + self.unembed_bias
        return (self.padded_vocab_size - self.vocab_size) * width

    def check_mesh(self, mesh: dict[str, int], sequence_length: int) -> None:
        """Raises UserError if the mesh does not divide the model; it names the nearest size that does."""
        t, d, e = mesh['t'], mesh['d'], mesh['e']
        if self.mtp_layers and mesh['p'] > 1:
            raise UserError(
                f'model.multi_token.n_layers = {self.mtp_layers}: multi-token prediction does not run in pipeline stages '
                f'(mesh.p = {mesh["p"]})\nuse mesh.p=1 or model.multi_token.n_layers=0'
            )
        if self.recurrent and mesh['c'] > 1:
            raise UserError(
                f'mesh.c = {mesh["c"]} shards sequences, and layers with a state need whole ones\nuse mesh.t or mesh.d instead'
            )
        if e > 1 and not self.n_experts:
            raise UserError(f'mesh.e = {e} shards experts, and the model has none\nuse mesh.d instead')
        if self.n_experts and self.capacity is not None and mesh['c'] > 1:
            raise UserError(
                f'model.experts.capacity needs whole sequences, and mesh.c = {mesh["c"]} shards them\n'
                'use model.experts.capacity=null or mesh.c=1'
            )
        if self.n_experts % e:
            fits = [n for n in range(1, e + 1) if self.n_experts % n == 0]
            raise UserError(
                f'model.experts.n_experts = {self.n_experts} is not divisible by mesh.e = {e}\nuse mesh.e={fits[-1]}'
            )
        split = {
            'model.attention.n_heads': self.n_heads, 'model.attention.n_kv_heads': self.n_kv_heads, 'model.feed_forward.d_ff': self.d_ff,
            'model.experts.d_ff_dense': self.d_ff_dense, 'model.experts.d_shared': self.d_shared,
            'model.recurrent.n_heads': self.linear_heads, 'model.recurrent.n_key_heads': self.linear_key_heads,
            'batch.sequence_length': sequence_length, 'the padded vocabulary': self.padded_vocab_size,
        }  # fmt: skip
        for name, size in split.items():
            if size % t:
                fits = [n for n in range(1, t + 1) if size % n == 0]
                raise UserError(f'{name} = {size} is not divisible by mesh.t = {t}\nuse mesh.t={fits[-1]}')
        for name, size in {
            'model.attention.latent.kv_rank': self.kv_rank,
            'model.attention.latent.q_rank': self.q_rank,
        }.items():
            if size % d:
                fits = [n for n in range(1, d + 1) if size % n == 0]
                raise UserError(f'{name} = {size} is not divisible by mesh.d = {d}\nuse mesh.d={fits[-1]}')
        if self.d_model % d:
            fits = [n for n in range(1, d + 1) if self.d_model % n == 0]
            raise UserError(f'model.d_model = {self.d_model} is not divisible by mesh.d = {d}\nuse mesh.d={fits[-1]}')
        if self.positions == 'learned' and self.max_sequence_length % t:
            raise UserError(
                f'model.max_sequence_length = {self.max_sequence_length} is not divisible by mesh.t = {t}\n'
                f'use model.max_sequence_length={-(-self.max_sequence_length // t) * t}'
            )


def has_experts(i: int, dense_layers: tuple[int, ...], expert_every: int) -> bool:
    """Whether layer i, from 0, of a decoder with experts has them."""
    return i not in dense_layers and (i + 1) % expert_every == 0


def ordinal(n: int) -> str:
    """2 -> '2nd'."""
    return f'{n}{"th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")}'
