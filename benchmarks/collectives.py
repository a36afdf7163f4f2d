"""Ways to gather weights and to sum their gradients over a whole TPU slice: what XLA makes of each, and what it hides.

    uv sync --inexact --extra tpu
    uv run python benchmarks/collectives.py [topology ...]

Compiles a small program for TPUs that this machine does not have: three layers x + silu(x W_up) W_down in a loop,
forward and backward, with W sharded over all devices of the slice. Prints a row for every way, with XLA's default
options and with those that pretrax chooses. Seconds are those of `pretrax.hlo.schedule`: links and peaks, nothing
measured.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pretrax.cost.topology import Topology, parse_topology
from pretrax.hlo.compiler_options import Situation, choose_options
from pretrax.hlo.schedule import read_schedule
from pretrax.plan.absent_devices import absent_devices
from pretrax.run.placement import place

TOPOLOGIES = ('v5e:16x16', 'v5p:8x8x4', 'v6e:16x16', 'tpu7x:4x4x4')
WIDTH, WIDE, SEQUENCES, LENGTH, LAYERS = 4096, 8192, 4, 1024, 3
Function = Callable[[jax.Array], jax.Array]


def whole(_: tuple[int, ...]) -> tuple[Function, Function]:
    """One collective over all devices."""
    gather = functools.partial(jax.lax.all_gather, axis_name='d', axis=0, tiled=True)
    return gather, functools.partial(jax.lax.psum_scatter, axis_name='d', scatter_dimension=0, tiled=True)


def by_dimension(shape: tuple[int, ...]) -> tuple[Function, Function]:
    """One collective for each dimension of the torus, the innermost gathered first and summed last."""
    ids = np.arange(np.prod(shape)).reshape(shape)
    lines = [np.moveaxis(ids, k, -1).reshape(-1, n).tolist() for k, n in enumerate(shape)]

    def gather(w: jax.Array) -> jax.Array:
        for groups in reversed(lines):
            w = jax.lax.all_gather(w, 'd', axis=0, tiled=True, axis_index_groups=groups)
        return w

    def scatter(g: jax.Array) -> jax.Array:
        for groups in lines:
            g = jax.lax.psum_scatter(g, 'd', scatter_dimension=0, tiled=True, axis_index_groups=groups)
        return g

    return gather, scatter


def exchanges(shape: tuple[int, ...]) -> tuple[Function, Function]:
    """Sums by recursive halving: every device sends half of what it has left to a partner, and adds what it receives.

    Thakur et al. 2005, doi.org/10.1177/1094342005051521, section 4.1. Partners differ in one bit of their number.
    """
    n = int(np.prod(shape))

    def scatter(g: jax.Array) -> jax.Array:
        left = list(range(n.bit_length() - 1))[::-1]  # the bit of each leading dimension
        g = g.reshape((2,) * len(left) + (g.shape[0] // n, g.shape[1]))
        for bit in sorted(left):
            mine, at = jax.lax.axis_index('d') >> bit & 1, left.index(bit)
            half = functools.partial(jax.lax.dynamic_index_in_dim, g, axis=at, keepdims=False)
            g = half(mine) + jax.lax.ppermute(half(1 - mine), 'd', [(i, i ^ 1 << bit) for i in range(n)])
            left.remove(bit)
        return g

    return whole(shape)[0], scatter


def ring(shape: tuple[int, ...]) -> tuple[Function, Function]:
    """Sums around rings of the first dimension, from neighbor to neighbor; one collective for the other dimensions."""
    ids, n = np.arange(np.prod(shape)).reshape(shape), shape[0]
    ahead = list(zip(ids.reshape(-1).tolist(), np.roll(ids, -1, axis=0).reshape(-1).tolist(), strict=True))
    planes = ids.reshape(n, -1).tolist()

    def scatter(g: jax.Array) -> jax.Array:
        rows, place_in_ring = g.shape[0] // n, jax.lax.axis_index('d') // ids[0].size

        def part(i: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(g, (place_in_ring - i) % n * rows, rows)

        total = part(1)
        for step in range(2, n + 1):
            total = jax.lax.ppermute(total, 'd', ahead) + part(step)
        return jax.lax.psum_scatter(total, 'd', scatter_dimension=0, tiled=True, axis_index_groups=planes)

    return whole(shape)[0], scatter


WAYS = {'whole': whole, 'by dimension': by_dimension, 'exchanges': exchanges, 'ring': ring}


def lower(topology: Topology, way: Callable[[tuple[int, ...]], tuple[Function, Function]]) -> jax.stages.Lowered:
    """The gradients of all layers, scattered."""
    devices = absent_devices(topology)
    n, f32, bf16 = len(devices), jnp.float32, jnp.bfloat16
    sizes = dict.fromkeys('rdectp', 1) | {'d': n}
    mesh = Mesh(place(devices, sizes)[0].reshape(-1), ('d',), axis_types=(AxisType.Auto,))
    gather, scatter = way((*topology.shape, n // int(np.prod(topology.shape))))

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ gather(w.astype(bf16))

    def backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = kept
        gradient = jnp.einsum('blm,blf->mf', x, dy, preferred_element_type=f32)
        return dy @ gather(w.astype(bf16)).T, scatter(gradient)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)

    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return x + product(jax.nn.silu(product(x, w[0])), w[1]), None

    def loss(w: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0].astype(f32)))

    rows, stacked = PartitionSpec('d'), PartitionSpec(None, 'd')
    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(stacked, rows), out_specs=stacked, check_vma=False)
    x = jax.ShapeDtypeStruct((SEQUENCES * n, LENGTH, WIDTH), bf16, sharding=NamedSharding(mesh, rows))
    sharding = NamedSharding(mesh, stacked)
    w = tuple(jax.ShapeDtypeStruct((LAYERS, *s), f32, sharding=sharding) for s in ((WIDTH, WIDE), (WIDE, WIDTH)))
    return jax.jit(step).lower(w, x)


def main() -> int:
    parser = argparse.ArgumentParser(description='What XLA makes of gathers and sums over a whole TPU slice')
    parser.add_argument('topology', nargs='*', default=TOPOLOGIES, help=f'default: {" ".join(TOPOLOGIES)}')
    print(
        '| topology | way | options | sums become | MB sent | ms | ms exposed | ms of other work |\n' + '|' + '---|' * 8
    )
    for name in parser.parse_args().topology:
        topology = parse_topology(name)
        mesh = {'d': topology.n_devices}
        chosen = {one.name: one.value for one in choose_options(Situation(topology.version, mesh))}
        for way, build in WAYS.items():
            lowered = lower(topology, build)
            for options in ({}, chosen) if chosen else ({},):
                began = time.perf_counter()
                text = lowered.compile(compiler_options=options).as_text() or ''
                schedule = read_schedule(text, mesh, topology)
                sums = {f'{row.kind} ({row.form})' for row in schedule.rows() if row.kind != 'all-gather'}
                sent = sum(one.times * one.bytes for one in schedule.transfers)
                print(
                    f'| {name} | {way} | {"chosen" if options else "default"} | {"; ".join(sorted(sums))} '
                    f'| {sent / 1e6:,.0f} | {schedule.seconds * 1e3:.1f} | {schedule.exposed * 1e3:.1f} '
                    f'| {schedule.compute * 1e3:.1f} |',
                    flush=True,
                )
                print(f'{name}, {way}: compiled in {time.perf_counter() - began:.0f} s', file=sys.stderr)
    return 0


if __name__ == '__main__':
    sys.exit(main())
