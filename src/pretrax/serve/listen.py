"""Listens on a port until it is asked to stop."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from pretrax.errors import Report, UserError
from pretrax.serve.connections import ConnectionLimits, Connections, limits_for

if TYPE_CHECKING:
    from pretrax.serve.service import Service

_FLUSH = 3  # seconds for clients to read the ends of their answers
_COPIES = 1.0  # seconds; `uv run` and `timeout` forward a signal that the whole process group has received


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address, which does not listen yet: before a model is loaded, a port in use is an error.

    Raises:
        UserError: the port is in use, or the host is not of this machine.
    """
    with contextlib.ExitStack() as stack:
        try:
            try:
                family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            except (OSError, UnicodeError):
                raise UserError(f'--host {host}: no such name or address') from None
            opened = stack.enter_context(socket.socket(family, kind, protocol))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except OSError as error:
            reason = f'--host {host} --port {port}: {error.strerror}'
            raise UserError(f'{reason}\n  choose another port; 0 takes any that is free') from None
        stack.pop_all()
        return opened


class _Server(uvicorn.Server):
    """A server that leaves signals to `serve`, and reports when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]):
        super().__init__(config)
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()


async def serve(
    application: ASGIApp,
    service: 'Service',
    opened: socket.socket,
    report: Report,
    stop: asyncio.Event | None = None,
    listening: Callable[[], None] = lambda: None,
    limits: ConnectionLimits | None = None,
) -> None:
    """Serves models until it is asked to stop; then running requests finish, and new ones get 503.

    Args:
        stop: asks to stop. None: SIGTERM and SIGINT do; another one, more than a second later, ends the process at
            once.
        limits: limits of connections; None: those for what the models can run and queue.
    """
    requests = sum(model.admission.capacity for model in service.models.values())
    limits = limits or limits_for(requests)
    if limits.total < requests:
        report(f'at most {limits.total} connections, because the process may open few files: ulimit -n raises it')

    async def drain() -> None:
        service.draining = True
        while service.running:
            await asyncio.sleep(0.02)

    for model in service.models.values():
        model.thread.start()
    stop = stop or signalled(lambda: service.running, report)
    connections = Connections(limits, service.metrics.refusals)
    await listen(application, opened, stop, drain, listening, connections, report=report)
    for model in service.models.values():
        await model.thread.stop()


async def listen(
    application: ASGIApp,
    opened: socket.socket,
    stop: asyncio.Event,
    drain: Callable[[], Awaitable[None]],
    listening: Callable[[], None],
    connections: Connections,
    report: Report,
) -> None:
    """Serves an application until `stop` is set and `drain`, which is called then, has ended."""
    limits = connections.limits
    config = uvicorn.Config(
        application,
        http=connections,  # type: ignore[arg-type]  # uvicorn calls it as it calls a class
        h11_max_incomplete_event_size=limits.head_bytes,
        proxy_headers=bool(limits.proxies),
        forwarded_allow_ips=[*limits.proxies],
        log_level='error',  # requests that are not HTTP are counted
        log_config=None,
        access_log=False,
        lifespan='off',
        ws='none',
        server_header=False,
        timeout_graceful_shutdown=_FLUSH,
    )
    server = _Server(config, listening)
    task = asyncio.create_task(server.serve([opened]))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    await drain()
    server.should_exit = True
    stopped.cancel()
    await task
    if counts := connections.refusals.summary():
        report(f'refused: {counts}')


def signalled(running: Callable[[], int], report: Report) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; a later one ends the process.

    Args:
        running: the number of requests that a stop waits for.
    """
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    first: float | None = None

    def handle(number: int) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            event.set()
            if count := running():
                report(f'stopping after {count} running requests; signal again to stop at once')
        elif now - first > _COPIES:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return event
