"""The products of a step in eight bits (`precision.matmul`), and the values that they round."""

import math
from typing import Any

import jax

from pretrax.cost.step_facts import EightBits
from pretrax.model.base import Model


def eight_bits_of(model: Model, weights: Any) -> EightBits | None:
    """The products that a model computes in eight bits. None if it computes none.

    Args:
        model: a decoder.
        weights: their shapes.
    """
    numerics, arch, sizes = model.plan.numerics, model.arch, {}
    if numerics.wanted == 'compute' or arch is None:
        return None
    leaves, tree = jax.tree_util.tree_flatten_with_path(weights)
    for (path, w), dims in zip(leaves, tree.flatten_up_to(model.matrix_dimensions(weights)), strict=True):
        if dims is not None:
            inputs, outputs = (math.prod(w.shape[i] for i in axes) for axes in dims)
            name = jax.tree_util.keystr(path[-1:], simple=True)
            visits = arch.experts.experts_per_token if name.startswith('expert_') else 1
            sizes[name] = (inputs * outputs, 2 * inputs + outputs, visits)
    names = [name for block in numerics.blocks for name, kind in block.items() if kind != 'compute' and name in sizes]
    params, values = (sum(sizes[name][k] * sizes[name][2] for name in names) for k in (0, 1))
    experts = sum(sizes[name][0] * sizes[name][2] for name in names if name.startswith('expert_'))
    head = numerics.head != 'compute'
    values += head * (2 * arch.d_model + arch.padded_vocab_size)
    return EightBits(numerics.wanted, params, values, head * arch.padded_vocab_size * arch.d_model, experts)
