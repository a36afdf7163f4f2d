"""What XLA makes of one gather of a weight and one sum of its gradient over a whole TPU slice, by default and with the
chosen options.

    JAX_PLATFORMS=cpu python tests/deviceless/options.py [topology ...]

in an environment with the extra `tpu`; half a minute a row. docs/scaling.md quotes it.
"""

import json
import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import devices_of

from pretrax.run.compiler_options import choose_compiler_options

TOPOLOGIES = ('v4:8x8x4', 'v5e:16x16', 'v5p:8x8x4', 'v6e:16x16', 'tpu7x:4x4x4')
M, F = 4096, 8192


def found(topology: str) -> dict[str, dict[str, int]]:
    """Collectives by name in the gradient of sum((x @ all_gather(w))^2), without options and with the chosen ones."""
    devices = devices_of(topology)
    n = len(devices)
    mesh = Mesh(mesh_utils.create_device_mesh((n,), devices=devices), ('d',), axis_types=(AxisType.Auto,))
    chosen = choose_compiler_options({}, devices, {'d': n}, 1).values

    def loss(x: Any, w: Any) -> Any:
        whole = jax.lax.all_gather(w, 'd', axis=0, tiled=True)
        return jax.lax.psum(jnp.sum(jnp.square(x @ whole).astype(jnp.float32)), 'd')

    rows = NamedSharding(mesh, P('d'))
    x = jax.ShapeDtypeStruct((2 * n, 128, M), jnp.bfloat16, sharding=rows)
    w = jax.ShapeDtypeStruct((M, F), jnp.bfloat16, sharding=rows)
    f = jax.shard_map(loss, mesh=mesh, in_specs=(P('d'), P('d')), out_specs=P())
    lowered = jax.jit(jax.grad(f, argnums=1)).lower(x, w)
    names = r'\b(all-reduce|all-gather|reduce-scatter)(?:-start)?\('
    return {
        name: dict(Counter(re.findall(names, lowered.compile(compiler_options=options).as_text())))
        for name, options in (('default', {}), ('chosen', chosen))
    }


if __name__ == '__main__':
    for name in sys.argv[1:] or TOPOLOGIES:
        print(json.dumps({'topology': name, **found(name)}), flush=True)
