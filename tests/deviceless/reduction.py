"""The dtypes in which XLA for TPUs sums gradients, which are scattered over d and then sent over r in bf16.

    JAX_PLATFORMS=cpu python tests/deviceless/reduction.py [d]     with d: they are scattered over d in bf16 too

in an environment with the extra `tpu`. It compiles the gradient of four matrices for two v5e-256, whose rows XLA adds
up over d instead of scattering them, and prints the types that it adds up inside a slice and sends between slices.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from targets import devices_of

from pretrax.model.axes import AXES
from pretrax.run.compiler_options import choose_compiler_options
from pretrax.run.placement import n_slices, place
from pretrax.shardlib import all_gather, bf16, defer_reduction, einsum, f32, make_abstract, psum, typed_shard_map

SUMS = jnp.bfloat16 if sys.argv[1:] == ['d'] else None


@typed_shard_map
def gradient(w: f32['layers M/d F'], x: bf16['layers T/r/d M']) -> f32['layers M/d F']:
    def loss(w: jax.Array) -> jax.Array:
        def layer(_: None, one: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            whole = all_gather('M/d F -> M F', one[0], wire=jnp.bfloat16, sums=SUMS).astype(jnp.bfloat16)
            y = einsum('T/r/d M, M F -> T/r/d F', one[1], whole)
            return None, jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jnp.sum(jax.lax.scan(layer, None, (w, x))[1])

    return psum('r', jax.grad(loss)(defer_reduction('r', w)), wires={'r': jnp.bfloat16})


def main() -> None:
    devices, mesh = devices_of('v5e:16x16', 2), dict.fromkeys(AXES, 1) | {'r': 2, 'd': 256}
    options = choose_compiler_options({}, devices, mesh, n_slices(devices)).values
    with jax.set_mesh(Mesh(place(devices, mesh)[0], AXES, axis_types=(AxisType.Auto,) * len(AXES))):
        sizes = {'layers': 4, 'T': 2**18, 'M': 4096, 'F': 28672}
        w, x = (make_abstract(array, sizes) for array in (f32['layers M/d F'], bf16['layers T/r/d M']))
        program = jax.jit(gradient).lower(w, x).compile(compiler_options=options).as_text()
    added = re.findall(r'= \(?(\w+)\[[\d,]*\]\S* (?:all-reduce|reduce-scatter)\(', program)
    sent = re.findall(r'= \((\w+)\[[\d,]*\]\S* .* send\(.*is_host_transfer=true', program)
    print(json.dumps({'over d': sorted(set(added)), 'over r': sorted(set(sent))}))


if __name__ == '__main__':
    main()
