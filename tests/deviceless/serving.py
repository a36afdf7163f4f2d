"""The program that writes tokens, compiled for devices that are not there. Run as targets.py is."""

import collections
import json
import os
import re
import sys
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from targets import devices_of

from pretrax.infer.block import empty_slots
from pretrax.infer.cache import Pages, Tables
from pretrax.infer.programs import EngineOptions, Programs
from pretrax.infer.weights import Outer, ServingLayer, ServingWeights, _program
from pretrax.model.axes import AXES
from pretrax.model.choices import TransformerOptions
from pretrax.model.option_names import nest
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.shardlib import i32, make_shardings


def compile_writing(name: str, sizes: dict[str, int], options: EngineOptions, **model: Any) -> dict[str, Any]:
    """The kernel, the calls in the program, and the bytes of its temporary arrays and
    of a layer's cache, on a device.
    """
    shape = dict.fromkeys(AXES, 1) | sizes
    count = int(np.prod(list(shape.values())))
    devices = np.array(devices_of(name)[:count]).reshape(list(shape.values()))
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    platform = devices.flat[0].platform
    request = ModelRequest(50257, options.max_length, 1, jnp.bfloat16, platform, shape, 1)
    decoder = Transformer(request, options=TransformerOptions(**nest(model)))
    programs = Programs(decoder, mesh, options)
    with jax.set_mesh(programs.mesh):
        convert = _program(decoder.arch, jnp.dtype(jnp.bfloat16), options.weights, programs.mesh)
        layer = make_shardings(ServingLayer)
        shardings = ServingWeights(make_shardings(Outer), (layer,) * decoder.arch.n_layers)
        weights = _abstract(jax.eval_shape(convert, decoder.abstract()), shardings)
        arch, memory = decoder.arch, programs.reader.new_memory()
        kv = arch.attention.n_kv_heads, programs.shards * (1 + memory.pages), options.page, arch.attention.d_head
        kv = jax.ShapeDtypeStruct(kv, jnp.bfloat16)
        cache = (_abstract(Pages(kv, kv, None, None), make_shardings(Pages)),) * arch.n_layers
        rows = make_shardings(i32['R/r/d/e'])
        slots = _abstract(empty_slots(programs.slots, options.max_length), rows)
        full, ring = (np.tile(x, (programs.shards, 1)) for x in (memory.full, memory.ring))
        tables = Tables(full, ring, np.zeros(programs.slots, np.int32))
        lowered = programs._write.lower(
            (weights, None), (cache, None), slots, _abstract(tables, rows), np.int32(options.block)
        )
        compiled = lowered.compile()
    return {
        'kernel': str(programs.reader.kernel),
        'calls': collections.Counter(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())),
        'temporary_bytes': compiled.memory_analysis().temp_size_in_bytes,
        'layer_bytes': 2 * kv.size * kv.dtype.itemsize // mesh.size,
    }


def _abstract(tree: Any, shardings: Any) -> Any:
    full = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, full)


OPTIONS = EngineOptions(max_length=32768, slots=32)
MODEL = {'family': 'llama', 'n_layers': 3, 'd_model': 1024, 'n_heads': 8, 'n_kv_heads': 4, 'd_head': 128, 'd_ff': 2048}
CASES = {
    'an H200': lambda: compile_writing('h200', {}, OPTIONS, **MODEL),
    'v5e:2x2': lambda: compile_writing('v5e:2x2', {'d': 2, 't': 2}, OPTIONS, **MODEL),
}

if __name__ == '__main__':
    print(json.dumps(CASES[sys.argv[1]]()))
