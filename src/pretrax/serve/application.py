"""The application: its routes, access, and errors as JSON."""

from collections.abc import Collection, Sequence
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pretrax.page_kit.served import page_files
from pretrax.serve import completions, embeddings
from pretrax.serve.access import Keys, admit
from pretrax.serve.bodies import DetokenizeBody, TokenizeBody
from pretrax.serve.errors import ApiError
from pretrax.serve.generation import OUTCOME
from pretrax.serve.limits import Rate
from pretrax.serve.service import ServedModel, Service, service_of

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
        '/v1/chat/completions': completions.chat_completions,
        '/v1/embeddings': embeddings.embeddings,
        '/tokenize': tokenize,
        '/detokenize': detokenize,
    }
    gets = {
        '/v1/models': models,
        '/v1/models/{name:path}': model,
        '/tokenizer_info': tokenizer_info,
        '/health': health,
        '/ready': ready,
        '/metrics': metrics,
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


async def models(http: Any) -> Response:
    return JSONResponse({'object': 'list', 'data': [_about(model) for model in service_of(http).models.values()]})


async def model(http: Any) -> Response:
    return JSONResponse(_about(service_of(http).model(http.path_params['name'])))


def _about(model: ServedModel) -> dict[str, Any]:
    return {
        'id': model.name,
        'object': 'model',
        'created': model.created,
        'owned_by': 'pretrax',
        'max_model_len': model.thread.max_length,
        'step': model.step,
        'chat': model.template is not None,
    }


async def health(http: Any) -> Response:
    """200 as long as the engines advance."""
    service = service_of(http)
    _check_engines(service)
    return JSONResponse({'status': 'ok'})


async def ready(http: Any) -> Response:
    """200 as long as new requests are accepted."""
    service = service_of(http)
    if service.draining:
        raise ApiError(503, 'the server is shutting down', code='draining')
    _check_engines(service)
    return JSONResponse({'status': 'ready'})


def _check_engines(service: Service) -> None:
    for one in service.models.values():
        silent = one.thread.silent_for
        if silent == float('inf'):
            raise ApiError(503, f'the engine of {one.name} has failed', code='engine_failed')
        if silent > service.limits.silence:
            raise ApiError(503, f'the engine of {one.name} has not advanced for {silent:.0f} s', code='engine_hangs')


async def metrics(http: Any) -> Response:
    return Response(service_of(http).metrics.text(), headers={'content-type': CONTENT_TYPE_LATEST})


async def tokenize(http: Any) -> Response:
    service = service_of(http)
    body = await service.read(http, TokenizeBody)
    model = service.model(body.model)
    ids = await (completions.chat_prompt(model, body) if body.messages else model.encode(body.content, body))
    return JSONResponse({'tokens': ids, 'count': len(ids), 'max_model_len': model.thread.max_length})


async def detokenize(http: Any) -> Response:
    service = service_of(http)
    body = await service.read(http, DetokenizeBody)
    model = service.model(body.model)
    model.check_tokens(body.tokens, 'tokens')
    text = await model.in_thread(model.tokenizer.decode, body.tokens)
    return JSONResponse({'text': text, 'prompt': text})  # the second name is vLLM's


async def tokenizer_info(http: Any) -> Response:
    """What clients ask about the tokenizer of the first model, or of `?model=NAME`."""
    model = service_of(http).model(http.query_params.get('model'))
    end, template = model.tokenizer.end_of_text, model.template
    names = {token: name for name, token in model.tokenizer.special_tokens.items()}
    begin = model.tokenizer.begin_of_text[-1:]
    about = {'bos_token': names.get(begin[0]) if begin else None, 'eos_token': names.get(-1 if end is None else end)}
    return JSONResponse(about if template is None else about | {'chat_template': template.source})
