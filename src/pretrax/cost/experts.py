"""The experts of a mixture: the rows that a device multiplies, moves and sends, and the products of these.

Letters: T tokens of a device and pass, k experts per token, C = T k choices, E experts on a device, M d_model, F their
feed-forward, divided by t. A layer does, as in `model/moe.py` and `model/exchange.py`:

    rows       C; in blocks, those that fill every expert's last block, for any routing; after an exchange over e, the
               slots of a round, `exchange.ROOM` times those of an even load; with a capacity, its slots
    products   3 matrices (2 without a gate) forward, twice that backward, and those of the activation once more if they
               are not kept. `ragged` (TPUs): one kernel, whose tiles of rows at the border of two experts run for both;
               over e, for the load of the busiest device. `blocks` (GPUs): a product for each block, one after the
               other, on as many cores as it has tiles. With a capacity: one product of all slots
    memory     a product reads the weights of its experts, in `blocks` of one expert for each block, and writes their
               gradients in f32, which `blocks` reads again
    moves      rows into the order of experts and back, forward and backward, and there once more to compute again; with
               an exchange, into the order of devices too. A row is read and written. Sorting takes few bytes
    over e     rows there and back, forward; the same and their gradients, three times, backward
"""

import dataclasses
import functools
import math

from pretrax.cost.saved import repeated_products
from pretrax.cost.step_facts import BYTES, StepFacts
from pretrax.model.architecture import Architecture
from pretrax.model.dispatch import block_length, number_of_blocks
from pretrax.model.exchange import room_of_round
from pretrax.model.matmul import choose_grouped

TILE = 512  # rows of a tile of a ragged product
SPREAD = 0.3  # standard deviation of the loads of experts, relative to the mean: after 180 steps of configs/moe.yaml


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a layer per device and pass, of width d_model unless they are multiplied.

    Attributes:
        tokens, choices: T, and T k.
        slots: of the arrays in which the rows of an expert are adjacent.
        multiplied: by the products, with those that pad.
        block: of one product; 0: one product has all rows.
        sent: to other devices along e, there or back; 0: none.
        exchanges: times that rows are sent.
        moved: reads and writes of rows, in the forward and the backward pass.
    """

    tokens: int
    choices: int = 0
    slots: int = 0
    multiplied: float = 0
    block: int = 0
    sent: int = 0
    exchanges: int = 0
    moved: float = 0


@dataclasses.dataclass(frozen=True)
class Product:
    """One of several equal products, per layer, device and pass.

    Attributes:
        times: how often it runs.
        flops: of one.
        bytes: of memory that one reads and writes.
        tiles: of its result, 128 x 128, which are on different cores of a GPU.
    """

    times: float
    flops: float
    bytes: float
    tiles: int


def rows_of_experts(arch: Architecture, step: StepFacts, sequence_length: int) -> Rows:
    """The rows of a layer with experts; none for a dense decoder."""
    experts, e = arch.experts, step.mesh.get('e', 1)
    tokens = math.ceil(step.tokens / math.prod(step.mesh.get(axis, 1) for axis in 'rdec'))
    choices, local = tokens * experts.experts_per_token, experts.n_experts // e
    if not experts.n_experts:
        return Rows(tokens)
    again = step.saved is not None
    if experts.capacity is not None:
        even = sequence_length * experts.experts_per_token / experts.n_experts
        slots = tokens // sequence_length * experts.n_experts * min(sequence_length, math.ceil(experts.capacity * even))
        moved = (2 + again) * (choices + slots) + 2 * (choices + tokens)
        return Rows(tokens, choices, slots, slots, sent=slots * (e > 1), exchanges=4 + again, moved=moved)
    sent = e * room_of_round(choices, e) if e > 1 else 0
    slots = sent or choices
    if choose_grouped(step.platform)[0] == 'ragged':
        busiest = 1 + SPREAD * math.sqrt(2 * math.log(e) / local)  # the largest of e sums of normal loads
        block, multiplied = 0, min(slots, choices * busiest) + (local - 1) * TILE
    else:
        block = block_length(slots, local)
        multiplied = slots = number_of_blocks(slots, local + (e > 1), block) * block
    there, back = choices + slots, choices + tokens
    if sent:  # into the order of devices, then of experts
        there, back = choices + 2 * sent + slots, slots + sent + back
    moved = (2 + (again or sent > 0)) * there + 2 * back
    return Rows(tokens, choices, slots, multiplied, block, sent, exchanges=5, moved=moved)


def products_of_experts(arch: Architecture, step: StepFacts, rows: Rows) -> tuple[Product, Product]:
    """Those of the forward pass, of the gradients of rows and computed again; and those of gradients of weights."""
    width, matrices = BYTES[step.compute], arch.feed_forward.n_matrices
    d_model, d_ff = arch.d_model, arch.feed_forward.d_ff / step.mesh.get('t', 1)
    blocks = rows.multiplied / rows.block if rows.block else 1
    n_rows, n_experts = rows.multiplied / blocks, 1 if rows.block else arch.experts.n_experts / step.mesh.get('e', 1)
    flops, weights, moved = 2 * n_rows * d_model * d_ff, n_experts * d_model * d_ff, width * n_rows * (d_model + d_ff)
    tiles = [math.ceil(a / 128) * math.ceil(b / 128) for a, b in ((n_rows, d_ff), (d_model, d_ff))]
    return (
        Product(
            (2 + repeated_share_of_experts(arch, step)) * matrices * blocks, flops, width * weights + moved, tiles[0]
        ),
        Product(matrices * blocks, flops, (8 if rows.block else 4) * weights + moved, tiles[1]),
    )


@functools.lru_cache
def without_experts(arch: Architecture) -> Architecture:
    """The same decoder, whose tokens visit no expert."""
    return arch.replace({'experts.experts_per_token': 0})


def repeated_share_of_experts(arch: Architecture, step: StepFacts) -> float:
    """The part of the products of experts that the backward pass repeats."""
    dense = without_experts(arch)
    repeated = sum(repeated_products(arch, step).values()) - sum(repeated_products(dense, step).values())
    return repeated / max(1, arch.n_matmul_params - dense.n_matmul_params)
