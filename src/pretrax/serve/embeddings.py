"""`/v1/embeddings`: one vector for each text, from the hidden states of its tokens after the last norm."""

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from pretrax.infer.request import Request, Update
from pretrax.serve.bodies import EmbeddingBody, listed
from pretrax.serve.errors import ApiError
from pretrax.serve.generation import OUTCOME, DisconnectedError, fingerprint, running, unless_disconnected
from pretrax.serve.service import service_of


async def embeddings(http: Any) -> Response:
    service = service_of(http)
    body = await service.read(http, EmbeddingBody)
    model = service.model(body.model)
    texts, requests = listed(body.input), []
    model.admission.check(len(texts), 'texts', 'input')
    for text in texts:
        await asyncio.sleep(0)  # other clients do not wait for a long list
        ids = await model.tokens(text, 'input', body)
        model.room(ids, 0, 'input')
        requests.append(Request(prompt=ids, max_tokens=0, embedding=body.pooling or model.pooling))

    async def run() -> list[Update]:
        found: dict[int, Update] = {}
        async with running(service, model, requests) as job:
            async for news in job:
                found |= {index: update for index, update in news if update.embedding is not None}
        return [found[index] for index in range(len(requests))]

    try:
        updates = await unless_disconnected(http.receive, run())
    except DisconnectedError:
        http.scope[OUTCOME] = 'aborted'
        return Response(status_code=499)  # which nobody reads
    normalize = model.normalize if body.normalize is None else body.normalize
    vectors = [_shaped(update.embedding, body.dimensions, normalize) for update in updates]
    data = [
        {'object': 'embedding', 'index': index, 'embedding': _written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    steps = sorted({update.weights_step for update in updates if update.weights_step is not None})
    count = sum(len(request.prompt) for request in requests)
    usage = {'prompt_tokens': count, 'total_tokens': count}
    about = {'object': 'list', 'data': data, 'model': model.name, 'system_fingerprint': fingerprint(steps)}
    return JSONResponse(about | {'usage': usage})


def _shaped(vector: Any, dimensions: int | None, normalize: bool) -> np.ndarray:
    """The first dimensions, of length 1 if wanted: Kusupati et al. 2022, arXiv:2205.13147. Raises ApiError."""
    if dimensions is not None and dimensions > len(vector):
        message = f'dimensions: {dimensions}, but the hidden states of this model have {len(vector)}'
        raise ApiError(400, message, param='dimensions', code='invalid_value')
    vector = vector[:dimensions]
    length = np.linalg.norm(vector)
    return vector / length if normalize and length > 0 else vector


def _written(vector: np.ndarray, encoding: str) -> str | list[float]:
    if encoding == 'float':
        return vector.tolist()
    return base64.b64encode(vector.astype('<f4').tobytes()).decode()
