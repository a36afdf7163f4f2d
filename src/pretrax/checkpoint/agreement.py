"""Agreement between processes through JAX's coordination service, from any thread and without the devices.

Process 0 decides, so that an exchange among n processes takes O(n) requests. Keys are deleted when all processes have
read them, since the coordinator keeps the others in memory for as long as it lives.
"""

import itertools
from collections import defaultdict

import jax

from pretrax.jax_compat import coordination_client

_A_DAY = 24 * 3600 * 1000  # milliseconds. If a process dies, JAX's heartbeat ends the others long before.
_MARK = '='  # prefix of every value, since the store refuses empty values

_exchanges: defaultdict[str, itertools.count] = defaultdict(itertools.count)
_broadcasts: defaultdict[str, list[str]] = defaultdict(list)  # keys that other processes may still have to read


def agree(about: str, problem: str) -> str:
    """Returns the first problem that any process reports, or ''. All processes must call this in the same order.

    Args:
        about: topic of the exchange. Exchanges on different topics may happen in any order.
        problem: the problem of this process, or ''.
    """
    if jax.process_count() == 1:
        return problem
    texts = gather(about, problem)
    problems = [f'{text} (process {i})' if i else text for i, text in enumerate(texts) if text]
    return broadcast(about, problems[0] if problems else '')


def gather(about: str, text: str) -> list[str]:
    """Gathers the texts of all processes in process 0. Returns [] in the other processes."""
    if jax.process_count() == 1:
        return [text]
    client, key = coordination_client(), f'pretrax/{about}/{next(_exchanges[about])}'
    client.key_value_set(f'{key}/{jax.process_index()}', _MARK + text)
    if jax.process_index() != 0:
        return []
    texts = []
    for i in range(jax.process_count()):
        texts.append(client.blocking_key_value_get(f'{key}/{i}', _A_DAY)[1:])
        client.key_value_delete(f'{key}/{i}')
    while _broadcasts[about]:  # all processes have read them before they took part in this exchange
        client.key_value_delete(_broadcasts[about].pop())
    return texts


def broadcast(about: str, text: str) -> str:
    """Returns the text of process 0 in every process."""
    if jax.process_count() == 1:
        return text
    client, key = coordination_client(), f'pretrax/{about}/{next(_exchanges[about])}'
    if jax.process_index() == 0:
        client.key_value_set(key, _MARK + text)
        _broadcasts[about].append(key)
        return text
    return client.blocking_key_value_get(key, _A_DAY)[1:]
