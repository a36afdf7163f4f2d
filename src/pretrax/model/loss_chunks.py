"""The loss of a part of each sequence at a time, so that the logits of that part alone are there at once.

The head's product is done again in the backward pass (Chen et al. 2016, arXiv:1604.06174), part by part, and the gradient of
its weights is added up over the parts in f32. It costs a third of the head's FLOPs more, and saves the logits, which are
the largest array of a step where the vocabulary is large.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.errors import UserError
from pretrax.model.axes import along
from pretrax.model.loss import Batch, LossTerms
from pretrax.shardlib import scope


def check_loss_chunks(chunks: int, mesh: dict[str, int], sequence_length: int) -> int:
    """`chunks`, where they divide what a device has of a sequence between blocks; else UserError with the nearest that do."""
    here = sequence_length // along('c t', mesh)
    if here % chunks:
        fits = [n for n in range(1, here + 1) if here % n == 0]
        near = min(fits, key=lambda n: abs(n - chunks))
        raise UserError(
            f'model.loss_chunks = {chunks} does not divide the {here} tokens of a sequence that a device has '
            f'(batch.sequence_length / mesh.c / mesh.t)\nuse model.loss_chunks={near}'
        )
    return chunks


def in_chunks(judge: Callable[[Any, Batch], LossTerms], x: Any, batch: Batch, chunks: int) -> LossTerms:
    """`judge(x, batch)`, a part of each sequence at a time. The terms are sums over tokens, and are added up.

    Args:
        judge: the terms of a stream [B/r/d/e L/c/t M] and its part of a batch [B/r/d/e L/c].
        x: what comes out of the last block.
        batch: its tokens and targets.
        chunks: how many parts; 1: all tokens at once, and nothing is done twice.
    """
    if chunks == 1:
        return judge(x, batch)
    n = x.shape[1] // chunks  # tokens of a part on each device along t, which `judge` puts in the order of the devices

    def part_of(array: Any) -> Any:
        blocks = array.reshape(array.shape[0], -1, chunks, n, *array.shape[2:])
        return jnp.moveaxis(blocks, 2, 0).reshape(chunks, array.shape[0], -1, *array.shape[2:])

    def one(_: None, part: tuple[Any, Batch]) -> tuple[None, LossTerms]:
        with scope():  # L is a part here
            return None, judge(*part)

    sums = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), None, jax.tree.map(part_of, (x, batch)))[1]
    return jax.tree.map(lambda terms: jnp.sum(terms, axis=0), sums)
