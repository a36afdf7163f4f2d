"""Which weights decay: `optimizer.weight_decay` and `optimizer.no_decay`."""

import fnmatch
from typing import Any

import jax

from pretrax.errors import UserError


def decay_by_weight(weights: Any, weight_decay: float, no_decay: tuple[str, ...]) -> Any:
    """The decay of each weight: 0 for those whose name matches a pattern, such as '*norm*', `weight_decay` for the rest.

    Raises:
        UserError: a pattern matches no weight.
    """
    named = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator='.'), weights
    )
    names = jax.tree.leaves(named)
    for pattern in no_decay:
        if not any(fnmatch.fnmatch(name, pattern) for name in names) and pattern not in DEFAULT_NO_DECAY:
            raise UserError(f"optimizer.no_decay: '{pattern}' matches no weight\nthe weights are: {', '.join(names)}")
    return jax.tree.map(lambda name: 0.0 if any(fnmatch.fnmatch(name, p) for p in no_decay) else weight_decay, named)


DEFAULT_NO_DECAY = ('*norm*', '*bias')
