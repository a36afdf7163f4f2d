"""Weight decay by weight: `optimizer.weight_decay`, except for the names in `optimizer.no_decay`."""

import fnmatch

import jax
import optax

from pretrax.errors import UserError


def decay_by_weight(weights: optax.Params, weight_decay: float, no_decay: tuple[str, ...]) -> optax.Params:
    """The decay of each weight: 0 if its name matches a pattern such as '*norm*', else `weight_decay`.

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
