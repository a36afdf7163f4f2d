"""The options of attention and of rotary positions: which fit together, and what follows from them. No JAX here.

In every check, `chosen` has all options and `said` those of the configuration, by dotted key.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pretrax.errors import UserError
from pretrax.model.options.section import Choice, Section, Share, option, refuse
from pretrax.model.rope_scaling import RopeScaling


class Heads(NamedTuple):
    """The sizes of the heads of a layer. Query heads are as many in all layers."""

    n_kv: int
    d_query: int  # width of a query or key
    d_value: int

    @property
    def mean_width(self) -> float:
        """The mean of the two widths."""
        return (self.d_query + self.d_value) / 2


class LatentOptions(Section):
    """Multi-head latent attention: keys and values, and queries, are projected through narrow latents."""

    kv_rank: Choice[NonNegativeInt] = option(
        0, description='width of the latent of keys and values (default 0: ordinary attention)'
    )
    q_rank: Choice[NonNegativeInt] = option(
        0, description='width of the latent of queries (default 0: queries are projected from the hidden states)'
    )
    d_rope: Choice[PositiveInt] = option(
        0, description='width of the part of queries and keys with positions (default 64)'
    )
    d_nope: Choice[PositiveInt] = option(
        0, description='width of the part of queries and keys without positions (default attention.d_head)'
    )


class AttentionOptions(Section):
    """Attention."""

    n_heads: Choice[PositiveInt] = option(description='query heads')
    n_kv_heads: Choice[PositiveInt] = option(description='key and value heads (default n_heads)')
    d_head: Choice[PositiveInt] = option(description='width of a head (default d_model / n_heads)')
    qk_norm: Choice[Literal['none', 'head', 'each_head', 'full', 'l2']] = option(
        'none',
        description='norm of queries and keys: of each head with one scale for all or a scale each, or of all heads '
        'together; l2: of each head after its rotation, without a scale (default none)',
    )
    v_norm: Choice[bool] = option(
        False, former=None, description='RMSNorm of each value head, without a scale (default no)'
    )
    window: Choice[NonNegativeInt] = option(
        0, changes='forward', description='tokens that a token sees, itself included (default 0: all)'
    )
    window_type: Choice[Literal['sliding', 'chunked']] = option(
        'sliding',
        changes='forward',
        description="sliding: the last tokens (default); chunked: those of the token's chunk, of `window` tokens each",
    )
    global_every: Choice[NonNegativeInt] = option(
        0, changes='forward', description='every n-th layer has no window (default 0: never)'
    )
    global_d_head: Choice[NonNegativeInt] = option(
        0, former=None, description='width of a head in layers without a window (default 0: d_head)'
    )
    global_n_kv_heads: Choice[NonNegativeInt] = option(
        0, former=None, description='key and value heads in layers without a window (default 0: n_kv_heads)'
    )
    global_k_as_v: Choice[bool] = option(
        False,
        former=None,
        description='values of layers without a window are the projections that their keys are made of (default no)',
    )
    query_pre_attn_scalar: PositiveFloat | None = option(
        None, changes='forward', description='attention scores are divided by its square root (default d_head)'
    )
    temperature: Choice[NonNegativeFloat] = option(
        0.0,
        former='attention_temperature',
        changes='forward',
        description='queries of layers without positions are multiplied by 1 + this log(1 + floor(position / '
        'temperature_length)), positions from 1 (default 0: not)',
    )
    temperature_length: Choice[PositiveInt] = option(
        8192, changes='forward', description='see temperature (default 8192)'
    )
    softcap: Choice[NonNegativeFloat] = option(
        0.0,
        former='attention_softcap',
        changes='forward',
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
    dropout: Choice[Share] = option(
        former='attention_dropout',
        changes='training',
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

    @property
    def d_query(self) -> int:
        """Width of a query or key head; that of a value is `d_head`."""
        return self.latent.d_nope + self.latent.d_rope if self.latent.kv_rank else self.d_head

    def heads(self, own: bool = False) -> Heads:
        """The heads of a layer; `own`: of one without a window, where these have sizes of their own."""
        if own:
            return Heads(self.global_n_kv_heads, self.global_d_head, self.global_d_head)
        return Heads(self.n_kv_heads, self.d_query, self.d_head)

    def params(self, d_model: int, own: bool = False) -> int:
        """Weights in matrix products of a layer."""
        n_kv, _, d_head = self.heads(own)
        if not self.latent.kv_rank:
            keys_and_values = 1 if own and self.global_k_as_v else 2
            return d_model * d_head * ((2 + self.gate) * self.n_heads + keys_and_values * n_kv)
        q_rank, of_queries = self.latent.q_rank, self.n_heads * self.d_query
        of_heads = self.latent.kv_rank * (self.latent.d_nope + d_head) + d_model * d_head
        queries = q_rank * (d_model + of_queries) if q_rank else d_model * of_queries
        return queries + d_model * (self.latent.kv_rank + self.latent.d_rope) + self.n_heads * of_heads

    def latent_params(self, d_model: int) -> int:
        """The part of `params` that makes latents. Every device along t computes these products."""
        latent = self.latent
        return d_model * (latent.q_rank + latent.kv_rank + latent.d_rope) if latent.kv_rank else 0

    def describe_norms(self) -> list[str]:
        """For the start-up report, before the parts."""
        return [f'queries and keys normed ({self.qk_norm})'] * (self.qk_norm != 'none')

    def describe(self, windows: Sequence[int], by_layer: bool) -> list[str]:
        """Its parts for the start-up report. `windows`: of each layer; `by_layer`: whether `layer_types` gives them."""
        parts = ['attention gated'] * self.gate
        if self.latent.kv_rank:
            of_queries = f', queries from {self.latent.q_rank}' if self.latent.q_rank else ''
            parts.append(
                f'latent attention (keys and values from {self.latent.kv_rank}{of_queries}; rope in '
                f'{self.latent.d_rope} of {self.d_query}; values of {self.d_head})'
            )
        if self.window:
            every = f' but in every {ordinal(self.global_every)} layer' if self.global_every else ''
            if by_layer:
                every = f' in {sum(map(bool, windows))} of {len(windows)} layers'
            parts.append(f'{"chunks of" if self.window_type == "chunked" else "window"} {self.window}{every}')
        if self.query_pre_attn_scalar not in (None, self.d_query):
            parts.append(f'scores over sqrt({self.query_pre_attn_scalar:g})')
        if self.temperature:
            steps = f'in steps of {self.temperature_length} tokens in layers without positions'
            parts.append(f'temperature {self.temperature:g} {steps}')
        if self.softcap:
            parts.append(f'scores capped at {self.softcap:g}')
        if self.global_d_head:
            values = ', whose keys are values too' * self.global_k_as_v
            parts.append(
                f'heads of {self.global_d_head} ({self.global_n_kv_heads} for keys and values{values}) in layers '
                'without a window'
            )
        return parts + ['values normed'] * self.v_norm + ['attention sinks'] * self.sinks


class RopeOptions(Section):
    """Rotary positions, and the layers that have none."""

    base: Choice[PositiveFloat] = option(
        10000.0, former='rope_base', changes='forward', description='base of the frequencies (default 10000)'
    )
    local_base: PositiveFloat | None = option(
        None,
        former='local_rope_base',
        changes='forward',
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
    nope_every: Choice[NonNegativeInt] = option(
        0, changes='forward', description='every n-th layer has no positions (default 0: never)'
    )
    nope_global: Choice[bool] = option(
        False, changes='forward', description='layers without a window have no positions, if others have a window'
    )

    def describe(self, window: int) -> str:
        """For the start-up report. `window`: of attention."""
        more = [f'base {self.base:g}'] if self.base != 10000 else []
        if self.local_base is not None:
            more.append(f'base {self.local_base:g} in layers with a window')
        if self.scaling is not None:
            more.append(str(self.scaling))
        if self.fraction != 1:
            more.append(f'of {self.fraction:g} of each head')
        if self.nope_global and window:
            more.append('none in layers without a window')
        if self.nope_every:
            more.append(f'none in every {ordinal(self.nope_every)} layer')
        return 'rope' + (f' ({", ".join(more)})' if more else '')


def ordinal(n: int) -> str:
    """2 -> '2nd'."""
    return f'{n}{"th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")}'


def check(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Checks the choices in the order in which they depend on each other. Changes `chosen`. Raises UserError."""
    if chosen['attention.n_heads'] and chosen['attention.n_heads'] % chosen['attention.n_kv_heads']:
        raise UserError(
            f'model.attention.n_heads = {chosen["attention.n_heads"]} is not divisible by model.attention.n_kv_heads '
            f'= {chosen["attention.n_kv_heads"]}\nuse model.attention.n_kv_heads='
            f'{math.gcd(chosen["attention.n_heads"], chosen["attention.n_kv_heads"])}'
        )
    _check_latents(chosen, said)
    _check_rotation(chosen)
    if not chosen['attention.window'] and not said.get('attention.global_every'):
        chosen['attention.global_every'] = 0  # of a family or preset whose windows were turned off
    if chosen['attention.global_every'] and not chosen['attention.window']:
        raise UserError(
            f'model.attention.global_every = {chosen["attention.global_every"]} exempts layers from a window, but '
            'there is none\ngive model.attention.window, or use model.attention.global_every=0'
        )
    if chosen['layer_types'] is not None:
        _check_layer_types(chosen, said)
    _check_global_heads(chosen, said)
    _check_chunks_and_temperature(chosen, said)


def _check_latents(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if not chosen['attention.latent.kv_rank']:
        for name in ('attention.latent.q_rank', 'attention.latent.d_rope', 'attention.latent.d_nope'):
            if said.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} belongs to latent attention, but there is none\n'
                    'give model.attention.latent.kv_rank, or leave it out'
                )
        chosen.update({f'attention.latent.{name}': 0 for name in ('q_rank', 'd_rope', 'd_nope')})  # of a preset
        return
    chosen['attention.latent.d_nope'] = chosen['attention.latent.d_nope'] or chosen['attention.d_head']
    chosen['attention.latent.d_rope'] = chosen['attention.latent.d_rope'] or 64
    without = {
        'attention.n_kv_heads': chosen['attention.n_kv_heads'] == chosen['attention.n_heads'],
        'positions': chosen['positions'] == 'rope',
        'attention.qk_norm': chosen['attention.qk_norm'] == 'none', 'attention.window': not chosen['attention.window'],
        'bias': not chosen['bias'], 'attention.temperature': not chosen['attention.temperature'],
        'attention.qkv_bias': not chosen['attention.qkv_bias'], 'rope.fraction': chosen['rope.fraction'] == 1,
    }  # fmt: skip
    refuse(
        chosen,
        without,
        f'latent attention (model.attention.latent.kv_rank = {chosen["attention.latent.kv_rank"]}), which '
        'has rope, a key and a value for each query head, and no window or bias\n'
        'leave it out, or use model.attention.latent=null',
    )
    if chosen['attention.latent.d_rope'] % 2:
        raise UserError(
            f'model.attention.latent.d_rope = {chosen["attention.latent.d_rope"]} is odd, but rope rotates pairs\n'
            'use an even d_rope'
        )


def _check_rotation(chosen: dict[str, Any]) -> None:
    if chosen['positions'] != 'rope' or not chosen['attention.n_heads']:
        return
    d_head = chosen['attention.latent.d_rope'] if chosen['attention.latent.kv_rank'] else chosen['attention.d_head']
    fraction = chosen['rope.fraction']
    if d_head % 2:
        raise UserError(f'model.attention.d_head = {d_head} is odd, but rope rotates pairs\nuse an even d_head')
    rotated = int(d_head * fraction)
    if rotated % 2 or not rotated:
        raise UserError(
            f'model.rope.fraction = {fraction:g} rotates {rotated} of {d_head} dimensions of a head, but rope rotates '
            f'pairs\nuse model.rope.fraction={_fraction_of(rotated + 2 - rotated % 2, d_head):g}'
        )
    scaling = chosen['rope.scaling']
    if scaling is not None and scaling.kind == 'longrope' and len(scaling.short_factor) != rotated // 2:
        raise UserError(
            f'model.rope.scaling has {len(scaling.short_factor)} short factors, but rope rotates {rotated // 2} pairs\n'
            'give short_factor and long_factor one number for each pair'
        )


def _fraction_of(rotated: int, d_head: int) -> float:
    """A short number such that `int(d_head * number)` is `rotated`."""
    return math.ceil(rotated / d_head * 1e5) / 1e5


_NO_GLOBAL_HEADS = {
    key: value
    for key, value in AttentionOptions.defaults('attention.').items()
    if key.startswith('attention.global_') and key != 'attention.global_every'
}


def _check_global_heads(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Layers without a window have heads of their own only beside layers with one."""
    types = chosen['layer_types']
    mixed = chosen['attention.window'] > 0 and (
        'full' in types if types else 1 < chosen['attention.global_every'] <= chosen['n_layers']
    )
    if not mixed:
        for name in _NO_GLOBAL_HEADS:
            if said.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} applies to layers without a window beside layers with one, but there '
                    'are none\ngive model.attention.window and model.attention.global_every, or leave it out'
                )
        chosen.update(_NO_GLOBAL_HEADS)
    if not any(chosen[name] for name in _NO_GLOBAL_HEADS):
        return
    d_head = chosen['attention.global_d_head'] = chosen['attention.global_d_head'] or chosen['attention.d_head']
    heads = chosen['attention.global_n_kv_heads'] or chosen['attention.n_kv_heads']
    chosen['attention.global_n_kv_heads'] = heads
    usual = chosen['attention.d_head'], chosen['attention.n_kv_heads'], False
    if (d_head, heads, chosen['attention.global_k_as_v']) == usual:
        chosen.update(_NO_GLOBAL_HEADS)
        return
    if chosen['attention.n_heads'] % heads:
        raise UserError(
            f'model.attention.n_heads = {chosen["attention.n_heads"]} is not divisible by '
            f'model.attention.global_n_kv_heads = {heads}\n'
            f'use model.attention.global_n_kv_heads={math.gcd(chosen["attention.n_heads"], heads)}'
        )
    if chosen['attention.global_d_head'] % 2:
        raise UserError(
            f'model.attention.global_d_head = {chosen["attention.global_d_head"]} is odd, but rope rotates pairs\n'
            'use an even global_d_head'
        )
    without = {
        'attention.qkv_bias': not chosen['attention.qkv_bias'], 'attention.o_bias': not chosen['attention.o_bias'],
        'attention.sinks': not chosen['attention.sinks'], 'attention.gate': not chosen['attention.gate'],
        'attention.qk_norm': chosen['attention.qk_norm'] in ('none', 'head', 'l2'),
        'mup': chosen['mup'] is None,
    }  # fmt: skip
    refuse(
        chosen,
        without,
        f'layers without a window with heads of their own (model.attention.global_d_head = {d_head})\n'
        'leave it out, or leave out the options global_d_head, global_n_kv_heads and global_k_as_v',
    )


def _check_chunks_and_temperature(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if not chosen['attention.window']:
        if said.get('attention.window_type') == 'chunked':
            raise UserError(
                'model.attention.window_type = chunked, but there is no window\n'
                'give model.attention.window, the tokens in a chunk'
            )
        chosen['attention.window_type'] = 'sliding'  # of a family whose windows were turned off
    everywhere = chosen['positions'] != 'rope' or not (
        0 < chosen['rope.nope_every'] <= chosen['n_layers'] or chosen['rope.nope_global']
    )
    if said.get('attention.temperature') and everywhere:
        raise UserError(
            f'model.attention.temperature = {said["attention.temperature"]:g} applies to layers without positions, '
            'and all have them\ngive model.rope.nope_every, or leave it out'
        )
    if everywhere:
        chosen['attention.temperature'] = 0.0
    if said.get('attention.temperature_length') and not chosen['attention.temperature']:
        raise UserError(
            f'model.attention.temperature_length = {said["attention.temperature_length"]}, but there is no '
            'temperature\ngive model.attention.temperature'
        )


def _check_layer_types(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    types, n_layers = chosen['layer_types'], chosen['n_layers']
    if not types or len(types) > n_layers:
        raise UserError(
            f'model.layer_types has {len(types)} entries for model.n_layers = {n_layers}\n'
            'give one for each layer, or fewer, which repeat'
        )
    if 'window' in types and not chosen['attention.window']:
        raise UserError('model.layer_types gives layers a window, but there is none\ngive model.attention.window')
    if 'window' not in types:
        if said.get('attention.window'):
            raise UserError(
                f'model.attention.window = {said["attention.window"]}, and model.layer_types gives no layer a window\n'
                "give model.layer_types a 'window', or leave out model.attention.window"
            )
        chosen['attention.window'] = 0  # of a family or preset whose layers with a window were replaced
    if said.get('attention.global_every'):
        raise UserError(
            'model.attention.global_every and model.layer_types both say which layers have a window\n'
            'leave out one of them'
        )
    chosen['attention.global_every'] = 0
