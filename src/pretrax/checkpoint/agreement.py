"""Several processes come to one answer, in any thread and without their devices, through JAX's coordination service."""

import itertools
from collections import defaultdict
from typing import Any

import jax
from jax._src import distributed  # JAX has no public way to its key-value store

_A_DAY = 24 * 3600 * 1000  # milliseconds. A process that dies ends the others by JAX's heartbeat, long before.
_MARK = '='  # begins every value: the store takes no empty ones

_meetings: defaultdict[str, itertools.count] = defaultdict(itertools.count)


def agree(about: str, problem: str) -> str:
    """The first problem that a process has, '' where none has one. All processes call this, each time in the same order.

    Args:
        about: what it is about; meetings about different things may be held in any order.
        problem: that of this process, or ''.
    """
    if jax.process_count() == 1:
        return problem
    told = gather(about, problem)
    problems = [f'{text} (process {i})' if i else text for i, text in enumerate(told) if text]
    return tell(about, problems[0] if problems else '')


def gather(about: str, text: str) -> list[str]:
    """What each process says; [] in all but the first."""
    if jax.process_count() == 1:
        return [text]
    client, key = _client(), f'pretrax/{about}/{next(_meetings[about])}'
    client.key_value_set(f'{key}/{jax.process_index()}', _MARK + text)
    if jax.process_index() != 0:
        return []
    return [client.blocking_key_value_get(f'{key}/{i}', _A_DAY)[1:] for i in range(jax.process_count())]


def tell(about: str, text: str) -> str:
    """What the first process says."""
    if jax.process_count() == 1:
        return text
    client, key = _client(), f'pretrax/{about}/{next(_meetings[about])}'
    if jax.process_index() == 0:
        client.key_value_set(key, _MARK + text)
    return client.blocking_key_value_get(key, _A_DAY)[1:]


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None
    return client
