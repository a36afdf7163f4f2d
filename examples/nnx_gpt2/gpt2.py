"""GPT-2 as a Flax NNX module: Radford et al. 2019, with learned positions, pre-LayerNorm and a tied head.

Letters: B batch, L length, M d_model, H heads, D head, V vocabulary. The annotations name the mesh axes (batch, model);
`model.axes` in the configuration maps them to axes of pretrax. `segments` separates the documents of a packed row.
"""

import jax
import jax.numpy as jnp
from flax import nnx

normal = nnx.initializers.normal(0.02)


def sharded(*axes, init=normal):
    return nnx.with_partitioning(init, axes)


class Linear(nnx.Linear):
    """A linear layer whose weights are sharded over `model` along one dimension."""

    def __init__(self, n_in, n_out, axes, dtype, rngs, init=normal):
        bias = sharded(axes[1], init=nnx.initializers.zeros_init())
        super().__init__(n_in, n_out, kernel_init=sharded(*axes, init=init), bias_init=bias, dtype=dtype, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, d_model, n_heads, n_layers, dropout, dtype, rngs):
        self.n_heads = n_heads
        residual = nnx.initializers.normal(0.02 / (2 * n_layers) ** 0.5)
        self.norm1 = nnx.LayerNorm(d_model, epsilon=1e-5, rngs=rngs)
        self.qkv = Linear(d_model, 3 * d_model, (None, 'model'), dtype, rngs)
        self.out = Linear(d_model, d_model, ('model', None), dtype, rngs, residual)
        self.norm2 = nnx.LayerNorm(d_model, epsilon=1e-5, rngs=rngs)
        self.up = Linear(d_model, 4 * d_model, (None, 'model'), dtype, rngs)
        self.down = Linear(4 * d_model, d_model, ('model', None), dtype, rngs, residual)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, visible):
        B, L, M = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (y.reshape(B, L, self.n_heads, M // self.n_heads) for y in (q, k, v))
        x = x + self.dropout(self.out(jax.nn.dot_product_attention(q, k, v, mask=visible).reshape(B, L, M)))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=True)))


class GPT2(nnx.Module):
    def __init__(
        self,
        vocab_size=50257,
        d_model=768,
        n_heads=12,
        n_layers=12,
        max_length=1024,
        dropout=0.0,
        dtype=jnp.float32,
        *,
        rngs,
    ):
        self.embed = nnx.Embed(vocab_size, d_model, embedding_init=normal, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(max_length, d_model, embedding_init=normal, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([Block(d_model, n_heads, n_layers, dropout, dtype, rngs) for _ in range(n_layers)])
        self.norm = nnx.LayerNorm(d_model, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens, positions=None, segments=None):
        """tokens [B, L] -> logits [B, L, V]."""
        order = jnp.arange(tokens.shape[1])
        visible = (order[:, None] >= order)[None, None]
        if segments is not None:
            visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
        x = self.dropout(self.embed(tokens) + self.positions(order if positions is None else positions))
        for block in self.blocks:
            x = block(x, visible)
        return self.embed.attend(self.norm(x))
