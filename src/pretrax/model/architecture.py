"""The architecture of a decoder: its sizes and parts, and how its layers differ. No JAX here."""

import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pretrax.errors import UserError
from pretrax.model.choices import DROPOUT, TransformerOptions, choose
from pretrax.model.mup import Scaling
from pretrax.model.options.attention import Heads
from pretrax.model.options.decoder import DecoderOptions
from pretrax.model.options.feed_forward import has_experts
from pretrax.model.options.section import Effect, option
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
    own_heads: bool = False  # whether its heads have the sizes attention.global_*

    @property
    def is_dense(self) -> bool:
        """Whether the layer has a feed-forward without experts."""
        return self.feed_forward and not self.experts


CHUNK = 64  # tokens of a chunk, in layers with a state


class Architecture(DecoderOptions):
    """The sizes and parts of the decoder: every option has a value, and 0 stands for a part that no layer has."""

    padded_vocab_size: int
    """Rows of the embedding: a multiple of 128, for the matrix units and for sharding over t."""

    mup: Scaling | None = option(changes='training')
    """How initial values and learning rates follow the width; None: they do not."""

    def option(self, key: str) -> Any:
        """The value of an option by dotted key: 'attention.window'."""
        return operator.attrgetter(key)(self)

    def replace(self, options: Mapping[str, Any]) -> 'Architecture':
        """A copy with other values of some options, by dotted key."""
        return self.from_dotted({key: self.option(key) for key in KEYS} | dict(options))

    def describe(self) -> str:
        """One line for the start-up report."""
        n_kv = self.attention.n_kv_heads
        shared = f' ({n_kv} for keys and values)' if n_kv != self.attention.n_heads else ''
        heads = f'{self.attention.n_heads} heads of {self.attention.d_query}{shared}'
        padded = f' (padded to {self.padded_vocab_size})' if self.padded_vocab_size != self.vocab_size else ''
        parts = [
            *['embedding times sqrt(width)'] * self.embedding.scale,
            *self._describe_multipliers(),
            self.norm.kind + (f' ({self.norm.offset:g} + w)' if self.norm.offset else ''),
            *[f'{self.block.norms}-norms'] * (self.block.norms != 'pre'),
            *['attention and feed-forward in parallel' + ', one norm for both' * self.block.shared_norm]
            * self.block.parallel,
            *self.attention.describe_norms(),
            *self._describe_mixers(),
            *[self.rope.describe(self.attention.window) if self.positions == 'rope' else self.positions]
            * (self.attention.n_heads > 0 or self.positions != 'rope'),
            *self.attention.describe(self.windows, self.layer_types is not None),
            *[self.feed_forward.describe()] * (self.feed_forward.d_ff > 0),
            *self._describe_biases(),
            *self.head.describe(),
            *['tied'] * self.embedding.tied,
            *self._describe_dropout(),
            *([str(self.mup)] if self.mup else []),
            *[f'{self.multi_token.n_layers + 1} tokens predicted (weight {self.multi_token.loss:g})']
            * bool(self.multi_token.n_layers),
        ]
        mixers = [heads] * (self.attention.n_heads > 0) + [
            f'{self.recurrent.n_heads} heads of {self.recurrent.d_head} with states of {self.recurrent.d_key}'
        ] * (self.recurrent.n_heads > 0)
        inside = f'feed-forward {self.feed_forward.d_ff}' if self.feed_forward.d_ff else 'no feed-forward'
        return (
            f'{self.n_layers} layers, width {self.d_model}, {", ".join(mixers)}, {inside}, '
            f'vocabulary {self.vocab_size}{padded}; {", ".join(parts)}'
        )

    def _describe_multipliers(self) -> list[str]:
        multipliers = {
            'embedding': self.embedding.multiplier,
            'residual branches': self.block.residual_multiplier,
            'logits': self.head.multiplier,
        }
        found = [f'{name} times {value:g}' for name, value in multipliers.items() if value != 1]
        return found + ['layers times a learned number'] * self.block.layer_scale

    def _describe_dropout(self) -> list[str]:
        rates = {
            'attention probabilities': self.attention.dropout, 'residual branches': self.block.dropout,
            'embeddings': self.embedding.dropout,
        }  # fmt: skip
        found = [f'{rate:g} of {name}' for name, rate in rates.items() if rate]
        return ['dropout in training (' + ', '.join(found) + ')'] if found else []

    def _describe_biases(self) -> list[str]:
        biases = {
            'q, k, v': self.attention.qkv_bias, 'attention output': self.attention.o_bias,
            'feed-forward': self.feed_forward.bias,
            'norms': self.norm.bias, 'unembedding': self.head.bias,
        }  # fmt: skip
        found = [name for name, has in biases.items() if has]
        return ['biases of ' + ', '.join(found)] if found else []

    def _describe_mixers(self) -> list[str]:
        names = {'delta': 'a gated delta net', 'mamba': 'a state-space model (Mamba 2)'}
        counts = {mixer: sum(kind.mixer == mixer for kind in self.kinds) for mixer in names}
        return [f'{names[mixer]} in {count} of {self.n_layers} layers' for mixer, count in counts.items() if count]

    @functools.cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(self._kind, range(self.n_layers)))

    def _kind(self, i: int) -> LayerKind:
        said = None if self.layer_types is None else self.layer_types[i % len(self.layer_types)]
        everywhere = (
            said == 'full' if said else bool(self.attention.global_every) and (i + 1) % self.attention.global_every == 0
        )
        window = 0 if everywhere else self.attention.window
        experts = self.experts.n_experts > 0 and has_experts(i, self.experts.dense_layers, self.experts.every)
        if said in ('delta', 'mamba'):
            return LayerKind(0, None, None, experts, mixer=said, feed_forward=self.feed_forward.d_ff > 0)
        nowhere = (self.rope.nope_every and (i + 1) % self.rope.nope_every == 0) or (
            self.rope.nope_global and self.attention.window and not window
        )
        base, scaling, fraction = self.rope.base, self.rope.scaling, self.rope.fraction
        if self.positions != 'rope' or nowhere:
            base, scaling, fraction = None, None, 1.0
        elif window and self.rope.local_base is not None:
            base, scaling = self.rope.local_base, None
        own_heads = self.attention.global_d_head > 0 and not window
        has_mlp = self.feed_forward.d_ff > 0
        return LayerKind(window, base, scaling, experts, fraction, feed_forward=has_mlp, own_heads=own_heads)

    def heads(self, kind: LayerKind) -> Heads:
        """The heads of a layer with attention."""
        return self.attention.heads(kind.own_heads)

    def mean_of_heads(self, size: Callable[[Heads], float]) -> float:
        """The mean of a size of heads over the layers with attention; 0 if there are none."""
        return sum(n * size(heads) for heads, n in self._heads.items()) / max(1, self.n_attention_layers)

    @functools.cached_property
    def _heads(self) -> Counter[Heads]:
        """The number of layers by their heads."""
        return Counter(self.heads(kind) for kind in self.kinds if kind.mixer == 'attention')

    @functools.cached_property
    def n_attention_layers(self) -> int:
        """Layers with attention."""
        return sum(kind.mixer == 'attention' for kind in self.kinds)

    @functools.cached_property
    def n_recurrent_layers(self) -> int:
        """Layers with a delta net or a state-space model."""
        return self.n_layers - self.n_attention_layers

    @functools.cached_property
    def n_dense_layers(self) -> int:
        """Layers with a feed-forward without experts."""
        return sum(kind.is_dense for kind in self.kinds)

    @functools.cached_property
    def n_expert_layers(self) -> int:
        """Layers with a mixture of experts."""
        return sum(kind.experts for kind in self.kinds)

    @property
    def drops(self) -> bool:
        """Whether training has dropout."""
        return any(self.option(name) for name in DROPOUT)

    @property
    def n_routers(self) -> int:
        """Routers: one for each layer with experts, those of multi-token prediction included."""
        return self.n_expert_layers + self.multi_token.n_layers * self.kinds[-1].experts

    @functools.cached_property
    def with_modules(self) -> 'Architecture':
        """The decoder with the layers of multi-token prediction as ordinary last layers, for estimates."""
        return self.replace({'n_layers': self.n_layers + self.multi_token.n_layers, 'multi_token.n_layers': 0})

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: it sees everything, or has no attention."""
        return tuple(kind.window for kind in self.kinds)

    @property
    def attention_windows(self) -> tuple[int, ...]:
        """The window of each layer with attention; 0: it sees everything."""
        return tuple(kind.window for kind in self.kinds if kind.mixer == 'attention')

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        return self.recurrent.n_heads > 0

    @property
    def n_norms(self) -> int:
        """Norms of the residual stream in a layer."""
        return 4 if self.block.norms == 'sandwich' else 1 if self.block.shared_norm else 2

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each letter in the types of the weights."""
        attention, latent, experts, recurrent = self.attention, self.attention.latent, self.experts, self.recurrent
        return {
            'M': self.d_model, 'M_next': self.d_model, 'V': self.padded_vocab_size, 'P': self.max_sequence_length,
            'H': attention.n_heads, 'K': attention.n_kv_heads, 'D': attention.d_head,
            'K_global': attention.global_n_kv_heads, 'D_global': attention.global_d_head,
            'C_q': latent.q_rank, 'C_latent': latent.kv_rank, 'C_kv': latent.kv_rank + latent.d_rope,
            'D_qk': attention.d_query, 'D_rope': latent.d_rope, 'D_kv': latent.d_nope + attention.d_head,
            'F': experts.d_ff_dense if experts.n_experts else self.feed_forward.d_ff, 'E': experts.n_experts,
            'F_expert': self.feed_forward.d_ff, 'F_shared': experts.d_shared,
            'N_state': recurrent.n_heads, 'N_key': recurrent.n_key_heads, 'J': recurrent.conv_width,
            'D_value': recurrent.d_head, 'D_key': recurrent.d_key,
            'N_shared': recurrent.n_heads // max(1, recurrent.n_key_heads),  # heads that share a key
        }  # fmt: skip

    @functools.cached_property
    def mean_d_head(self) -> float:
        """The mean width of a query or key head and of a value head."""
        return self.mean_of_heads(lambda heads: heads.mean_width)

    @functools.cached_property
    def mean_kv_width(self) -> float:
        """The mean width of the keys or of the values of a token in a layer."""
        return self.mean_of_heads(lambda heads: heads.n_kv * heads.mean_width)

    @functools.cached_property
    def n_matmul_params(self) -> int:
        """Weights in products per token: all but embeddings, norms, biases and the experts that it does not use."""
        recurrent, n_delta = self.recurrent, sum(kind.mixer == 'delta' for kind in self.kinds)
        linear = 3 * recurrent.n_heads * recurrent.d_head + 2 * recurrent.n_key_heads * recurrent.d_key
        per_head = recurrent.n_heads * (self.n_recurrent_layers + n_delta)
        states = self.d_model * (self.n_recurrent_layers * linear + per_head)
        of_layers = states + self._all_attention_params + sum(map(self._feed_forward_params, self.kinds))
        return of_layers + self.vocab_size * self.d_model + self.multi_token.n_layers * self._module_params

    def _feed_forward_params(self, kind: LayerKind) -> int:
        """`n_matmul_params` of the feed-forward of a layer, or of the experts that a token uses and their router."""
        matrices, experts = self.feed_forward.n_matrices, self.experts
        if not kind.experts:
            return kind.is_dense * matrices * self.d_model * self.sizes['F']
        width = experts.experts_per_token * matrices * self.feed_forward.d_ff + 3 * experts.d_shared
        return self.d_model * (width + experts.shared_gate + experts.n_experts)

    @property
    def _module_params(self) -> int:
        """`n_matmul_params` of a module of multi-token prediction."""
        last = self.kinds[-1]
        of_layer = self._attention_params(last) + self._feed_forward_params(last)
        return of_layer + self.d_model * (2 * self.d_model + self.vocab_size)

    def _attention_params(self, kind: LayerKind) -> int:
        return self.attention.params(self.d_model, kind.own_heads)

    @property
    def attention_params(self) -> int:
        """Weights in matrix products of the attention of a layer, of the one that has most."""
        return max(map(self._attention_params, self.kinds))

    @property
    def mean_attention_params(self) -> float:
        """`attention_params` on average over the layers with attention."""
        return self._all_attention_params / max(1, self.n_attention_layers)

    @functools.cached_property
    def _all_attention_params(self) -> int:
        return sum(self._attention_params(kind) for kind in self.kinds if kind.mixer == 'attention')

    @property
    def n_state_products(self) -> int:
        """Multiply-adds per token with states in a forward pass.

        A token reads the state and writes to it. In a delta net it also reads the value that the state has for its key.
        """
        size = self.recurrent.n_heads * self.recurrent.d_key * self.recurrent.d_head
        return size * sum({'attention': 0, 'mamba': 2, 'delta': 3}[kind.mixer] for kind in self.kinds)

    @property
    def n_idle_params(self) -> int:
        """Weights of the experts that a token does not use."""
        idle = max(0, self.experts.n_experts - self.experts.experts_per_token)
        biases = 2 * self.feed_forward.d_ff + self.d_model if self.feed_forward.bias else 0
        return self.n_routers * idle * (3 * self.d_model * self.feed_forward.d_ff + biases)

    @property
    def n_padding_params(self) -> int:
        """Weights in the rows that pad the vocabulary. They are stored, and are not part of the model."""
        width = self.d_model * (1 if self.embedding.tied else 2) + self.head.bias
        return (self.padded_vocab_size - self.vocab_size) * width

    def check_mesh(self, mesh: dict[str, int], sequence_length: int) -> None:
        """Raises UserError if the mesh does not divide the model; it names a size of the axis that does."""
        t, e = mesh['t'], mesh['e']
        if self.multi_token.n_layers and mesh['p'] > 1:
            raise UserError(
                f'model.multi_token.n_layers = {self.multi_token.n_layers}: multi-token prediction does not run in '
                f'pipeline stages (mesh.p = {mesh["p"]})\nuse mesh.p=1 or model.multi_token.n_layers=0'
            )
        if self.has_states and mesh['c'] > 1:
            raise UserError(
                f'mesh.c = {mesh["c"]} shards sequences, but layers with a state need whole sequences\n'
                'use mesh.t or mesh.d instead'
            )
        if e > 1 and not self.experts.n_experts:
            raise UserError(f'mesh.e = {e} shards experts, but the model has none\nuse mesh.d instead')
        if self.experts.n_experts and self.experts.capacity is not None and mesh['c'] > 1:
            raise UserError(
                f'model.experts.capacity needs whole sequences, and mesh.c = {mesh["c"]} shards them\n'
                'use model.experts.capacity=null or mesh.c=1'
            )
        attention, latent, experts, recurrent = self.attention, self.attention.latent, self.experts, self.recurrent
        sharded: dict[str, dict[str, int]] = {
            'e': {'model.experts.n_experts': experts.n_experts},
            't': {
                'model.attention.n_heads': attention.n_heads, 'model.attention.n_kv_heads': attention.n_kv_heads,
                'model.attention.global_n_kv_heads': attention.global_n_kv_heads,
                'model.feed_forward.d_ff': self.feed_forward.d_ff, 'model.experts.d_ff_dense': experts.d_ff_dense,
                'model.experts.d_shared': experts.d_shared, 'model.recurrent.n_heads': recurrent.n_heads,
                'model.recurrent.n_key_heads': recurrent.n_key_heads,
                'batch.sequence_length': sequence_length, 'the padded vocabulary': self.padded_vocab_size,
            },
            'd': {
                'model.attention.latent.kv_rank': latent.kv_rank, 'model.attention.latent.q_rank': latent.q_rank,
                'model.d_model': self.d_model,
            },
        }  # fmt: skip
        for axis, sizes in sharded.items():
            for name, size in sizes.items():
                if size % mesh[axis]:
                    fits = math.gcd(mesh[axis], *sizes.values())  # a divisor of the axis: the others keep their sizes
                    problem = f'{name} = {size} is not divisible by mesh.{axis} = {mesh[axis]}'
                    copies = f' mesh.r={mesh["r"] * mesh[axis] // fits}' if axis == 'd' else ''
                    raise UserError(f'{problem}\nuse mesh.{axis}={fits}{copies}')
        if self.positions == 'learned' and self.max_sequence_length % t:
            raise UserError(
                f'model.max_sequence_length = {self.max_sequence_length} is not divisible by mesh.t = {t}\n'
                f'use model.max_sequence_length={-(-self.max_sequence_length // t) * t}'
            )


# The dotted keys of all options that change results: not the implementation of attention
KEYS = tuple(key for key, declared in Architecture.declarations().items() if declared.changes != 'nothing')


def keys_that_change(effect: Effect) -> frozenset[str]:
    """The dotted keys of the options that change only the forward pass, training, or the weights too."""
    return frozenset(key for key, declared in Architecture.declarations().items() if declared.changes == effect)


def resolve(options: TransformerOptions, vocab_size: int, sequence_length: int) -> Architecture:
    """The architecture, from the options, their preset, their family and the data.

    Args:
        options: as configured.
        vocab_size: of the data's tokenizer.
        sequence_length: of the batches.

    Raises:
        UserError: unknown preset, a missing size, sizes that contradict each other, or too few positions for the
            batches.
    """
    chosen = choose(options.dotted())
    chosen.setdefault('vocab_size', vocab_size)
    chosen.setdefault('max_sequence_length', sequence_length)
    if chosen['positions'] == 'learned' and chosen['max_sequence_length'] < sequence_length:
        raise UserError(
            f'batch.sequence_length = {sequence_length} exceeds model.max_sequence_length = '
            f'{chosen["max_sequence_length"]}, the number of learned positions'
        )
    chosen['padded_vocab_size'] = math.ceil(chosen['vocab_size'] / 128) * 128
    return Architecture.from_dotted({key: chosen[key] for key in KEYS})
