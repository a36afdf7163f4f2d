"""What the server says about itself: `/v1/models`, `/health`, `/ready`, `/metrics`."""

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from pretrax.serve.errors import ApiError
from pretrax.serve.service import ServedModel, Service, service_of


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
