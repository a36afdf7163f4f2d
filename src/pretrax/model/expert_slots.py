"""Numbers of slots for the rows of experts, in the program and in the plan. This module imports no JAX."""

ROOM = 1.25  # slots of a round of the exchange over e, relative to those of an even load


def number_of_blocks(n_choices: int, n_experts: int, length: int) -> int:
    """An upper bound for every routing: each chosen expert leaves at most length - 1 slots empty."""
    return (n_choices + min(n_experts, n_choices) * (length - 1)) // length


def block_length(n_choices: int, n_experts: int, method: str) -> int:
    """Rows of a block: a power of two, small enough that about a tenth of the slots are empty.

    `method` is that of `matmul.grouped_product`. With 'runs' fewer are empty, as a product has several small blocks.
    """
    even = max(1, n_choices // n_experts)
    return max(8, min(512, 1 << max(0, (even // (16 if method == 'runs' else 4)).bit_length() - 1)))


def room_of_round(n_choices: int, n_devices: int) -> int:
    """Slots from one device to another in a round: a multiple of 8, and at most the number of choices."""
    even = ROOM * n_choices / n_devices
    return min(n_choices, 8 * max(1, round(even / 8 + 0.5)))
