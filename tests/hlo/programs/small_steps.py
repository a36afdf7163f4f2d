"""Compiles the small steps whose schedules `test_schedule.py` reads, for hardware that is not there.

    JAX_PLATFORMS=cpu python tests/hlo/programs/small_steps.py [name ...]

in an environment with the extras `tpu` and `cuda`; seconds a program. A scan over four layers x + tanh(x @ up) @ down.T
with up and down of [4096, 8192], whose rows are sharded over `d`; gradients of the weights are scattered over `d` and,
with two slices, summed over `r`. A device has 2 x 1024 rows of x. Source locations and tables of neighbors are cut from
the text.
"""

import gzip
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrax.cost.topology import parse_topology
from pretrax.plan.absent_devices import absent_devices
from pretrax.run.placement import place

GATHER = {'xla_enable_async_all_gather': True, 'xla_tpu_prefer_async_allgather_to_allreduce': True}
SPARSE_CORE = GATHER | {
    f'xla_tpu_enable_sparse_core_collective_offload_{what}': True
    for what in ('all_gather', '3d_all_gather', 'reduce_scatter', 'nd_reduce_scatter')
}
ASYNC_SUMS = {'xla_enable_async_all_reduce': True, 'xla_tpu_enable_async_collective_fusion_fuse_all_reduce': True}
LAYERS, M, F = 4, 4096, 8192
# name: (topology, slices, mesh, options)
PROGRAMS = {
    'v5e': ('v5e:16x16', 1, {'d': 256}, {}),
    'v5e_async_sums': ('v5e:16x16', 1, {'d': 256}, ASYNC_SUMS),
    'v5p': ('v5p:4x4x4', 1, {'d': 64}, {}),
    'v5p_sparse_core': ('v5p:4x4x4', 1, {'d': 64}, SPARSE_CORE),
    'v5e_slices': ('v5e:4x4', 2, {'r': 2, 'd': 16}, {}),
    'h100': ('h100x8', 1, {'d': 8}, {}),
}


def compile_step(topology: str, slices: int, sizes: dict[str, int], options: dict) -> str:
    """The text of the optimized program."""
    placed, _ = place(absent_devices(parse_topology(topology, slices)), dict.fromkeys('rdectp', 1) | sizes)
    devices = np.array(placed).reshape(list(sizes.values()))
    mesh, axes = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), tuple(sizes)

    def step(x, weights):
        def loss(weights):
            def layer(x, shards):
                up, down = (jax.lax.all_gather(w.astype(jnp.bfloat16), 'd', axis=0, tiled=True) for w in shards)
                return x + jnp.tanh(x @ up) @ down.T, None

            y, _ = jax.lax.scan(layer, x, weights)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        value, gradients = jax.value_and_grad(loss)(weights)
        if 'r' in axes:
            gradients = jax.tree.map(lambda one: jax.lax.psum(one, 'r'), gradients)
        return gradients, jax.lax.psum(value, axes)

    shard = P(None, 'd')
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(axes), (shard, shard)), out_specs=((shard, shard), P()), check_vma=False
    )
    x = jax.ShapeDtypeStruct((2 * devices.size, 1024, M), jnp.bfloat16, sharding=NamedSharding(mesh, P(axes)))
    w = jax.ShapeDtypeStruct((LAYERS, M, F), jnp.float32, sharding=NamedSharding(mesh, shard))
    return jax.jit(mapped).lower(x, (w, w)).compile(compiler_options=options).as_text()


def shortened(text: str) -> str:
    """Without source locations, tables of neighbors, and settings of kernels."""
    text = re.sub(r'\n\n(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?(?=\n\n)', '', text, flags=re.DOTALL)
    text = re.sub(r', metadata=\{[^{}]*\}', '', text)
    text = re.sub(r'"constant_literals":\[[^\]]*\]', '"constant_literals":[]', text)
    return re.sub(
        r'"(window_config|(?:used_)?scoped_memory_configs)":(\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]),?', '', text
    )


if __name__ == '__main__':
    for name in sys.argv[1:] or PROGRAMS:
        text = shortened(compile_step(*PROGRAMS[name]))
        file = Path(__file__).with_name(f'{name}.hlo.txt.gz')
        file.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(name, len(text), file.stat().st_size)
