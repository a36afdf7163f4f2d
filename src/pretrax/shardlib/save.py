"""Activation memory by name: `save(x, 'q')` in the model names a value; a policy keeps, recomputes or offloads it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Choice = Literal['keep', 'recompute', 'offload']  # offload: keep in host memory


def save(x: Any, name: str) -> Any:
    """Names a value, so that a policy can keep, recompute or offload it for the backward pass."""
    return checkpoint_name(x, name)


def recompute_by_name(function: Callable[..., Any], choices: Mapping[str, Choice] | None) -> Callable[..., Any]:
    """Rematerializes `function` in the backward pass, except for the values named 'keep' or 'offload'.

    Args:
        function: the function to differentiate, such as one layer.
        choices: 'keep', 'recompute' or 'offload' for each name; None keeps everything and recomputes nothing.
    """
    if choices is None:
        return function
    return jax.checkpoint(function, policy=keep_by_name(choices))


def keep_by_name(choices: Mapping[str, Choice]) -> Callable[..., Any]:
    """The `jax.checkpoint` policy for these choices."""
    kept = [name for name, choice in choices.items() if choice == 'keep']
    offloaded = [name for name, choice in choices.items() if choice == 'offload']
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept,
        names_which_can_be_offloaded=offloaded,
        offload_src='device',
        offload_dst='pinned_host',
    )
