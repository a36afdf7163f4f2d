"""How any model that gives logits reads tokens: the whole text again for each of them. Nothing but the text is kept."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pretrax.infer.cache import Tables
from pretrax.infer.kernels import Kernel
from pretrax.model.axes import ROWS, along
from pretrax.model.base import AutomaticModel, Model
from pretrax.shardlib import i32, num, typed_shard_map


class Recomputed:
    """Any model that gives logits, as `block.Reader` asks. Its cache is the text of every slot.

    Args:
        max_length: the most tokens in a slot.
    """

    has_states = False
    kernel = Kernel('none', 'SLOW: a model without a cache reads the whole text again for each token')

    def __init__(self, model: Model, mesh: Mesh, slots: int, max_length: int):
        self.max_length, self._slots = max_length, slots
        self._multiple = along(ROWS, mesh.shape)  # of the texts of a forward pass
        multiple = 32 * along('c t', mesh.shape)
        self._length = int(min(multiple * math.ceil(max_length / multiple), model.max_length or math.inf))
        self._logits = model.logits if isinstance(model, AutomaticModel) else logits_per_device(model)
        with jax.set_mesh(mesh):
            weights = jax.eval_shape(model.init, jax.random.key(0))
            try:
                self.columns = self._columns(weights)
            except (TypeError, ValueError) as error:
                if model.max_length in (None, self._length):
                    raise
                self._length = model.max_length  # some modules read texts of one length only
                try:
                    self.columns = self._columns(weights)
                except (TypeError, ValueError):
                    raise error from None
        self.vocab_size = model.vocab_size or self.columns

    def _columns(self, weights: Any) -> int:
        texts = jax.ShapeDtypeStruct((self._slots, self._length), jnp.int32)
        return jax.eval_shape(self._logits, weights, texts).shape[-1]

    def prepare(self, weights: Any) -> Any:
        """The weights as they are."""
        return weights

    def new_cache(self) -> jax.Array:
        """The tokens of every slot, i32[slots, length]."""
        return jnp.zeros((self._slots, self._length), jnp.int32)

    def new_memory(self) -> 'WholeTexts':
        """Slot i is row i of the cache."""
        return WholeTexts(self._slots)

    def read(
        self, weights: Any, cache: jax.Array, tokens: jax.Array, positions: jax.Array, tables: Tables
    ) -> jax.Array:
        """The texts with these tokens."""
        del weights
        column = jnp.where(positions >= 0, positions, self._length)
        return cache.at[tables.full, column].set(tokens, mode='drop')

    def logits(
        self, weights: Any, cache: jax.Array, tokens: jax.Array, positions: jax.Array, tables: Tables
    ) -> tuple[jax.Array, None, jax.Array]:
        """The logits at these tokens, from a forward pass over the texts of these rows."""
        cache = self.read(weights, cache, tokens, positions, tables)
        row, texts = tables.full, cache
        if tables.full.shape[0] % self._multiple == 0:
            row, texts = jnp.arange(tables.full.shape[0])[:, None], cache[tables.full[:, 0]]
        logits = self._logits(weights, texts)[row, jnp.maximum(positions, 0)]
        return logits.astype(jnp.float32), None, cache


class WholeTexts:
    """The places of the slots, as `block.Memory` asks: slot i is row i, with room for the longest text."""

    pages = used_pages = cached_pages = 0

    def __init__(self, slots: int):
        self.full, self.ring = np.arange(slots, dtype=np.int32)[:, None], np.zeros((slots, 0), np.int32)

    def begin(self, slot: int, tokens: Any) -> int:
        """No token is known."""
        del slot, tokens
        return 0

    def reserve(self, slot: int, length: int) -> bool:
        """There is always room."""
        del slot, length
        return True

    def advance(self, slot: int, tokens: Any, length: int) -> None: ...

    def end(self, slot: int) -> None: ...

    def clear_cache(self) -> None: ...


def logits_per_device(model: Model) -> Any:
    """Weights, tokens i32[B, L] -> the logits of whole texts, from code that runs per device."""
    weights_type = model.Weights

    @typed_shard_map
    def logits(weights: weights_type, texts: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        return model.logits(weights, texts)

    return logits
