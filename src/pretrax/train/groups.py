"""The learning rate and weight decay of each weight, and which weights are frozen (`optimizer.groups`, `freeze`,
`no_decay`).

Patterns are globs over the names of weights, such as 'layers.q*'. 'layers[:6].*' means only the first six layers, and
'layers[-1].norm*' the last one.
"""

import difflib
import fnmatch
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.model.base import Model
from pretrax.model.mup import Scaling
from pretrax.model.weights import BUFFERS, MATRICES, layers_with

if TYPE_CHECKING:
    from pretrax.train.step import Recipe

DEFAULT_NO_DECAY = ('*norm*', '*bias')
# Of layers with a state: these do not decay either, as in the code of Mamba 2, unless a group has a decay for them
_STATES = ('*.linear_dt_bias', '*.linear_log_decay', '*.linear_skip')
_STACKED = 'layers.'  # how the names of weights begin whose first dimension counts layers
_OF_SOME_LAYERS = re.compile(r'layers\[(?:(-?\d+)|(-?\d+)?:(-?\d+)?)\]\.(.+)')


class Group(NamedTuple):
    """Weights with a learning rate or a decay of their own."""

    match: tuple[str, ...]  # patterns
    learning_rate_scale: float = 1.0  # multiplies the learning rate; 0: frozen
    weight_decay: float | None = None  # None: that of the other weights
    key: str = 'optimizer.groups'  # of the configuration, for messages


class Setting(NamedTuple):
    """How a weight is trained. Arrays are [layers, 1, ...], of a weight whose layers differ."""

    scale: float | np.ndarray  # multiplies the learning rate
    decay: float | np.ndarray
    moves: bool | np.ndarray = True  # whether `Model.adjust` may move it
    cautious: bool = False  # it decays only where the step shrinks it too

    @property
    def is_frozen(self) -> bool:
        """Whether the whole weight keeps its values. It then has no optimizer state."""
        return not np.any(self.scale)


def settings_of(recipe: 'Recipe', weights: optax.Params) -> Any:
    """The `Setting` of each weight. Raises UserError if a pattern matches no weight, or all weights are frozen."""
    arch = recipe.model.arch
    settings = weight_settings(weights, recipe.weight_decay, recipe.no_decay, recipe.groups, arch=arch)
    settings = jax.tree.map(lambda one: one._replace(cautious=recipe.cautious_decay), settings, is_leaf=_is_setting)
    return settings if arch is None or arch.mup is None else _scaled(settings, arch.mup, recipe.width_power)


def weight_settings(
    weights: optax.Params,
    weight_decay: float,
    no_decay: Sequence[str] = (),
    groups: Sequence[Group] = (),
    *,
    arch: Architecture | None,
) -> Any:
    """The setting of each weight: that of the first group with a pattern that matches it.

    No gradient moves the weights `BUFFERS`, and `Model.adjust` only those that no group freezes. If the group has no
    decay, a weight decays by `weight_decay`, or not at all if a pattern of `no_decay` matches it. `arch` is that of a
    decoder, whose weights `layers.*` are stacked; None: no weight is stacked.

    Raises:
        UserError: a pattern matches no weight, or all weights are frozen.
    """
    names = {_name(path): w for path, w in jax.tree_util.tree_leaves_with_path(weights)}
    rows = {name: _rows(name, w, arch) for name, w in names.items()}
    n_layers = max((max(numbers) + 1 for numbers in rows.values()), default=1)
    for key, patterns in [('optimizer.no_decay', no_decay), *((group.key, group.match) for group in groups)]:
        for pattern in patterns:
            if arch is None and _OF_SOME_LAYERS.fullmatch(pattern):
                raise UserError(
                    f"{key}: '{pattern}' chooses layers of a stacked weight, but no weight of this model is stacked\n"
                    'use the names that pretrax checkpoint inspect prints, such as layers.0.*'
                )
            matched = any(_matches([pattern], name, rows[name], n_layers).any() for name in names)
            if not matched and not (key == 'optimizer.no_decay' and pattern in DEFAULT_NO_DECAY):
                raise _no_match(key, pattern, list(names), n_layers)

    def setting(path: Any, w: Any) -> Setting:
        name = _name(path)
        scale = np.ones(len(rows[name]))
        usual = np.where(_matches((*no_decay, *_STATES), name, rows[name], n_layers), 0.0, weight_decay)
        decay = usual.copy()
        for group in reversed(groups):  # the first one wins
            here = _matches(group.match, name, rows[name], n_layers)
            scale[here] = group.learning_rate_scale
            decay[here] = usual[here] if group.weight_decay is None else group.weight_decay
        moves = _row_values(scale, w) != 0
        return (
            Setting(0.0, 0.0, moves)
            if name in BUFFERS
            else Setting(_row_values(scale, w), _row_values(decay, w), moves)
        )

    settings = jax.tree_util.tree_map_with_path(setting, weights)
    if all(one.is_frozen for one in jax.tree.leaves(settings, is_leaf=_is_setting)):
        raise UserError('optimizer.freeze: every weight is frozen, so there is nothing to train')
    return settings


def _scaled(settings: Any, mup: Scaling, width_power: float) -> Any:
    """The settings of a model that is wider or deeper than the base model of muP."""

    def part(path: Any, setting: Setting) -> Setting:
        name = _name(path)
        factor = mup.rate(name, name.rpartition('.')[2] in MATRICES, width_power)
        decay = setting.decay / factor if mup.independent_decay else setting.decay
        return setting._replace(scale=setting.scale * factor, decay=decay)

    return jax.tree_util.tree_map_with_path(part, settings, is_leaf=_is_setting)


def trained(tree: Any, settings: Any) -> Any:
    """A gradient or weights without the frozen weights, which are None. Layers that are frozen are zero."""

    def part(x: jax.Array, setting: Setting) -> jax.Array | None:
        if setting.is_frozen:
            return None
        return x if np.all(setting.scale) else jnp.where(setting.scale, x, 0)

    return jax.tree.map(part, tree, settings)


def without_frozen(weights: Any, settings: Any) -> Any:
    """Weights without the frozen ones, which are None. Layers that are frozen stay as they are."""
    return jax.tree.map(lambda w, setting: None if setting.is_frozen else w, weights, settings)


def stop_frozen(weights: Any, settings: Any) -> Any:
    """Returns the weights. The backward pass does not compute the gradients of frozen weights: they are zero."""
    return jax.tree.map(lambda w, one: jax.lax.stop_gradient(w) if one.is_frozen else w, weights, settings)


def move(
    w: jax.Array, direction: jax.Array | None, rate: jax.Array, setting: Setting, decaying: jax.Array | None = None
) -> jax.Array:
    """A weight after a step against `direction`, with decoupled decay. Loshchilov and Hutter 2019, arXiv:1711.05101.

    `decaying` is what the decay is in proportion to, if not the weight itself. Cautious decay: Chen et al. 2025,
    arXiv:2510.12402.
    """
    if direction is None:
        return w
    decaying = w if decaying is None else decaying
    decay = setting.decay * decaying
    if setting.cautious:
        decay = jnp.where(direction * decaying >= 0, decay, 0)
    return w - rate * setting.scale * (direction + decay)


def adjusted(model: Model, weights: Any, tables: dict[str, Any], settings: Any) -> Any:
    """The weights after `Model.adjust`. What is frozen keeps its values."""

    def part(new: jax.Array, old: jax.Array, setting: Setting) -> jax.Array:
        return new if np.all(setting.moves) else jnp.where(setting.moves, new, old)

    return jax.tree.map(part, model.adjust(weights, tables), weights, settings)


def _is_setting(x: Any) -> bool:
    return isinstance(x, Setting)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='.')


def _rows(name: str, w: Any, arch: Architecture | None) -> Sequence[int]:
    """The numbers of the layers that a weight has along its first dimension; one number if it is not stacked."""
    if arch is None or not name.startswith(_STACKED):
        return (0,)
    return layers_with(arch, name.removeprefix(_STACKED))


def _matches(patterns: Sequence[str], name: str, rows: Sequence[int], n_layers: int) -> np.ndarray:
    """For each layer in `rows`, whether one of the patterns matches the weight in that layer. bool[rows]."""
    found = np.zeros(len(rows), bool)
    for pattern in patterns:
        of_layers = _OF_SOME_LAYERS.fullmatch(pattern)
        if of_layers is None:
            found |= fnmatch.fnmatchcase(name, pattern)
        elif name.startswith(_STACKED) and fnmatch.fnmatchcase(name, _STACKED + of_layers[4]):
            one, first, last = (None if number is None else int(number) for number in of_layers.groups()[:3])
            chosen = slice(first, last) if one is None else slice(one, one + 1 or None)
            found |= np.isin(rows, range(n_layers)[chosen])
    return found


def _row_values(values: np.ndarray, w: Any) -> float | np.ndarray:
    """A number if all layers have the same one; else an array that broadcasts to the weight."""
    same = bool(np.all(values == values[0]))
    return float(values[0]) if same else values.astype(np.float32).reshape(-1, *(1,) * (w.ndim - 1))


def _no_match(key: str, pattern: str, names: list[str], n_layers: int) -> UserError:
    near = difflib.get_close_matches(_OF_SOME_LAYERS.sub(rf'{_STACKED}\4', pattern), names, n=3, cutoff=0.5)
    similar = f'; did you mean {" or ".join(near)}?' if near else ''
    layers = f', in layers 0 to {n_layers - 1}' if '[' in pattern else ''
    return UserError(f"{key}: '{pattern}' matches no weight{similar}\nthe weights are: {', '.join(names)}{layers}")
