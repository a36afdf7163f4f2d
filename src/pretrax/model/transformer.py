"""The decoder of every family: mathematics, memory, sharding and communication of the forward pass.

Letters: B batch, L length, M d_model, V vocabulary.
Mesh axes (axes.py): r, d, e shard the batch, c the sequence, t heads, feed-forward and vocabulary,
p the layers; d also shards every matrix at rest. Between blocks the sequence is sharded over t too
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

A weight is gathered over d where it is used, and sent in the compute dtype. The transpose of the
gather sums its gradient in f32, or in `plan.sums`.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, resolve
from pretrax.model.base import Model
from pretrax.model.block import block
from pretrax.model.choices import TransformerOptions
from pretrax.model.context import column_order, local_columns
from pretrax.model.ends import embed, gather_ends, unembed
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.layers import in_parts, scan_layers
from pretrax.model.loss import Batch, LossTerms, denominators, in_chunks, loss_terms
from pretrax.model.multi_token import ahead_denominators, ahead_metrics, predict_ahead
from pretrax.model.pipeline import gradient_1f1b, stages
from pretrax.model.plan import choose_plan
from pretrax.model.qk_clip import QkClip
from pretrax.model.request import ModelRequest
from pretrax.model.routing import Routed, adjust, counted, load, routing_denominators, routing_metrics, routing_terms
from pretrax.model.weights import Ends, Layer, Weights, abstract_weights, init_weights, matrix_dimensions
from pretrax.shardlib import drop_axes, f32, i32, key, num, save, u32


class Transformer(Model):
    """A decoder-only transformer: a preset, or a family and sizes."""

    Weights = Weights
    arch: Architecture
    layer_block = staticmethod(block)  # of a user in a variant, as the next two
    token_terms, token_counts = staticmethod(loss_terms), staticmethod(denominators)
    matrix_dimensions = staticmethod(matrix_dimensions)

    def __init__(self, request: ModelRequest, *, options: TransformerOptions):
        sizes = request.vocab_size, request.longest
        self.arch = resolve(options, *sizes)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.arch.check_mesh(request.mesh, request.sequence_length)
        self.plan = choose_plan(options, request, self.arch, Layer.products_in(self.arch))
        self.dtype, self.qk_clip = request.dtype, QkClip(request.qk_clip, self.arch)
        self.layer_block = self.qk_clip.observe(block)
        self.choices = {'architecture': self.arch.describe(), **self.plan.reasons}
        self.vocab_size = self.arch.vocab_size
        self.max_length = self.arch.max_sequence_length if self.arch.positions == 'learned' else None
        self.column_order = column_order(self.plan.context, request.sequence_length, request.mesh['c'])
        self.draws = self.plan.numerics.draws or self.arch.drops
        self.gradient = functools.partial(gradient_1f1b, self) if self.plan.is_1f1b else None
        router = self.arch.experts.router
        self.survey = self._expert_load if router.balance_loss and router.balance_over == 'batch' else None

    def init(self, key: jax.Array) -> Weights:
        """Initial weights (under jit, outside the manual region)."""
        return init_weights(self.arch, key)

    def abstract(self) -> Weights:
        """Shapes and shardings of the weights on the current mesh."""
        return abstract_weights(self.arch)

    def embed(self, ends: Ends, batch: Batch) -> num['B/r/d/e L/c/t M']:
        """The input of the first layer."""
        return embed(ends.embedding, ends.positions, batch.tokens, batch.positions, self.arch, self.dtype, batch.seeds)

    def layers(
        self,
        x: num['B/r/d/e L/c/t M'],
        layers: Layer,
        tokens: Tokens,
        *,
        seeds: u32['layers two'] | None = None,
        chunk: i32[''] | None = None,
        kept: Collection[int] = (),
    ) -> tuple[num['B/r/d/e L/c/t M'], Routed | None, num['kept B/r/d/e L/c/t M'] | None]:
        """The hidden states after the last layer, the routers' statistics, the states after `kept` layers.

        Args:
            layers: stacked weights: of the whole decoder, or of one pipeline stage.
            seeds: of stochastic rounding.
            chunk: which of equal parts of the decoder this is, from 0; None: the whole decoder.
        """

        def body(x: jax.Array, w: Layer, layer: LayerSpec) -> tuple[jax.Array, Routed | None]:
            return in_parts(lambda *part: self.layer_block(part[0], w, *part[1:]), save(x, 'input'), tokens, layer)

        return scan_layers(body, x, layers, self.arch, self.plan, seeds=seeds, chunk=chunk, kept=kept)

    def hidden_states(
        self,
        ends: Ends,
        layers: Layer,
        batch: Batch,
        seeds: u32['layers two'] | None = None,
        kept: Collection[int] = (),
    ) -> tuple[num['B/r/d/e L/c/t M'], Routed | None, num['kept B/r/d/e L/c/t M'] | None]:
        """`embed`, then `layers`, of the tokens of a batch."""
        x = self.embed(ends, batch)
        return self.layers(x, drop_axes('p', layers), self.tokens(batch), seeds=seeds, kept=kept)

    def unembed(self, ends: Ends, x: num['B/r/d/e L/c/t M'], seed: jax.Array | None = None) -> num['B/r/d/e L/c V/t']:
        """The logits of the hidden states after the last layer. `seed`: of stochastic rounding."""
        return unembed(ends, x, self.arch, self.plan.numerics.head_format(seed))

    def tokens(self, batch: Batch) -> Tokens:
        """The properties of a batch's tokens that layers need."""
        counts = counted(batch, self._columns(batch.tokens)) if self.arch.experts.n_experts else None
        return Tokens(batch.positions, batch.segments, counts, batch.seeds)

    def logits(self, weights: Weights, tokens: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        """The logits of whole sequences, one document per row."""
        return self.unembed(*self.read(weights, tokens))

    def read(self, w: Weights, tokens: i32['B/r/d/e L/c']) -> tuple[Ends, num['B/r/d/e L/c/t M']]:
        """The arguments of `unembed` for whole sequences, one document per row."""
        ends, ones = gather_ends(w, self.dtype), jnp.ones_like(tokens)
        positions = jnp.broadcast_to(self._columns(tokens), tokens.shape)
        x = self.embed(ends, Batch(tokens, tokens, ones, positions, jnp.ones(tokens.shape)))
        return ends, self.layers(x, drop_axes('p', w.layers), Tokens(positions, ones, counted=None))[0]

    def loss(
        self,
        weights: Weights,
        batch: Batch,
        surveyed: tuple[f32['E'], f32['']] | None = None,
        key: key[''] | None = None,
    ) -> LossTerms:
        """This device's terms of the loss. `surveyed`: the result of `survey` for the whole step."""
        ends = gather_ends(weights, self.dtype, self.plan.sums)
        if self.plan.pipeline is None:
            layer_seeds, head_seed = self.plan.numerics.seeds(key)
            x, routed, _ = self.hidden_states(ends, weights.layers, batch, layer_seeds)
            terms = self.loss_terms(ends, x, batch, head_seed)
            ahead = predict_ahead(self, weights.multi_token, ends, x, routed, batch, self.tokens(batch))
            return self._with_routing(terms | ahead[0], ahead[1], batch, surveyed)
        return self.staged_terms(batch, *stages(self, ends, weights.layers, batch).sums(self.plan.saved))

    def denominators(self, batch: Batch) -> dict[str, f32['']]:
        """The denominators of the terms of `loss`."""
        known = self.token_counts(batch, self.arch.z_loss) | ahead_denominators(batch, self)
        return known | routing_denominators(batch, self._columns(batch.tokens), self.arch)

    def summarize(self, tables: dict[str, f32['layers columns']]) -> dict[str, f32['']]:
        """Metrics of routers, QK clip and multi-token prediction, from the tables of `loss` of a step."""
        routing = routing_metrics(tables['routing'], self.arch) if 'routing' in tables else {}
        return routing | self.qk_clip.metrics(tables) | ahead_metrics(tables)

    def adjust(self, weights: Weights, tables: dict[str, f32['layers columns']]) -> Weights:
        """Moves the biases of the routers, and scales the queries and keys of heads with large logits."""
        return self.qk_clip.clip(adjust(weights, tables, self.arch), tables)

    def _columns(self, tokens: i32['B/r/d/e L/c']) -> i32['L/c']:
        return local_columns(tokens, self.plan.context)

    def loss_terms(
        self, ends: Ends, x: num['B/r/d/e L/c/t M'], batch: Batch, seed: jax.Array | None = None
    ) -> LossTerms:
        """Cross-entropy and z-loss, from the hidden states after the last layer."""

        def terms_of(x: num['B/r/d/e L/c/t M'], part: Batch) -> LossTerms:
            return self.token_terms(self.unembed(ends, x, seed), part, self.arch.vocab_size, self.arch.z_loss)

        return in_chunks(terms_of, x, batch, self.plan.loss_chunks)

    def _with_routing(self, terms: LossTerms, routed: Routed | None, batch: Batch, surveyed: Any = None) -> LossTerms:
        """Adds the terms of the routers."""
        terms |= self.qk_clip.terms(routed)
        if routed is None or routed.tokens is None:
            return terms
        return terms | routing_terms(routed, batch, self._columns(batch.tokens), self.arch, surveyed)

    def staged_terms(self, batch: Batch, sums: dict[str, f32['']], routed: Routed | None) -> LossTerms:
        """The terms of the loss, from the numerators and the statistics of pipeline stages."""
        counts = self.token_counts(batch, self.arch.z_loss)
        return self._with_routing({name: (n, counts[name]) for name, n in sums.items()}, routed, batch)

    def _expert_load(self, weights: Weights, batch: Batch) -> tuple[f32['E'], f32['']]:
        """How many tokens chose each expert: a load-balance loss over the batch depends on it."""
        ends = gather_ends(weights, self.dtype)
        x, routed, _ = self.hidden_states(ends, weights.layers, batch)
        ahead = predict_ahead(self, weights.multi_token, ends, x, routed, batch, self.tokens(batch))
        return load(ahead[1], batch, self._columns(batch.tokens), self.arch)
