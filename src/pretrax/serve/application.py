"""The application: routes, access, and errors as JSON."""

from collections.abc import Collection, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pretrax.page_kit.served import page_files
from pretrax.serve import chat, completions, embeddings, status, tokens
from pretrax.serve.access import Keys, admit
from pretrax.serve.errors import ApiError
from pretrax.serve.generation import OUTCOME
from pretrax.serve.limits import Rate
from pretrax.serve.service import Service

_OPEN = ('/health', '/ready')  # without a key


def make_application(
    service: Service, *, keys: Keys | None = None, local: bool = True, origins: Sequence[str] = ()
) -> ASGIApp:
    """The ASGI application of a service.

    Args:
        local: without keys, whether only names of this machine are accepted, and no pages of others.
        origins: whose pages may use the server, and which servers its own page may use: `http://127.0.0.1:8001`.
    """
    posts = {
        '/v1/completions': completions.completions,
        '/v1/chat/completions': chat.chat_completions,
        '/v1/embeddings': embeddings.embeddings,
        '/tokenize': tokens.tokenize,
        '/detokenize': tokens.detokenize,
    }
    gets = {
        '/v1/models': status.models,
        '/v1/models/{name:path}': status.model,
        '/tokenizer_info': tokens.tokenizer_info,
        '/health': status.health,
        '/ready': status.ready,
        '/metrics': status.metrics,
    }
    page = page_files(resources.files('pretrax.serve') / 'page', f"connect-src 'self' {' '.join(origins)}")
    routes = [Route(path, endpoint, methods=['POST']) for path, endpoint in posts.items()]
    routes += [Route(path, endpoint, methods=['GET']) for path, endpoint in (gets | page).items()]
    handlers: Any = {ApiError: _error, HTTPException: _error, Exception: _error}
    application = Starlette(routes=routes, exception_handlers=handlers)
    application.router.redirect_slashes = False  # to a host that the request names
    application.state.service = service
    gate = _Gate(application, service, keys, origins if local and keys is None else None, posts.keys(), {*_OPEN, *page})
    if not origins:
        return gate
    return CORSMiddleware(
        gate, allow_origins=origins, allow_methods=['GET', 'POST'], allow_headers=['authorization', 'content-type']
    )


class _Gate:
    """Lets requests in that may come in, and counts them.

    Args:
        origins: None: requests are accepted from any page, under any name of the server.
        work: paths whose requests are counted and limited.
    """

    def __init__(
        self,
        application: ASGIApp,
        service: Service,
        keys: Keys | None,
        origins: Sequence[str] | None,
        work: Collection[str],
        free: Collection[str],
    ):
        self._application, self._service, self._keys, self._origins = application, service, keys, origins
        self._work, self._free = work, free
        self._rate = None if service.limits.rate is None else Rate(service.limits.rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] != 'http':
            await self._application(scope, receive, send)
            return
        path, work = scope['path'], scope['path'] in self._work
        code = 0

        async def observed(message: Message) -> None:
            nonlocal code
            if message['type'] == 'http.response.start':
                code = message['status']
            await send(message)

        self._service.running += work
        try:
            await self._check(scope, work)
            await self._application(scope, receive, observed)
        except ApiError as error:
            await error.response()(scope, receive, observed)
        finally:
            self._service.running -= work
            if work:
                self._service.metrics.requests.labels(path, scope.get(OUTCOME) or str(code)).inc()

    async def _check(self, scope: Scope, work: bool) -> None:
        client = await admit(scope, self._keys, self._origins, self._free, self._service.metrics.refusals)
        if work and self._service.draining:
            advice = {'retry-after': '5', 'connection': 'close'}
            raise ApiError(503, 'the server is shutting down', code='draining', headers=advice)
        if work and self._rate is not None:
            self._rate.check(client)


async def _error(http: Any, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    if not isinstance(error, HTTPException):
        return ApiError(500, 'the server made a mistake; its log has the details', code='internal_error').response()
    method, path = http.method, http.scope['path']  # http.url may be none, with the header `Host` in it
    message = {404: f'{path}: there is no such page', 405: f'{path} does not take {method}'}.get(
        error.status_code, error.detail
    )
    return ApiError(error.status_code, message, headers=error.headers).response()
