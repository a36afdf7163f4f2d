"""Generation: the prompt in one pass, then one token at a time against cached keys and values.

Letters: B rows, P prompt length, N new tokens, K key/value heads, D head, V vocabulary.
The parts of the decoder's own layers run here; only attention differs. Every device has the whole vocabulary (t = 1):
`decoding_mesh` makes such a mesh from that of training. Models without a cache: recompute.py.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding

from pretrax.errors import UserError
from pretrax.infer.next_token import Sampling, choose_tokens
from pretrax.infer.recompute import compile_recompute
from pretrax.model.attention import dot_product_attention, output_projection, queries_keys_values
from pretrax.model.axes import AXES, ROWS, along
from pretrax.model.base import Model
from pretrax.model.layers import LayerSpec, Tokens
from pretrax.model.norm import norm
from pretrax.model.numerics import COMPUTE
from pretrax.model.transformer import Transformer, embed, mlp, unembed, vocabulary_tables
from pretrax.model.weights import Layer, Weights
from pretrax.shardlib import (  # fmt: skip
    axis_index,
    drop_axes,
    i32,
    key,
    make_shardings,
    num,
    pmax,
    pytree_dataclass,
    scan,
    scope,
    typechecked,
    typed_shard_map,
)


@pytree_dataclass
class Cache:
    """Keys and values of the tokens so far, in one layer."""

    k: num['B/r/d/e cached/c K/t D']
    v: num['B/r/d/e cached/c K/t D']


def generate(
    model: Model,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Continues each prompt by `tokens` token ids. The same seed gives the same text on any mesh.

    The decoder caches keys and values; for every other model the whole sequence is computed again for each token.

    Args:
        model: any model that gives logits.
        weights: its weights, on any mesh.
        prompts: token ids, at least one in each.
        tokens: how many to add.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: choose among the k likeliest.
        top_p: choose among the likeliest that together have probability p. Holtzman et al. 2020, arXiv:1904.09751.
        seed: of the choices.

    Raises:
        UserError: an empty prompt, a sequence longer than the model can read, or a model without logits.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError('a prompt is empty\ngive at least one token to continue')
    longest = max(map(len, prompts))
    if model.max_length is not None and longest + tokens > model.max_length:
        raise UserError(
            f'a prompt of {longest} tokens and {tokens} new ones exceed the {model.max_length} positions of the model\n'
            f'ask for at most {max(model.max_length - longest, 0)} new tokens'
        )
    how = Sampling(temperature, top_k, top_p)
    mesh = jax.tree.leaves(weights)[0].sharding.mesh
    cached = isinstance(model, Transformer)
    if cached:
        mesh = decoding_mesh(mesh, model.arch.d_model)
    with jax.set_mesh(mesh):
        multiple = 32 * along('c t', mesh.shape)  # few different lengths, few compilations
        padded = multiple * math.ceil((longest if cached else longest + tokens) / multiple)
        if model.max_length is not None:
            padded = min(padded, model.max_length - tokens if cached else model.max_length)
        rows = along(ROWS, mesh.shape) * math.ceil(len(prompts) / along(ROWS, mesh.shape))
        sequences, lengths = np.zeros((rows, padded), np.int32), np.ones((rows,), np.int32)
        for row, ids in enumerate(prompts):
            sequences[row, : len(ids)] = ids
            lengths[row] = len(ids)
        if cached:
            run, weights = compile_cached(model, tokens, how), jax.device_put(weights, make_shardings(Weights))
        else:
            run = compile_recompute(model, tokens, how)
        placed = _place(sequences, i32['B/r/d/e L']), _place(lengths, i32['B/r/d/e'])
        out = run(weights, *placed, jax.random.key(seed))
        return np.asarray(process_allgather(out, tiled=True))[: len(prompts)].tolist()


def decoding_mesh(mesh: Mesh, width: int) -> Mesh:
    """The same devices along `r` and `d` alone; `d` is the largest size that divides `width`."""
    assert mesh.axis_names == AXES
    d = math.gcd(mesh.size // mesh.shape['r'], width)
    return Mesh(mesh.devices.reshape(-1, d, *[1] * (len(AXES) - 2)), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _place(x: np.ndarray, annotation: Any) -> jax.Array:
    sharding: NamedSharding = make_shardings(annotation)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


@functools.lru_cache(maxsize=8)
def compile_cached(model: Transformer, tokens: int, how: Sampling) -> Any:
    """The program that continues prompts; kept, since sampling during training runs it again and again."""
    # No capacity of experts: a text must not depend on the texts that are generated with it.
    arch, dtype = dataclasses.replace(model.arch, capacity=None), model.dtype

    @jax.jit
    @typed_shard_map
    def run(w: Weights, prompt: i32['B/r/d/e prompt'], lengths: i32['B/r/d/e'], seed: key['']) -> i32['B/r/d/e new']:
        rows, padded = prompt.shape
        empty = jnp.zeros((arch.n_layers, rows, padded + tokens, arch.n_kv_heads, arch.d_head), dtype)
        cache = Cache(*(jax.lax.pcast(empty, AXES, to='varying') for _ in 'kv'))
        row = axis_index(ROWS) * rows + jnp.arange(rows)

        def logits_of(cache: Cache, ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, Cache]:
            specs = [LayerSpec(arch, model.plan, kind, COMPUTE) for kind in arch.kinds]
            blocks = [functools.partial(_cached_block, positions, spec) for spec in specs]
            with scope():  # L is first the length of the prompt, then 1
                embedding, unembedding = vocabulary_tables(w, dtype)
                x = embed(w, embedding, ids, positions, arch, dtype)
                x, cache = scan(blocks, x, (drop_axes('p', w.layers), cache))
                return unembed(w, unembedding, x, arch, COMPUTE['head']), cache

        def choose(logits: Any, count: Any) -> Any:
            return pmax('t', choose_tokens(how, arch.vocab_size, seed, row, count, logits))

        positions = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), prompt.shape)
        logits, cache = logits_of(cache, prompt, positions)
        last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
        first = choose(last, jnp.int32(0))

        def one(carry: tuple[Any, Cache], count: Any) -> tuple[tuple[Any, Cache], Any]:
            token, cache = carry
            logits, cache = logits_of(cache, token[:, None], (lengths + count)[:, None])
            return (choose(logits[:, 0], count + 1), cache), token

        _, out = jax.lax.scan(one, (first, cache), jnp.arange(tokens, dtype=jnp.int32))
        return out.T

    return run


@typechecked
def _cached_block(
    positions: i32['B/r/d/e L/c'], layer: LayerSpec, x: num['B/r/d/e L/c/t M'], stacked: tuple[Layer, Cache]
) -> tuple[num['B/r/d/e L/c/t M'], Cache]:
    """`transformer.block`, whose queries see the cached keys and values up to their own positions."""
    w, cache = stacked
    q, k, v = queries_keys_values(norm(x, w.norm1, w.norm1_bias, layer.arch), w, positions, layer)
    row = jnp.arange(q.shape[0])[:, None]
    cache = Cache(cache.k.at[row, positions].set(k), cache.v.at[row, positions].set(v))
    scores = layer.arch.scores(layer.kind)
    visible = scores.sees(positions[:, :, None] - jnp.arange(cache.k.shape[1]))
    y = dot_product_attention(q, cache.k, cache.v, visible, scores)
    h: num['B/r/d/e L/c/t M'] = x + output_projection(y, w, layer)
    tokens = Tokens(positions, jnp.ones_like(positions), counted=None)
    out, _ = mlp(norm(h, w.norm2, w.norm2_bias, layer.arch), w, tokens, layer)
    return h + out, cache
