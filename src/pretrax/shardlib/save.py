"""What is kept for the backward pass, by name: `save(x, 'q')` in the model, keep or recompute in the configuration."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Choice = Literal['keep', 'recompute']


def save(x: Any, name: str) -> Any:
    """Names a value so that a policy can choose what becomes of it between the forward and the backward pass."""
    return checkpoint_name(x, name)


def recompute_by_name(function: Callable[..., Any], choices: Mapping[str, Choice] | None) -> Callable[..., Any]:
    """`function` with only the values named 'keep' held for its backward pass; all others are computed again.

    Args:
        function: what to differentiate, such as one layer.
        choices: 'keep' or 'recompute' for each name; None keeps everything, and nothing is computed twice.
    """
    if choices is None:
        return function
    return jax.checkpoint(function, policy=keep_by_name(choices))


def keep_by_name(choices: Mapping[str, Choice]) -> Callable[..., bool]:
    """The policy of `jax.checkpoint` that keeps the values named 'keep'."""
    kept = [name for name, choice in choices.items() if choice == 'keep']
    return jax.checkpoint_policies.save_only_these_names(*kept)
