"""`/v1/embeddings`: the hidden states of texts."""

import asyncio
import base64
from typing import Any

from starlette.responses import JSONResponse, Response

from pretrax.infer.request import Request, Update
from pretrax.serve.bodies import EmbeddingBody, listed
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
        ids = await model.tokens(text, 'input')
        model.room(ids, 0, 'input')
        requests.append(Request(prompt=ids, max_tokens=0, embedding=body.pooling))

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
    data = [
        {'object': 'embedding', 'index': index, 'embedding': _written(update.embedding, body.encoding_format)}
        for index, update in enumerate(updates)
    ]
    steps = sorted({update.weights_step for update in updates if update.weights_step is not None})
    count = sum(len(request.prompt) for request in requests)
    return JSONResponse({
        'object': 'list', 'data': data, 'model': model.name, 'system_fingerprint': fingerprint(steps),
        'usage': {'prompt_tokens': count, 'total_tokens': count},
    })  # fmt: skip


def _written(vector: Any, encoding: str) -> str | list[float]:
    if encoding == 'float':
        return vector.tolist()
    return base64.b64encode(vector.astype('<f4').tobytes()).decode()
