"""The Flax NNX side of cpu.py: trains the same GPT-2 in turns, as a tutorial would write it.

It uses one `nnx.jit` step per batch, `nnx.value_and_grad`, Optax's AdamW, attention with a mask, and f32, on JAX's
single default CPU device. The module is that of examples/nnx_gpt2. Input and output are those of torch_gpt2.py: seconds
on standard input, one line of JSON as the answer.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'examples' / 'nnx_gpt2'))

from gpt2 import GPT2  # pyright: ignore[reportMissingImports]


def load(model: Any, w: dict[str, Any]) -> None:
    """Copies weights that pretrax initialized: one array per name, with stacked layers."""

    def put(module: Any, **arrays: Any) -> None:
        for name, value in arrays.items():
            variable = getattr(module, name)
            assert variable[...].shape == value.shape, (name, variable[...].shape, value.shape)
            variable[...] = jnp.asarray(value)

    M = w['embed'].shape[1]
    put(model.embed, embedding=w['embed'])
    put(model.positions, embedding=w['positions'])
    put(model.norm, scale=w['norm'], bias=w['norm_bias'])
    for i, block in enumerate(model.blocks):
        of = {name.removeprefix('layers.'): value[i] for name, value in w.items() if name.startswith('layers.')}
        put(block.norm1, scale=of['norm1'], bias=of['norm1_bias'])
        put(block.norm2, scale=of['norm2'], bias=of['norm2_bias'])
        put(
            block.qkv,
            kernel=np.concatenate([of[name].reshape(M, M) for name in 'qkv'], axis=1),
            bias=np.concatenate([of[f'{name}_bias'].reshape(M) for name in 'qkv']),
        )
        put(block.out, kernel=of['o'].reshape(M, M), bias=of['o_bias'])
        put(block.up, kernel=of['up'], bias=of['up_bias'])
        put(block.down, kernel=of['down'], bias=of['down_bias'])


@nnx.jit
def train_step(model: Any, optimizer: Any, tokens: Any, targets: Any) -> Any:
    def mean_loss(model: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()

    loss, gradient = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradient)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('inputs')
    inputs = np.load(parser.parse_args().inputs)
    weights = {name.removeprefix('weights.'): inputs[name] for name in inputs.files if name.startswith('weights.')}
    settings = json.loads(str(inputs['settings']))
    V, M = weights['embed'].shape
    length = weights['positions'].shape[0]
    with nnx.use_eager_sharding(False):  # one device: the module's sharding annotations do not apply
        model = GPT2(V, M, settings['n_heads'], settings['n_layers'], length, rngs=nnx.Rngs(0))
    load(model, weights)
    adamw = optax.adamw(
        settings['learning_rate'], settings['b1'], settings['b2'], settings['eps'],
        weight_decay=settings['weight_decay'], mask=lambda weights: jax.tree.map(lambda w: w.ndim >= 2, weights),
    )  # fmt: skip
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(settings['clip_norm']), adamw), wrt=nnx.Param
    )
    batches = list(zip(inputs['tokens'], inputs['targets'], strict=True))

    def step(number: int) -> Any:
        return train_step(model, optimizer, *batches[number % len(batches)])

    losses = [float(step(number)) for number in range(settings['checked_steps'])]
    print(json.dumps({'losses': losses, 'versions': {'flax': version('flax')}}), flush=True)
    number = len(losses)
    for line in sys.stdin:
        start, first, before = time.perf_counter(), number, None
        while time.perf_counter() - start < float(line):
            loss = step(number)
            number += 1
            if before is not None:
                before.block_until_ready()  # one step is always in flight, as in pretrax
            before = loss
        jax.block_until_ready(before)
        print(json.dumps({'steps': number - first, 'seconds': time.perf_counter() - start}), flush=True)


if __name__ == '__main__':
    main()
