"""`product`: every matrix product with a weight, and the dtypes of its forward and backward pass.

The derivative is written by hand. JAX's derivative of an `einsum` with f32 accumulation multiplies f32 by f32 on GPUs.
Here the operands of all three products have the compute dtype, sums are f32, and the weight's gradient stays f32
(benchmarks/lab-notes.md has the measurements). For operands in eight bits see `eight_bits.py`, for int8 weights in
inference `weight_only.py`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.model import eight_bits, expert_kernels, expert_runs, weight_only
from pretrax.model.numerics import Format
from pretrax.model.xla_cpu import materialize_gradient
from pretrax.shardlib import all_gather, einsum, vary_together

Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]


def product(spec: str, x: jax.Array, w: jax.Array, how: Format) -> jax.Array:
    """`einsum(spec, x, w)` in x's dtype, accumulated in f32. w and its gradient are f32; `how`: operand format."""
    if how.scale is not None:
        return weight_only.scaled_product(spec, x, w, how.scale, x.dtype)
    if how.kind != 'compute':
        return eight_bits.product(how.kind, spec, x, w, how.seed)
    return einsum(spec, x, w, dot=_dot)


def gather(spec: str, w: jax.Array, x: jax.Array, sums: DTypeLike | None = None) -> jax.Array:
    """All slices of a weight over `d`, sent in the dtype of the activations x, or in int8.

    The gradient is summed over `d` in the dtype `sums`; None: in f32.
    """
    return all_gather(spec, w, wire=None if w.dtype == jnp.int8 else x.dtype, sums=sums)


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x + bias in x's dtype; x if the family has no biases. Added in f32: its gradient is a sum over all tokens."""
    if bias is None:
        return x
    y = (x.astype(jnp.float32) + bias).astype(x.dtype)
    return y if bias.ndim == 1 else materialize_gradient(y)


def exact_product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`einsum(spec, x, w)` in f32, for small products such as a router's."""
    dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    return einsum(spec, x.astype(jnp.float32), w, dot=dot)


def grouped_product(spec: str, x: jax.Array, w: jax.Array, how: Format, groups: jax.Array, method: str) -> jax.Array:
    """`product` of every row of x with the matrix of its group: `'N/r/d M, E M F/t -> N/r/d F/t'`.

    Both may have a leading dimension of size 1 for the axis that shards rows and groups: `'G/e N M, G/e E M F -> ...'`.

    Args:
        spec: types of x, w and the result.
        x: rows, sorted by group.
        w: f32, one matrix per group.
        how: the format of the operands: the compute dtype, or int8 weights.
        groups: 'ragged': the number of rows of each group; else the group of each block of rows. Blocks have one size.
        method: 'ragged' for `jax.lax.ragged_dot`, 'blocks' for one product per block, or 'runs' for few products of
            adjacent blocks; see `choose_grouped`.
    """
    if how.scale is not None:
        return weight_only.grouped_product(spec, x, w, how.scale, groups, method)
    assert how.kind == 'compute', how.kind

    def dot(_: str, x: jax.Array, w: jax.Array) -> jax.Array:
        y = _grouped_dot(method, x.reshape(-1, x.shape[-1]), w.reshape(-1, *w.shape[-2:]), groups)
        return y.reshape(*x.shape[:-1], -1)

    return einsum(spec, x, w, dot=dot)


def choose_grouped(platform: str, dtype: DTypeLike, *widths: int) -> tuple[str, str]:
    """The method of `grouped_product` for matrices of these widths on a platform, and the reason."""
    if platform == 'tpu':
        return 'ragged', 'ragged (jax.lax.ragged_dot, which XLA compiles to a kernel on TPUs)'
    if platform not in ('cuda', 'gpu'):
        why = f"on {platform} jax.lax.ragged_dot multiplies every token by every expert's matrix"
        return 'runs', f'runs of blocks ({why})'
    obstacle = expert_kernels.obstacle(dtype, *widths)
    how = f'in a loop (SLOW: not by Pallas kernels: {obstacle})' if obstacle else 'by Pallas kernels'
    return 'blocks', f'blocks {how}'


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return _einsum(equation, x, w.astype(x.dtype), x.dtype)


def _dot_forward(equation: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Pair]:
    w = w.astype(x.dtype)
    return _einsum(equation, x, w, x.dtype), (x, w)


def _dot_backward(equation: str, residuals: Pair, dy: jax.Array) -> Pair:
    x, w = residuals
    left, y_letters = equation.split('->')
    x_letters, w_letters = left.split(',')
    dx = _einsum(f'{y_letters},{w_letters}->{x_letters}', dy, w, x.dtype)
    dw = _einsum(f'{x_letters},{y_letters}->{w_letters}', x, dy, jnp.float32)
    return dx, dw


_dot.defvjp(_dot_forward, _dot_backward)


def _einsum(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(method: str, x: jax.Array, w: jax.Array, groups: jax.Array) -> jax.Array:
    return _grouped_forward(method, x, w, groups)[0]


def _grouped_forward(method: str, x: jax.Array, w: jax.Array, groups: jax.Array) -> tuple[jax.Array, Triple]:
    w = w.astype(x.dtype)
    return _times_group(method, x, w, groups, transposed=False), (x, w, groups)


def _grouped_backward(method: str, residuals: Triple, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, groups = residuals
    dx = _times_group(method, dy, w, groups, transposed=True)
    return dx, _group_gradients(method, x, dy, groups, w), None


_grouped_dot.defvjp(_grouped_forward, _grouped_backward)


def _times_group(method: str, x: jax.Array, w: jax.Array, groups: jax.Array, transposed: bool) -> jax.Array:
    """x[n] w[group of n], or its transpose. In x's dtype, accumulated in f32."""
    if method == 'ragged':
        return _ragged(x, w, groups, ([1], [2 if transposed else 1]), x.dtype, grouped=[0])
    if method == 'runs':
        return expert_runs.times_group(x, w, groups, transposed)
    equation = 'nf,mf->nm' if transposed else 'nm,mf->nf'

    def loop(x: jax.Array, w: jax.Array, groups: jax.Array) -> jax.Array:
        def block(_: None, one: Pair) -> tuple[None, jax.Array]:
            rows, group = one
            return None, _einsum(equation, rows, jax.lax.dynamic_index_in_dim(w, group, keepdims=False), x.dtype)

        y = jax.lax.scan(block, None, (_blocks(x, groups), groups))[1]
        return y.reshape(x.shape[0], -1)

    return _by_kernel(functools.partial(expert_kernels.times_group, transposed=transposed), loop, x, w, groups)


def _group_gradients(method: str, x: jax.Array, dy: jax.Array, groups: jax.Array, w: jax.Array) -> jax.Array:
    """For each group the sum over its rows of x[n] dy[n], in f32."""
    if method == 'ragged':
        return _ragged(x, dy, groups, ([0], [0]), jnp.float32, grouped=[])
    if method == 'runs':
        return expert_runs.group_gradients(x, dy, groups, len(w))

    def block(total: jax.Array, one: Triple) -> tuple[jax.Array, None]:
        rows, d_rows, group = one
        return total.at[group].add(_einsum('nm,nf->mf', rows, d_rows, jnp.float32)), None

    def loop(x: jax.Array, dy: jax.Array, groups: jax.Array) -> jax.Array:
        zero = jnp.zeros_like(w, jnp.float32)  # varies over the mesh as w and x do
        return jax.lax.scan(block, zero, (_blocks(x, groups), _blocks(dy, groups), groups))[0]

    return _by_kernel(functools.partial(expert_kernels.group_gradients, n_groups=len(w)), loop, x, dy, groups)


def _by_kernel(kernel: Callable, loop: Callable, a: jax.Array, b: jax.Array, groups: jax.Array) -> jax.Array:
    """A product of blocks: on GPUs by a kernel, if it can, elsewhere by a loop."""
    small = a.shape[0] // groups.shape[0] < expert_kernels.LEAST
    if small or expert_kernels.obstacle(a.dtype, a.shape[-1], *b.shape[-2:][b.ndim == 2 :]):
        return loop(a, b, groups)
    return jax.lax.platform_dependent(*vary_together(a, b, groups), cuda=kernel, default=loop)


def _blocks(x: jax.Array, groups: jax.Array) -> jax.Array:
    return x.reshape(groups.shape[0], -1, x.shape[-1])


def _ragged(
    a: jax.Array,
    b: jax.Array,
    sizes: jax.Array,
    contracted: tuple[list[int], list[int]],
    dtype: DTypeLike,
    grouped: list[int],
) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers((contracted, ([], [])), [0], grouped)
    return jax.lax.ragged_dot_general(a, b, sizes, numbers, preferred_element_type=dtype)
