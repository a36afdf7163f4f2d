"""Layers that keep a state instead of keys and values: gated delta nets and state-space models (Mamba 2).

Queries, keys and values pass through a short causal convolution. The state of a head is a matrix [D_key, D_value],
which decays by exp(decay) at each token, decay <= 0. A delta net and a state-space model differ in what a token writes
to the state (`delta_scan`, `state_space_scan`) and in the norm of the result. No token sees another document.
`RecurrentWeights` names each weight as the papers do.

Inside a chunk of tokens, products of queries and keys replace the recurrence; a loop over the chunks carries the state
(Dao and Gu 2024, arXiv:2405.21060, section 6; Yang et al. 2024, arXiv:2406.06484, section 3.2).

Letters of layers: B batch, L length, M d_model, N_state heads, D_value head, N_key key heads, D_key key, J tokens that
the convolution sees. Mesh axes: axes.py. t shards the heads; a sequence is on one device (c is 1).
Letters of scans, which compute with plain arrays of one device: C tokens of a chunk, n chunks, G key heads, R heads
that share a key, S key, W head.
"""

import functools
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.model.architecture import CHUNK, Architecture, LayerKind
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.matmul import product
from pretrax.model.part import Part
from pretrax.shardlib import (
    all_gather,
    f32,
    i32,
    make_shardings,
    num,
    psum_scatter,
    pytree_dataclass,
    save,
    typechecked,
    vary_together,
)


def _init_dt_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initial biases for which the step, softplus(bias), is 0.001 to 0.1."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=math.log(0.001), maxval=math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


def _init_convolution(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


@pytree_dataclass
class RecurrentWeights(Part):
    """The projections, the convolution and the decay of a delta net or a state-space model.

    In Mamba 2, arXiv:2405.21060, queries, keys and values are C, B and x. Its code has z, x, B, C and dt in one matrix,
    in_proj, and the three convolutions in one, conv1d.
    """

    linear_q: num['M/d N_key/t D_key']  # Mamba 2: C, in N_key groups of the state size D_key
    linear_k: num['M/d N_key/t D_key']  # B
    linear_v: num['M/d N_state/t D_value']  # x
    linear_z: num['M/d N_state/t D_value']  # z, the gate of the result
    linear_a: f32['M/d N_state/t']  # dt before its bias and softplus; delta net: a, of the decay alpha
    linear_beta: f32['M/d N_state/t'] | None  # delta net, arXiv:2412.06464: beta before its sigmoid
    linear_q_conv: f32['N_key/t D_key J']
    linear_k_conv: f32['N_key/t D_key J']
    linear_v_conv: f32['N_state/t D_value J']
    linear_q_conv_bias: f32['N_key/t D_key'] | None
    linear_k_conv_bias: f32['N_key/t D_key'] | None
    linear_v_conv_bias: f32['N_state/t D_value'] | None
    linear_dt_bias: f32['N_state/t']  # dt_bias
    linear_log_decay: f32['N_state/t']  # A_log: a token's decay is exp(-exp(A_log) dt)
    linear_skip: f32['N_state/t'] | None  # D
    linear_norm: f32['D_value'] | None  # of each head
    linear_group_norm: f32['N_state/t D_value'] | None  # of the heads that share a key
    linear_o: num['N_state/t D_value M/d']

    # As in the code of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060), which that of gated delta nets follows
    initial: ClassVar = {
        'linear_dt_bias': _init_dt_bias,
        'linear_log_decay': lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=1, maxval=16)),
        'linear_skip': lambda _, shape: jnp.ones(shape),
        'linear_norm': lambda _, shape: jnp.ones(shape),  # without `norm_offset`, as the next one
        'linear_group_norm': lambda _, shape: jnp.ones(shape),
        **dict.fromkeys(('linear_q_conv', 'linear_k_conv', 'linear_v_conv'), _init_convolution),
    }

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """A delta net has beta and a norm of each head, a state-space model D and a norm of each group of heads."""
        return {
            **dict.fromkeys(('linear_beta', 'linear_norm'), kind.mixer == 'delta'),
            **dict.fromkeys(('linear_skip', 'linear_group_norm'), kind.mixer == 'mamba'),
            **dict.fromkeys((f'linear_{name}_conv_bias' for name in 'qkv'), arch.recurrent.conv_bias),
        }


@pytree_dataclass
class Projections:
    """What a layer makes of its input."""

    q: num['B/r/d/e L/c N_key/t D_key']  # before the convolution, as k and v
    k: num['B/r/d/e L/c N_key/t D_key']
    v: num['B/r/d/e L/c N_state/t D_value']
    z: num['B/r/d/e L/c N_state/t D_value']  # gates the result
    a: num['B/r/d/e L/c N_state/t']  # the step dt is softplus(a + linear_dt_bias)
    beta: num['B/r/d/e L/c N_state/t'] | None  # of a delta net


@pytree_dataclass
class State:
    """What a layer keeps of sequences, in decoding."""

    q: num['slots/r/d/e before N_key/t D_key']  # the last J - 1 tokens before the convolution, as k and v
    k: num['slots/r/d/e before N_key/t D_key']
    v: num['slots/r/d/e before N_state/t D_value']
    state: f32['slots/r/d/e N_state/t D_key D_value']


def empty_states(arch: Architecture, slots: int, dtype: DTypeLike) -> State:
    """The states of one layer on the current mesh: the tokens of the convolution in the compute dtype, f32 states."""
    own, like = arch.recurrent, make_shardings(State)
    before, keys, values = own.conv_width - 1, (own.n_key_heads, own.d_key), (own.n_heads, own.d_head)
    return State(
        q=jnp.zeros((slots, before, *keys), dtype, device=like.q),
        k=jnp.zeros((slots, before, *keys), dtype, device=like.k),
        v=jnp.zeros((slots, before, *values), dtype, device=like.v),
        state=jnp.zeros((slots, own.n_heads, own.d_key, own.d_head), device=like.state),
    )


@typechecked
def linear_attention(
    h: num['B/r/d/e L/c/t M'], w: RecurrentWeights, tokens: Tokens, layer: LayerSpec
) -> num['B/r/d/e L/c/t M']:
    """The mixer of a layer with a state. Yang et al. 2024, arXiv:2412.06464; Dao and Gu 2024, arXiv:2405.21060."""
    x = projections(h, w, layer)
    y, _ = mix(x, w, tokens.segments, layer, None)
    return state_output(y, x.z, w, layer)


@typechecked
def projections(h: num['B/r/d/e L/c/t M'], w: RecurrentWeights, layer: LayerSpec) -> Projections:
    """The projections of h."""
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    of_key, of_head = (
        'B/r/d/e L/c M, M N_key/t D_key -> B/r/d/e L/c N_key/t D_key',
        'B/r/d/e L/c M, M N_state/t D_value -> B/r/d/e L/c N_state/t D_value',
    )
    q = product(
        of_key, h, layer.gather('linear_q', 'M/d N_key/t D_key -> M N_key/t D_key', w, h), layer.formats['linear_q']
    )
    k = product(
        of_key, h, layer.gather('linear_k', 'M/d N_key/t D_key -> M N_key/t D_key', w, h), layer.formats['linear_k']
    )
    v = product(
        of_head,
        h,
        layer.gather('linear_v', 'M/d N_state/t D_value -> M N_state/t D_value', w, h),
        layer.formats['linear_v'],
    )
    z = product(
        of_head,
        h,
        layer.gather('linear_z', 'M/d N_state/t D_value -> M N_state/t D_value', w, h),
        layer.formats['linear_z'],
    )

    def project_heads(name: str) -> num['B/r/d/e L/c N_state/t']:
        matrix = layer.gather(name, 'M/d N_state/t -> M N_state/t', w, h)
        return product('B/r/d/e L/c M, M N_state/t -> B/r/d/e L/c N_state/t', h, matrix, layer.formats[name])

    beta = None if w.linear_beta is None else project_heads('linear_beta')
    return Projections(save(q, 'q'), save(k, 'k'), save(v, 'v'), save(z, 'gate'), project_heads('linear_a'), beta)


@typechecked
def mix(
    x: Projections, w: RecurrentWeights, segments: i32['B/r/d/e L/c'], layer: LayerSpec, before: State | None
) -> tuple[num['B/r/d/e L/c N_state/t D_value'], f32['B/r/d/e N_state/t/c D_key D_value']]:
    """What each token reads from the state, and the state after the last token.

    Args:
        x: the tokens.
        w: weights of the layer.
        segments: the number of each token's document.
        layer: the kind of the layer.
        before: the state of the first document before these tokens; None: an empty one.
    """
    last = (None, None, None) if before is None else (before.q, before.k, before.v)
    q = convolution(x.q, w.linear_q_conv, w.linear_q_conv_bias, segments, last[0])
    k = convolution(x.k, w.linear_k_conv, w.linear_k_conv_bias, segments, last[1])
    v = convolution(x.v, w.linear_v_conv, w.linear_v_conv_bias, segments, last[2])
    grouped = v.reshape(*q.shape[:3], -1, v.shape[-1]).astype(jnp.float32)  # [B, L, G, R, W]
    step = jax.nn.softplus(x.a.astype(jnp.float32) + w.linear_dt_bias)
    decay = (-jnp.exp(w.linear_log_decay) * step).reshape(grouped.shape[:-1])
    step = step.reshape(decay.shape)
    state = jnp.zeros_like(decay[:, 0, ..., None, None] * q[:, 0, :, None, :, None] * grouped[:, 0, :, :, None])
    if before is not None:
        state = state + before.state.reshape(state.shape)
    if x.beta is not None:
        beta = jax.nn.sigmoid(x.beta.astype(jnp.float32)).reshape(decay.shape)
        y, state = delta_scan(q, k, grouped, decay, beta, segments, state)
    else:
        y, state = state_space_scan(q, k, grouped * step[..., None], decay, segments, state)
    y, state = y.reshape(v.shape), state.reshape(len(state), -1, *state.shape[3:])
    if w.linear_skip is not None:
        y = y + v * w.linear_skip[:, None]
    return save(y.astype(v.dtype), 'attention'), state


@jax.checkpoint
def convolution(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, segments: i32['B L'], before: jax.Array | None
) -> jax.Array:
    """silu of a causal convolution of each channel, inside documents, in f32.

    Args:
        x: [B, L, heads, width].
        kernel: [heads, width, J]; the last weight is that of the token itself.
        bias: [heads, width] or None.
        segments: the number of each token's document.
        before: the J - 1 tokens before x, [B, J - 1, heads, width]; None: zeros.
    """
    width = kernel.shape[-1]
    if before is None:
        before = jnp.zeros_like(x[:, :1], shape=(x.shape[0], width - 1, *x.shape[2:]))
    tokens, kernel = vary_together(jnp.concatenate([before, x], axis=1), jnp.moveaxis(kernel, -1, 0))
    total = windows_sum(tokens, kernel, jnp.pad(segments, ((0, 0), (width - 1, 0)), mode='edge'))
    return jax.nn.silu(total if bias is None else total + bias).astype(x.dtype)


@jax.custom_vjp
def windows_sum(tokens: jax.Array, kernel: jax.Array, document: jax.Array) -> jax.Array:
    """For each token, the sum of the kernel times the J tokens that end with it, of those in its document, in f32.

    Args:
        tokens: [B, J - 1 + L, N, W].
        kernel: [J, N, W].
        document: the number of each token's document, [B, J - 1 + L].
    """
    windows = _windows(tokens, document, document[:, len(kernel) - 1 :])
    return functools.reduce(jnp.add, map(jnp.multiply, windows, kernel))


def _windows(x: jax.Array, document: jax.Array, own: jax.Array) -> list[jax.Array]:
    """x[:, j:] for each j, of the length of `own`, in f32: zero where the document is not that in `own`."""
    here = [slice(j, j + own.shape[1]) for j in range(1 + x.shape[1] - own.shape[1])]
    return [jnp.where((document[:, j] == own)[:, :, None, None], x[:, j].astype(jnp.float32), 0) for j in here]


def _windows_backward(kept: tuple[jax.Array, jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """JAX would add padded arrays, for which XLA for CPUs does not use vectors."""
    tokens, kernel, document = kept
    more = len(kernel) - 1
    after = jnp.pad(document, ((0, 0), (0, more)), mode='edge')
    reading = _windows(jnp.pad(dy, ((0, 0), (more, more), (0, 0), (0, 0))), after, document)
    d_tokens = functools.reduce(jnp.add, map(jnp.multiply, reading, kernel[::-1]))
    d_kernel = [jnp.sum(seen * dy, axis=(0, 1)) for seen in _windows(tokens, document, document[:, more:])]
    return d_tokens.astype(tokens.dtype), jnp.stack(d_kernel), None


windows_sum.defvjp(lambda *inputs: (windows_sum(*inputs), inputs), _windows_backward)


@typechecked
def state_output(
    y: num['B/r/d/e L/c N_state/t D_value'],
    z: num['B/r/d/e L/c N_state/t D_value'],
    w: RecurrentWeights,
    layer: LayerSpec,
) -> num['B/r/d/e L/c/t M']:
    """What the heads read, normed and gated, projected into the residual stream."""
    scale = w.linear_group_norm if w.linear_norm is None else w.linear_norm
    assert scale is not None
    y = gated_norm(y, z, scale, layer.arch.norm.eps, layer.arch.recurrent.n_heads // layer.arch.recurrent.n_key_heads)
    w_o = layer.gather('linear_o', 'N_state/t D_value M/d -> N_state/t D_value M', w, y)
    out = product(
        'B/r/d/e L/c N_state/t D_value, N_state/t D_value M -> B/r/d/e L/c M', y, w_o, layer.formats['linear_o']
    )  # partial over t
    return save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'attention_out')


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def gated_norm(y: jax.Array, z: jax.Array, scale: jax.Array, eps: float, shared: int) -> jax.Array:
    """RMSNorm and the gate silu(z), in f32: y and z [B, L, N, W], scale [W] or [N, W].

    A delta net norms each head, and gates it. A state-space model gates first, and norms the `shared` heads of a key
    together (Dao and Gu 2024, arXiv:2405.21060, section 7.1, and the released code).
    """
    gate, x = jax.nn.silu(z.astype(jnp.float32)), y.astype(jnp.float32)
    if scale.ndim == 1:
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale * gate
    else:
        x = (x * gate).reshape(*x.shape[:2], -1, shared, x.shape[-1])
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=(-2, -1), keepdims=True) + eps)
        x = x.reshape(y.shape) * scale
    return x.astype(y.dtype)


class Decays(NamedTuple):
    """Products of decays, zero between documents. f32."""

    pairs: f32['B n G R C C']  # from token j of a chunk to token i; zero if i < j
    start: f32['B n G R C']  # from the last token of the chunk before to token i
    end: f32['B n G R C']  # from token i to the last token of the chunk
    whole: f32['B n G R']  # from the last token of the chunk before to the last token of the chunk


def cut(x: jax.Array) -> jax.Array:
    """[B, L, ...] -> [B, n, C, ...]. Zeros fill the last chunk: such a token changes no state."""
    rows, length, *rest = x.shape
    size = min(CHUNK, length)
    if more := -length % size:
        x = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * len(rest)))
    return x.reshape(rows, -1, size, *rest)


def decays(decay: f32['B L G R'], segments: i32['B L']) -> Decays:
    """The decays of chunks, from the logarithm of each token's decay and the number of its document.

    A state from before the row belongs to the row's first document.
    """
    # XLA for CPUs would compute both again for each pair
    total = jax.lax.optimization_barrier(jnp.moveaxis(jnp.cumsum(cut(decay), axis=2), 2, -1))  # [B, n, G, R, C]
    last = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % total.shape[-1])), mode='edge')
    document = cut(last)[:, :, None, None]  # [B, n, 1, 1, C]
    ends = document[..., -1]
    before = jnp.concatenate([document[:, :1, ..., 0], ends[:, :-1]], axis=1)
    visible = jnp.tril(document[..., :, None] == document[..., None, :])
    hidden = jax.lax.optimization_barrier(jnp.where(visible, 0, -jnp.inf))  # before exp, which may overflow there
    return Decays(
        jnp.exp(total[..., :, None] - total[..., None, :] + hidden),
        _exp(total, document == before[..., None]),
        _exp(total[..., -1:] - total, document == ends[..., None]),
        _exp(total[..., -1], ends == before),
    )


def _exp(x: jax.Array, visible: jax.Array) -> jax.Array:
    return jnp.exp(jnp.where(visible, x, -jnp.inf))  # masked first, since exp(x) may overflow where nothing is visible


_UNROLL = 16  # chunks in one step of the loop, which XLA for CPUs runs slowly
_EPS = 1e-6  # of the length of queries and keys
_EXACT = jax.lax.Precision.HIGHEST


@jax.checkpoint
def delta_scan(
    q: num['B L G S'],
    k: num['B L G S'],
    v: f32['B L G R W'],
    decay: f32['B L G R'],
    beta: f32['B L G R'],
    segments: i32['B L'],
    state: f32['B G R S W'],
) -> tuple[f32['B L G R W'], f32['B G R S W']]:
    """y_t = q_t S_t with S_t = (I - beta_t k_t^T k_t) exp(decay_t) S_{t-1} + beta_t k_t^T v_t, in chunks.

    Queries and keys have unit length; queries are divided by sqrt(S). Yang et al. 2024, arXiv:2412.06464, section 3.3:
    the updates of a chunk, each of which depends on the ones before it, are the solution of a triangular system (the WY
    form). The backward pass computes everything again.

    Args:
        q: queries.
        k: keys, which R heads share, as queries.
        v: values.
        decay: logarithm of the decay.
        beta: how much of what the state holds under a key is replaced, 0 to 1.
        segments: the number of each token's document; a new document starts with an empty state.
        state: before the first token, for its document.

    Returns:
        y, and the state after the last token.
    """
    length = q.shape[1]
    by = decays(decay, segments)
    q, k = cut(unit(q) * q.shape[-1] ** -0.5), cut(unit(k))  # [B, n, C, G, S]
    beta = jnp.moveaxis(cut(beta), 2, -1)[..., None]  # [B, n, G, R, C, 1]
    values = jnp.einsum('bncgrw->bngrcw', cut(v.astype(jnp.float32)))
    # A TPU would round k to bf16, and the errors grow with the inverse
    overlap = jnp.einsum('bnigs,bnjgs->bngij', k, k, precision=_EXACT)
    overlap = overlap[:, :, :, None] * by.pairs * beta  # [B, n, G, R, C, C]
    keys = jnp.einsum('bncgs,bngrc->bngrcs', k, by.start)
    solved = solve(overlap, beta * jnp.concatenate([values, keys], axis=-1))
    new, read = jnp.split(solved, [values.shape[-1]], axis=-1)
    scores = jnp.einsum('bnigs,bnjgs->bngij', q, k)[:, :, :, None] * by.pairs
    queries = jnp.einsum('bncgs,bngrc->bngrcs', q, by.start)
    writing = jnp.einsum('bncgs,bngrc->bngrcs', k, by.end)

    def chunk(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        new, read, scores, queries, writing, whole = one
        new = new - jnp.einsum('bgrcs,bgrsw->bgrcw', read, state)
        y = jnp.einsum('bgrcs,bgrsw->bgrcw', queries, state) + jnp.einsum('bgrij,bgrjw->bgriw', scores, new)
        return state * whole[..., None, None] + jnp.einsum('bgrcs,bgrcw->bgrsw', writing, new), y

    chunks = tuple(jnp.moveaxis(x, 1, 0) for x in (new, read, scores, queries, writing, by.whole))
    state, y = jax.lax.scan(chunk, state, chunks)
    y = jnp.einsum('nbgrcw->bncgrw', y)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state


def unit(x: jax.Array) -> jax.Array:
    """x over its length, in f32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS)


def solve(overlap: f32['B n G R C C'], values: f32['B n G R C W']) -> f32['B n G R C W']:
    """x with (I + the part of `overlap` below the diagonal) x = values.

    XLA's solver for CPUs takes one matrix after another; products do not. For TPUs it has a kernel for all matrices.
    """
    return jax.lax.platform_dependent(overlap, values, cpu=by_products, default=by_substitution)


def by_substitution(overlap: f32['B n G R C C'], values: f32['B n G R C W']) -> f32['B n G R C W']:
    """`solve`, by XLA's own solver."""
    return jax.lax.linalg.triangular_solve(overlap, values, left_side=True, lower=True, unit_diagonal=True)


@jax.custom_vjp
def by_products(overlap: f32['B n G R C C'], values: f32['B n G R C W']) -> f32['B n G R C W']:
    """`solve`, by the inverse of blocks on the diagonal that double in size.

    [[P, 0], [Q, R]] has the inverse [[P', 0], [-R' Q P', R']].
    """
    return _forward(overlap, values)[0]


def _forward(overlap: jax.Array, values: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    here = jnp.arange(overlap.shape[-1])
    inverse, size = jnp.broadcast_to(jnp.eye(len(here)), overlap.shape), 1
    while size < len(here):
        block = here // size
        below = (block[:, None] == block + 1) & (block % 2 == 0)
        step = jnp.matmul(jnp.where(below, overlap, 0), inverse, precision=_EXACT)
        inverse, size = inverse - jnp.matmul(inverse, step, precision=_EXACT), 2 * size
    solved = jnp.matmul(inverse, values, precision=_EXACT)
    return solved, (inverse, solved)


def _backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, solved = kept
    values = jnp.matmul(inverse.mT, gradient, precision=_EXACT)
    return jnp.tril(-jnp.matmul(values, solved.mT, precision=_EXACT), -1), values


by_products.defvjp(_forward, _backward)


@jax.checkpoint
def state_space_scan(
    q: num['B L G S'],
    k: num['B L G S'],
    v: f32['B L G R W'],
    decay: f32['B L G R'],
    segments: i32['B L'],
    state: f32['B G R S W'],
) -> tuple[f32['B L G R W'], f32['B G R S W']]:
    """y_t = q_t S_t with S_t = exp(decay_t) S_{t-1} + k_t^T v_t, in chunks. Dao, Gu 2024, arXiv:2405.21060, section 6.

    q, k, v and decay are C, B, dt x and dt A of the paper. Products have operands in the dtype of q; sums and states
    are f32. Heads that share a key are columns of a product. The backward pass computes everything again.

    Args:
        q: queries.
        k: keys, which R heads share, as queries.
        v: values.
        decay: logarithm of the decay.
        segments: the number of each token's document; a new document starts with an empty state.
        state: before the first token, for its document.

    Returns:
        y, and the state after the last token.
    """
    length, dtype, by = q.shape[1], q.dtype, decays(decay, segments)
    q, k, v = (jnp.moveaxis(cut(x), 3, 2) for x in (q, k, v))  # [B, n, G, C, ...]
    start, end = (jnp.moveaxis(x, -1, 3)[..., None] for x in (by.start, by.end))  # [B, n, G, C, R, 1]

    def columns(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:4], -1).astype(dtype)

    new = products(k.mT, columns(v * end)).reshape(*k.shape[:3], k.shape[-1], *v.shape[4:])  # [B, n, G, S, R, W]

    def chunk(state: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        whole, new = one
        return state * whole[:, :, None, :, None] + new, state.astype(dtype)

    each = jnp.moveaxis(by.whole, 1, 0), jnp.moveaxis(new, 1, 0)
    state, before = jax.lax.scan(chunk, jnp.swapaxes(state, 2, 3), each, unroll=_UNROLL)
    # XLA for CPUs would compute each state from the first one
    before = jnp.moveaxis(jax.lax.optimization_barrier(before), 0, 1)
    scores = products(q, k.mT)[:, :, :, None] * by.pairs
    y = jnp.swapaxes(products(scores.astype(dtype), jnp.swapaxes(v, 3, 4).astype(dtype)), 3, 4)
    y = jnp.moveaxis(y + products(q, columns(before)).reshape(v.shape) * start, 2, 3)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], jnp.swapaxes(state, 2, 3)


@jax.custom_vjp
def products(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in f32, of many matrices. Operands in the backward pass have the dtype of a, too."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _products_backward(operands: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = operands
    dy = dy.astype(a.dtype)
    return products(dy, b.mT).astype(a.dtype), products(a.mT, dy).astype(b.dtype)


products.defvjp(lambda a, b: (products(a, b), (a, b)), _products_backward)
