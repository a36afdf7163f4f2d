"""The live page: a server that follows runs and sends what is new to browsers, as server-sent events."""

import asyncio
import contextlib
import functools
import getpass
import gzip
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pretrax.errors import Report
from pretrax.page_kit.served import page_files
from pretrax.serve.access import Keys, admit
from pretrax.serve.connections import Connections, limits_for
from pretrax.serve.errors import ApiError, busy
from pretrax.serve.limits import Refusals
from pretrax.serve.listen import listen, signalled
from pretrax.storage import BucketPath
from pretrax.view.charts.page import compressed_plotly
from pretrax.view.live.feed import Feed
from pretrax.view.live.prometheus import Gauges
from pretrax.view.live.run import WatchedRun
from pretrax.view.live.runs import Places

EVERY = 0.5  # seconds between looks at a file on a disk
_POLICY = "connect-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"  # Plotly sets styles
_EVERY_IN_BUCKET, _EVERY_IDLE = 2.0, 10.0  # seconds between requests; the second one after a minute without news
_RUNS_EVERY, _RUNS_EVERY_IN_BUCKET = 1.5, 60.0  # seconds between searches for new runs
_STREAMS = 64  # at most


class Watch:
    """Follows runs and publishes what is new in them."""

    def __init__(self, places: Places, feed: Feed):
        self._places, self._feed = places, feed
        self._pool = ThreadPoolExecutor(32, 'watch')  # a bucket that does not answer blocks only its own runs

    async def run(self) -> None:
        """Follows until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._find(tasks)
                    await asyncio.sleep(_RUNS_EVERY_IN_BUCKET if self._places.is_remote else _RUNS_EVERY)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _find(self, tasks: asyncio.TaskGroup) -> None:
        try:
            found, dropped = await self._in_thread(self._places.look)
        except OSError as error:
            self._feed.about(problem=f'{error.filename}: {error.strerror}')
            return
        for run in dropped:
            del self._feed.runs[run.id]
        self._feed.runs |= {run.id: run for run in found}
        ids = tuple(self._feed.runs)
        self._feed.about(ids=ids, hidden=self._places.hidden, problem='', where=str(self._places))
        for run in found:
            tasks.create_task(self._follow(run))

    async def _follow(self, run: WatchedRun) -> None:
        idle = 0.0
        while self._feed.runs.get(run.id) is run:
            events = await self._in_thread(run.poll)
            if self._feed.runs.get(run.id) is run:
                self._feed.publish_of_run(events)
            if run.more:
                continue
            idle = 0.0 if events else idle + 1
            pause = EVERY
            if isinstance(run.path, BucketPath):
                pause = _EVERY_IN_BUCKET if idle * _EVERY_IN_BUCKET < 60 else _EVERY_IDLE
            await asyncio.sleep(pause)

    async def _in_thread[T](self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


def make_application(feed: Feed, refusals: Refusals, *, keys: Keys | None = None, local: bool = True) -> ASGIApp:
    """The ASGI application of the page. `local`: without keys, whether only names of this machine are accepted."""
    folder = resources.files('pretrax.view') / 'live' / 'page'
    page = page_files(folder, _POLICY) | {'/plotly.js': _plotly}
    routes = [Route(path, endpoint, methods=['GET']) for path, endpoint in page.items()]
    routes.append(Route('/events', functools.partial(_events, feed), methods=['GET']))
    gauges = Gauges(lambda: list(feed.runs.values()))
    routes.append(Route('/metrics', lambda request: Response(gauges.text(), media_type='text/plain'), methods=['GET']))
    application = Starlette(routes=routes)
    application.router.redirect_slashes = False  # to a host that the request names

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await admit(scope, keys, () if local and keys is None else None, page.keys(), refusals)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await application(scope, receive, send)

    return gate


async def _events(feed: Feed, request: Request) -> Response:
    if feed.readers >= _STREAMS:
        return busy(f'{_STREAMS} pages are open already', 10, 'too_many_pages').response()
    stream = feed.stream(request.headers.get('last-event-id', ''))
    headers = {'cache-control': 'no-store', 'x-accel-buffering': 'no', 'x-content-type-options': 'nosniff'}
    return StreamingResponse(stream, media_type='text/event-stream', headers=headers)


async def _plotly(request: Request) -> Response:
    headers = {'cache-control': 'max-age=3600', 'vary': 'accept-encoding', 'x-content-type-options': 'nosniff'}
    content = await asyncio.to_thread(compressed_plotly)
    if 'gzip' not in request.headers.get('accept-encoding', ''):
        return Response(gzip.decompress(content), headers=headers, media_type='text/javascript')
    return Response(content, headers=headers | {'content-encoding': 'gzip'}, media_type='text/javascript')


async def watch_in_browser(
    places: Places,
    opened: socket.socket,
    *,
    keys: Keys | None,
    local: bool,
    report: Report,
    listening: Callable[[], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serves the page until SIGTERM or SIGINT, or until `stop` is set."""
    feed, refusals = Feed(), Refusals(report)
    following = asyncio.create_task(Watch(places, feed).run())

    async def end() -> None:
        feed.close()

    stop = stop or signalled(lambda: 0, report)
    following.add_done_callback(lambda _: stop.set())  # it fails, or is cancelled below
    application = make_application(feed, refusals, keys=keys, local=local)
    connections = Connections(limits_for(_STREAMS), refusals)
    await listen(application, opened, stop, end, listening, connections, report=report)
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following


def address(host: str, port: int, local: bool) -> str:
    """What a user needs to open the page, from this machine or through ssh."""
    url = f'http://{f"[{host}]" if ":" in host else host}:{port}/'
    if not local:
        return f'watching: {url}'
    try:
        user = f'{getpass.getuser()}@'
    except (KeyError, OSError):  # a container may have no user of this number
        user = ''
    tunnel = f'ssh -L {port}:{"[::1]" if host == "::1" else host}:{port} {user}{socket.gethostname()}'
    return f'watching: {url}\n  from another machine: {tunnel}   then open the same address there'
