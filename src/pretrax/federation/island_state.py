"""The arrays and the few facts that an island keeps besides the state of its training, in checkpoints and in memory.

The arrays are f32, shaped and sharded like the weights, and in the memory of the hosts. The step never sees them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pretrax.config.schema import Federation
from pretrax.federation.encoding import keeps_residual
from pretrax.federation.host_weights import to_devices, to_host
from pretrax.train.host_memory import KIND
from pretrax.train.step import TrainState

FIELD = 'island'  # of a stored state, and of the description of a checkpoint


class IslandState(NamedTuple):
    """Weights by dotted name, in host memory or as arrays of JAX."""

    anchor: Any  # the global weights after the newest round that the island has taken
    momentum: Any  # of the outer optimizer
    residual: Any = None  # what the encoding lost so far; None: it keeps none
    sent: Any = None  # the weights that the island contributed to the round that it has not taken yet; None: no such


@dataclasses.dataclass
class Sent:
    """A contribution to a round that the island has not taken yet. Counts are those after the last step in it.

    Attributes:
        events: how many of the island's events it says.
    """

    step: int
    batch: int
    tokens: int
    loss: float | None
    seconds: float
    events: int = 0


@dataclasses.dataclass
class Position:
    """Where an island is in its federation.

    Attributes:
        round: that it trains for, or whose closing it waits for.
        step: from which the steps until the next contribution count.
        batch, tokens, seconds: at the last contribution, or where the island came in.
        at_end: rounds, one after another up to the newest, whose members had all taken the last step.
        events: since the last contribution, as `federation.objects.Event`.
        took: the newest round that it has taken, as `federation.objects.Taken`.
        sent: the contribution whose round is not taken yet.
        setup: of the process that described it: its configuration and devices.
    """

    round: int = 1
    step: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    at_end: int = 0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    took: dict[str, Any] | None = None
    sent: Sent | None = None
    setup: str = ''

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> 'Position | None':
        """The position in the description of a checkpoint; None if it has none."""
        facts = description.get(FIELD)
        if facts is None:
            return None
        return cls(**facts | {'sent': facts['sent'] and Sent(**facts['sent'])})


def stored_state(state: TrainState, island: IslandState | None) -> Any:
    """A state as checkpoints have it, which is as it is without an island."""
    return state if island is None else {**state._asdict(), FIELD: island}


def split_state(stored: Any) -> tuple[TrainState, IslandState | None]:
    """A state, and what its island keeps."""
    if not isinstance(stored, dict):
        return stored, None
    return TrainState(**{key: value for key, value in stored.items() if key != FIELD}), stored[FIELD]


def like_island(weights: Any, section: Federation, description: Mapping[str, Any]) -> IslandState | None:
    """Shapes, dtypes and shardings of the arrays of an island whose checkpoint has this description; None: no island.

    Args:
        weights: shapes and shardings of the weights.
    """
    if section.bucket is None:
        return None
    like, position = _like(weights), Position.described(description)
    residual = like if keeps_residual(section.encoding) else None
    return IslandState(like, like, residual, like if position is not None and position.sent else None)


def arrays_of(island: IslandState, weights: Any) -> IslandState:
    """The arrays of JAX that a checkpoint takes. `weights`: as for `like_island`."""
    like = _like(weights)
    return IslandState(*(None if field is None else to_devices(field, like) for field in island))


def in_host_memory(island: IslandState) -> IslandState:
    """The restored arrays in the memory of the host."""
    return IslandState(*(None if field is None else to_host(field) for field in island))


def _like(weights: Any) -> Any:
    def in_host(weight: Any) -> jax.ShapeDtypeStruct:
        sharding = weight.sharding
        if next(iter(sharding.device_set)).platform != 'cpu':  # the memory of CPUs is that of the host
            sharding = sharding.with_memory_kind(KIND)
        return jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=sharding)

    return jax.tree.map(in_host, weights)
