"""How the decoder reads tokens: with a cache of keys and values, or of states."""

import math
import types
from typing import Any

import jax

from pretrax.infer.cache import CacheKind, LatentPages, Pages, RingPages, Tables, empty_pages, ring_blocks
from pretrax.infer.forward import final_states, logits_of, read_tokens
from pretrax.infer.kernels import Kernel, choose_kernel
from pretrax.infer.pages import SlotPages
from pretrax.infer.weights import Outer, ServingLayer, ServingWeights, WeightKind, decoding_dtype, serving_weights
from pretrax.model.architecture import LayerKind
from pretrax.model.recurrent import State, empty_states
from pretrax.model.transformer import Transformer
from pretrax.model.weights import Weights
from pretrax.shardlib import f32, i32, num, typed_shard_map

_MANY = 64  # tokens; see `decoding_dtype`


class CachedDecoder:
    """The decoder with a cache of keys and values, or of states, as `block.Reader` asks.

    Args:
        model: the decoder.
        slots: sequences at a time.
        columns: tokens of each of them that are read at once while it is written.
        shards: of the slots. Each has pages of its own.
        max_length: the most tokens in a slot.
        page: tokens in a page.
        kept: sequences of the greatest length for which the cache has room beside those in the slots.
        ahead: the most tokens that are written to a slot at once.
        kind: what keys and values are stored as.
        weights: what matrices are stored as.
        platform: of the devices.
        rings: whether layers with a window keep nothing but what their window sees.
        whole: whether there are tables of whole sequences, even if no layer of this model needs them: a draft does.

    Attributes:
        dtype: of activations, matrices and the cache, except where many tokens are read; see `decoding_dtype`.
        kernel: for attention, and the reason for its choice.
    """

    has_states = True

    def __init__(
        self,
        model: Transformer,
        *,
        slots: int,
        columns: int,
        shards: int,
        max_length: int,
        page: int,
        kept: int,
        ahead: int,
        kind: CacheKind,
        weights: WeightKind,
        platform: str,
        rings: bool = True,
        whole: bool = False,
    ):
        self.model, self.max_length, self.arch = model, max_length, model.arch
        if self.arch.rope.scaling is not None:
            self.arch = self.arch.replace({'rope.scaling': self.arch.rope.scaling.for_length(max_length)})
        self._weights, self._rings = weights, rings
        self.dtype = decoding_dtype(platform, model.dtype, slots // shards * columns)
        self.vocab_size, self.columns = model.arch.vocab_size, model.arch.padded_vocab_size
        self._slots, self._shards, self._page, self._kind = slots // shards, shards, page, kind
        blocks = math.ceil(max_length / page)
        windows = [min(window, max_length) if rings else 0 for window in model.arch.attention_windows]
        self._window = max(windows, default=0)
        has_windows = any(model.arch.windows)
        self._reuse = not model.arch.has_states
        kept = kept if self._reuse else 0
        if not windows:
            self.kernel = Kernel('none', 'no layer has attention; each keeps a state of fixed size')
        elif model.arch.attention.latent.kv_rank:
            self.kernel = Kernel('plain', 'no kernel reads latents')
        else:
            # layers with a window are plain anyway
            d_head = model.arch.attention.global_d_head or model.arch.attention.d_head
            self.kernel = choose_kernel(platform, self.dtype, d_head, page, kind, has_windows, model.arch.attention)
        self._ring = min(ring_blocks(self._window, ahead, page), blocks) if self._window else 0
        # Page 0 is for padding.
        self._pages = 1 + (self._slots + kept) * blocks if 0 in windows or whole else 0
        self._ring_pages = 1 + self._slots * self._ring + kept * blocks if self._window else 0

    def prepare(self, weights: Weights) -> ServingWeights:
        """The weights of each layer apart, in `dtype`."""
        return serving_weights(weights, self.model, self._weights, self.dtype)

    def new_memory(self) -> SlotPages:
        """The pages of the slots of one shard: all free."""
        return SlotPages(
            self._slots,
            self._page,
            self.max_length,
            pages=self._pages,
            ring_pages=self._ring_pages,
            ring_blocks=self._ring,
            window=self._window,
            reuse=self._reuse,
        )

    def new_cache(self) -> tuple[Pages | State, ...]:
        """The empty pages of every layer, or its states."""
        arch, dtype = self.model.arch, self.dtype

        def layer(kind: LayerKind) -> Pages | State:
            if kind.mixer != 'attention':
                return empty_states(arch, self._shards * self._slots, dtype)
            in_ring = self._rings and kind.window
            pages = self._shards * (self._ring_pages if in_ring else self._pages)
            return empty_pages(arch, kind, pages, self._page, dtype, self._kind)

        return tuple(map(layer, self.model.arch.kinds))

    def cache_bytes(self) -> int:
        """Bytes of keys and values in `new_cache` on all devices."""
        arch = self.model.arch
        total = 0
        for kind in arch.kinds:
            if kind.mixer == 'attention':
                a_page = empty_pages(arch, kind, self._shards, self._page, self.dtype, self._kind)  # of each shard
                pages = self._ring_pages if self._rings and kind.window else self._pages
                total += pages * sum(array.nbytes for array in jax.tree.leaves(a_page))
        return total

    # The rest is what `block.Reader` describes.

    def read(self, weights: ServingWeights, cache: Any, tokens: jax.Array, positions: jax.Array, tables: Tables) -> Any:
        return self._run(False)(weights.outer, weights.layers, cache, tokens, positions, tables)[2]

    def logits(
        self, weights: ServingWeights, cache: Any, tokens: jax.Array, positions: jax.Array, tables: Tables
    ) -> tuple[jax.Array, jax.Array, Any]:
        return self._run(True)(weights.outer, weights.layers, cache, tokens, positions, tables)

    def _kept_in(self, kind: LayerKind) -> type[Pages | State]:
        if kind.mixer != 'attention':
            return State
        if self.model.arch.attention.latent.kv_rank:
            return LatentPages
        return RingPages if kind.window else Pages

    def _run(self, with_logits: bool) -> Any:
        model, arch = self.model, self.arch
        layers_type = types.GenericAlias(tuple, (ServingLayer,) * arch.n_layers)
        cache_type = types.GenericAlias(tuple, tuple(self._kept_in(kind) for kind in self.model.arch.kinds))

        @typed_shard_map
        def run(
            outer: Outer,
            layers: layers_type,
            cache: cache_type,
            tokens: i32['R/r/d/e C'],
            positions: i32['R/r/d/e C'],
            tables: Tables,
        ) -> tuple[f32['R/r/d/e C V/t'] | None, num['R/r/d/e C M'] | None, cache_type]:
            if not self._rings:
                tables = Tables(tables.full, tables.full, tables.slot)
            dtype = model.dtype if tokens.size >= _MANY and not arch.has_states else self.dtype
            x, cache = read_tokens(
                outer, layers, cache, tokens, positions, tables, arch, model.plan, dtype, self.kernel
            )
            if not with_logits:
                return None, None, cache
            h = final_states(x, outer, arch)
            logits = logits_of(h, outer, arch)
            return logits.reshape(*tokens.shape, -1), h.reshape(*tokens.shape, -1), cache

        return run
