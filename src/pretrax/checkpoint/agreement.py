"""Agreement between processes through JAX's coordination service, from any thread and without the devices.

Process 0 decides. Each process makes a few requests for an exchange, however many processes there are: the coordinator
counts those that have come, and process 0 reads all their texts with one request. Keys are deleted when all processes
have read them, since the coordinator keeps the others in memory for as long as it lives.
"""

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pretrax.checkpoint.manifest import DamagedError
from pretrax.errors import UnavailableError, UserError
from pretrax.jax_compat import coordination_client

_A_DAY = 24 * 3600 * 1000  # milliseconds. If a process dies, JAX's heartbeat ends the others long before.

_exchanges: defaultdict[str, itertools.count] = defaultdict(itertools.count)
_broadcasts: defaultdict[str, list[str]] = defaultdict(list)  # keys that other processes may still have to read


def agree(about: str, problem: str) -> str:
    """Returns the first problem that any process reports, or ''. All processes must call this in the same order.

    Args:
        about: topic of the exchange. Exchanges on different topics may happen in any order.
        problem: the problem of this process, or ''.
    """
    return broadcast(about, first_problem(gather(about, problem)))


def first_problem(texts: Sequence[str]) -> str:
    """The first problem among the texts of all processes, with the process that has it, or ''."""
    return next((f'{text} (process {i})' if i else text for i, text in enumerate(texts) if text), '')


def gather(about: str, text: str) -> list[str]:
    """Gathers the texts of all processes in process 0. Returns [] in the other processes."""
    if jax.process_count() == 1:
        return [text]
    client, key = coordination_client(), f'pretrax/{about}/{next(_exchanges[about])}'
    if text:
        client.key_value_set(f'{key}/texts/{jax.process_index()}', text)
    if client.key_value_increment(f'{key}/count', 1) == jax.process_count():
        client.key_value_set(f'{key}/complete', 'yes')
    if jax.process_index() != 0:
        return []
    client.blocking_key_value_get(f'{key}/complete', _A_DAY)
    texts = [''] * jax.process_count()
    for name, found in client.key_value_dir_get(f'{key}/texts/'):
        texts[int(name.rpartition('/')[2])] = found
    client.key_value_delete(key)  # with all keys below it
    while _broadcasts[about]:  # all processes have read them before they took part in this exchange
        client.key_value_delete(_broadcasts[about].pop())
    return texts


def broadcast(about: str, text: str) -> str:
    """Returns the text of process 0 in every process."""
    if jax.process_count() == 1:
        return text
    client, key = coordination_client(), f'pretrax/{about}/{next(_exchanges[about])}'
    if jax.process_index() == 0:
        client.key_value_set(key, text)
        _broadcasts[about].append(key)
        return text
    return client.blocking_key_value_get(key, _A_DAY)


def decide(about: str, own: Any, decision: Callable[[list[Any]], Any]) -> Any:
    """Returns, in all processes, the JSON value that `decision` returns in process 0 for the values of all processes.

    Args:
        own: the JSON value of this process.
    """
    texts = gather(about, json.dumps(own))
    return json.loads(broadcast(about, json.dumps(decision([json.loads(text) for text in texts])) if texts else ''))


def from_process_0(
    about: str, work: Callable[[], Any], kinds: Sequence[type[Exception]] = (DamagedError, UnavailableError)
) -> Any:
    """Returns, in all processes, what `work` returns in process 0: a JSON value. The others do no work.

    Raises:
        Exception: in process 0, what `work` raises; in the others, an error of the same kind if it is one of `kinds`,
            otherwise a UserError.
    """
    # Only a process that has joined others asks for their number: the question starts JAX's backend.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return work()
    if jax.process_index() != 0:
        answer = json.loads(broadcast(about, ''))
        if 'error' in answer:
            raise _read_error(answer['error'], kinds)
        return answer['value']
    try:
        value = work()
    except Exception as error:
        broadcast(about, json.dumps({'error': _written(error, kinds)}))
        raise
    broadcast(about, json.dumps({'value': value}))
    return value


@contextlib.contextmanager
def together(about: str, *kinds: type[Exception]) -> Iterator[None]:
    """If the block raises an error of some kinds in any process, raises the first such error in all of them."""
    problem, own = '', None
    try:
        yield
    except kinds as error:
        problem, own = _written(error, kinds), error
    if problem := agree(about, problem):
        raise _read_error(problem, kinds) from own


def _written(error: Exception, kinds: Sequence[type[Exception]]) -> str:
    """An error as text: the first of the kinds that it belongs to, and its message."""
    return f'{next((kind.__name__ for kind in kinds if isinstance(error, kind)), "UserError")}: {error}'


def _read_error(text: str, kinds: Sequence[type[Exception]]) -> Exception:
    """The error that a process has written."""
    name, _, message = text.partition(': ')
    return {kind.__name__: kind for kind in kinds}.get(name, UserError)(message)


def scatter(about: str, texts: Sequence[str]) -> str:
    """Returns in each process its own of the texts, which process 0 gives in the order of the processes."""
    if jax.process_count() == 1:
        return texts[0]
    client, key = coordination_client(), f'pretrax/{about}/{next(_exchanges[about])}'
    for i, text in enumerate(texts if jax.process_index() == 0 else ()):
        client.key_value_set(f'{key}/{i}', text)
    text = client.blocking_key_value_get(f'{key}/{jax.process_index()}', _A_DAY)
    client.key_value_delete(f'{key}/{jax.process_index()}')
    return text


def offer(about: str, text: str) -> Callable[[], str]:
    """Returns, in every process, a function that reads the text of process 0. The coordinator keeps it to its end."""
    if jax.process_count() == 1:
        return lambda: text
    client, key = coordination_client(), f'pretrax/{about}/{next(_exchanges[about])}'
    if jax.process_index() == 0:
        client.key_value_set(key, text)
    return lambda: client.blocking_key_value_get(key, _A_DAY)
