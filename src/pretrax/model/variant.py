"""A decoder with a function of a user in the place of its token mixer, its feed-forward or its loss."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.errors import UserError
from pretrax.model.base import Model
from pretrax.model.block import block
from pretrax.model.choices import TransformerOptions
from pretrax.model.loss import Batch, LossTerms, denominators, loss_terms
from pretrax.model.norm import norm
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.model.weights import Weights
from pretrax.shardlib import f32, num


def variant(kind: str, function: Callable[..., Any]) -> type[Model]:
    """The class of a decoder with another part; `function` runs per device, as the part that it replaces.

    It is no `Transformer`, so it writes text without a cache, and is not exported.

    Args:
        kind: 'mixer', 'feed_forward' or 'loss'.
        function: of a mixer or feed-forward, (h, w: Layer, tokens: Tokens, layer: LayerSpec) -> what the part adds to
            the residual stream, num['B/r/d/e L/c/t M'] as h; of a loss, (logits: num['B/r/d/e L/c V/t'], batch,
            vocab_size) -> the loss of each token, f32['B/r/d/e L/c'].
    """

    class Variant(Model):
        Weights = Weights

        def __init__(self, request: ModelRequest, *, options: TransformerOptions):
            if request.qk_clip is not None and kind != 'loss':
                raise UserError(f'optimizer.qk_clip: it does not support a {kind} of a plugin\nleave it out')
            self.decoder = Transformer(request, options=options)
            vars(self.decoder).update(_REPLACED[kind](function))
            vars(self).update(vars(self.decoder))

        def init(self, key: jax.Array) -> Weights:
            return self.decoder.init(key)

        def logits(self, weights: Weights, tokens: Any) -> num['B/r/d/e L/c V/t']:
            return self.decoder.logits(weights, tokens)

        def loss(self, weights: Weights, batch: Batch, *more: Any, **named: Any) -> LossTerms:
            return self.decoder.loss(weights, batch, *more, **named)

        def denominators(self, batch: Batch) -> dict[str, f32['']]:
            return self.decoder.denominators(batch)

        def summarize(self, tables: dict[str, Any]) -> dict[str, f32['']]:
            return self.decoder.summarize(tables)

        def adjust(self, weights: Weights, tables: dict[str, Any]) -> Weights:
            return self.decoder.adjust(weights, tables)

        def matrix_dimensions(self, weights: Weights, tables: bool = False) -> Any:
            return self.decoder.matrix_dimensions(weights, tables)

    return functools.update_wrapper(Variant, function, updated=())  # pyright: ignore[reportReturnType]


def _with_mixer(function: Callable[..., Any]) -> dict[str, Any]:
    def mixer(h: jax.Array, w: Any, tokens: Any, layer: Any) -> jax.Array:
        result = _checked('mixer', function(h, w, tokens, layer), h.shape, h.dtype)
        return norm(result, w.norm1_after, None, layer.arch)

    return {'layer_block': functools.partial(block, mixer=mixer)}


def _with_feed_forward(function: Callable[..., Any]) -> dict[str, Any]:
    def mlp(h: jax.Array, w: Any, tokens: Any, layer: Any) -> tuple[jax.Array, None]:
        result = _checked('feed_forward', function(h, w, tokens, layer), h.shape, h.dtype)
        return norm(result, w.norm2_after, None, layer.arch), None

    return {'layer_block': functools.partial(block, mlp=mlp)}


def _with_loss(function: Callable[..., Any]) -> dict[str, Any]:
    """The term `nll` stays the cross-entropy, without a gradient. `own_loss` is what the user's loss adds to it."""

    def terms(logits: jax.Array, batch: Batch, vocab_size: int, z_loss: float) -> LossTerms:
        usual = loss_terms(logits, batch, vocab_size, z_loss)
        nll, count = jax.lax.stop_gradient(usual['nll'][0]), usual['nll'][1]
        losses = _checked('loss', function(logits, batch, vocab_size), batch.mask.shape)
        own = jnp.sum(losses * batch.mask)
        return usual | {'nll': (nll, count), 'own_loss': (own - nll, count)}

    def counts(batch: Batch, z_loss: float) -> dict[str, f32['']]:
        return denominators(batch, z_loss) | {'own_loss': jnp.sum(batch.mask)}

    return {'token_terms': terms, 'token_counts': counts}


def _checked(part: str, result: Any, shape: tuple[int, ...], dtype: jnp.dtype | None = None) -> jax.Array:
    """The result of a user's part.

    Raises:
        TypeError: it has another shape per device, or another dtype; None: any dtype.
    """
    if getattr(result, 'shape', None) != shape or (dtype is not None and result.dtype != dtype):
        returned = f'{result.dtype}{list(result.shape)}' if hasattr(result, 'shape') else type(result).__name__
        expected = f'{dtype or "a number for each token: f32"}{list(shape)}'
        raise TypeError(f'the {part} returned {returned} on each device; expected {expected}')
    return result


_REPLACED = {'mixer': _with_mixer, 'feed_forward': _with_feed_forward, 'loss': _with_loss}
