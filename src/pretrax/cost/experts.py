"""The experts of a mixture: the rows that a device multiplies, moves and sends, and their products.

As in `model/moe.py` and `model/exchange.py`. Letters: T tokens of a device and pass, k experts per token, E experts.

    rows       T k. In blocks: as many blocks as any routing may need, with padding. After an exchange over e: the slots
               of a round, `ROOM` times those of an even load. With a capacity: its slots
    products   ragged (TPUs): a tile with rows of two experts runs for both; over e, the busiest device counts. Blocks
               (GPUs): all in one kernel. Where it does not serve, and on CPUs, one after the other; each reads the
               weights of its expert, and reads and writes their gradient
    moves      into the order of experts and back; for an exchange, also of devices. Forward, recomputed and backward
"""

import math
from typing import NamedTuple

from pretrax.cost.saved import repeated_products
from pretrax.cost.step_facts import BYTES, StepFacts
from pretrax.model.architecture import Architecture
from pretrax.model.expert_kernels import obstacle
from pretrax.model.expert_slots import block_length, number_of_blocks, room_of_round
from pretrax.model.matmul import choose_grouped

TILE = 256  # rows of a tile of a ragged product: `ragged_dot_tiling` in the program of Qwen3 30B for Ironwood
GPU_TILE = 64, 128  # of a block's product; with 128 x 128, steps of experts on Blackwell are predicted 50 % too slow
PIECE = 4  # blocks of a product on a CPU, on average: the widths of `expert_runs` are 16, 4 and 1
SPREAD = 0.27  # standard deviation of the loads of experts, relative to the mean: after 300 steps of configs/moe.yaml


class Rows(NamedTuple):
    """Rows of a layer per device and pass."""

    choices: int = 0  # tokens times the experts of each
    slots: int = 0  # of the arrays in which the rows of an expert are adjacent
    multiplied: float = 0  # with padding
    block: int = 0  # rows of one product; 0: one product has all
    sent: int = 0  # to other devices along e, in one direction
    exchanges: int = 0  # times that rows are sent
    moved: float = 0  # rows of width d_model that are read or written to order them


def rows_of_experts(arch: Architecture, step: StepFacts, sequence_length: int) -> Rows:
    """The rows of a layer with experts; none for a dense decoder."""
    experts, e, again = arch.experts, step.mesh.get('e', 1), step.saved is not None
    if not experts.n_experts:
        return Rows()
    tokens = math.ceil(step.tokens / math.prod(step.mesh.get(axis, 1) for axis in 'rdec'))
    choices, local, block = tokens * experts.experts_per_token, experts.n_experts // e, 0
    method = choose_grouped(step.platform, 'bfloat16')[0]
    sent = e * room_of_round(choices, e) if e > 1 and experts.capacity is None else 0
    slots, between = sent or choices, sent
    if experts.capacity is not None:
        each = min(
            sequence_length, math.ceil(experts.capacity * sequence_length * choices / tokens / experts.n_experts)
        )
        multiplied = slots = tokens // sequence_length * experts.n_experts * each
        sent = slots * (e > 1)
    elif method == 'ragged':
        busiest = 1 + SPREAD * math.sqrt(2 * math.log(e) / local)  # the largest of e sums of normal loads
        multiplied = min(slots, choices * busiest) + (local - 1) * TILE
    else:
        block = block_length(slots, local, method)
        multiplied = slots = number_of_blocks(slots, local + (e > 1), block) * block
        block *= PIECE if method == 'runs' else 1
    there, back = choices + 2 * between + slots, (slots if between else 0) + between + choices + tokens
    times = 2 + (again or between > 0)
    return Rows(choices, slots, multiplied, block, sent, exchanges=2 + times, moved=times * there + 2 * back)


def products_of_experts(arch: Architecture, step: StepFacts, rows: Rows) -> list[tuple[float, float, float, int]]:
    """(times, FLOPs, bytes, tiles of the result on a GPU) of the products for rows, and of those for gradients."""
    width, matrices = BYTES[step.compute], arch.feed_forward.n_matrices
    d_model, d_ff = arch.d_model, arch.feed_forward.d_ff / step.mesh.get('t', 1)
    in_turn = rows.block > 0 and (
        step.platform == 'cpu' or width != 2 or obstacle('bfloat16', d_model, int(d_ff)) != ''
    )
    blocks = rows.multiplied / rows.block if in_turn else 1
    n_rows, n_experts = rows.multiplied / blocks, 1 if in_turn else arch.experts.n_experts / step.mesh.get('e', 1)
    flops, weights, moved = 2 * n_rows * d_model * d_ff, n_experts * d_model * d_ff, width * n_rows * (d_model + d_ff)
    tiles = [math.ceil(a / GPU_TILE[0]) * math.ceil(d_ff / GPU_TILE[1]) for a in (n_rows, d_model)]
    dense = arch.replace({'experts.experts_per_token': 0})
    repeated = sum(repeated_products(arch, step).values()) - sum(repeated_products(dense, step).values())
    times = (2 + repeated / (arch.n_matmul_params - dense.n_matmul_params)) * matrices * blocks
    of_rows = (times, flops, width * weights + moved, tiles[0])
    return [of_rows, (matrices * blocks, flops, (8 if in_turn else 4) * weights + moved, int(n_experts) * tiles[1])]
