"""`scan` over stacked weights, for which no gathered weight is kept until the backward pass."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from .save import Choice, keep_by_name


def scan[X](
    body: Callable[[X, Any], tuple[X, Any]], init: X, stacked: Any, choices: Mapping[str, Choice] | None = None
) -> tuple[X, Any]:
    """`jax.lax.scan(body, init, stacked)` that holds on to the slices of the weights, not to the gathered weights.

    Args:
        body: carry, one slice of the weights -> carry, output.
        init: the first carry.
        stacked: weights with a leading dimension to loop over.
        choices: what of the body is kept for the backward pass, as in `recompute_by_name`; None keeps what was
            computed and gathers again (as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    policy = _was_computed if choices is None else keep_by_name(choices)
    return jax.lax.scan(jax.checkpoint(body, policy=policy, prevent_cse=False), init, stacked)


def _was_computed(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a value is more than another one moved or rounded: those are made again from what is kept."""
    return primitive.name not in _MOVES


_MOVES = {
    'all_gather', 'broadcast_in_dim', 'claim', 'convert_element_type', 'copy', 'dynamic_slice', 'expand_dims',
    'known_same', 'name', 'pvary', 'reshape', 'settle', 'slice', 'squeeze', 'transpose',
}  # fmt: skip
