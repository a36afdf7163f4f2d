"""`/tokenize` and `/detokenize`."""

import asyncio
from typing import Any

from starlette.responses import JSONResponse, Response

from pretrax.serve.bodies import DetokenizeBody, TokenizeBody
from pretrax.serve.service import service_of


async def tokenize(http: Any) -> Response:
    service = service_of(http)
    body = await service.read(http, TokenizeBody)
    model = service.model(body.model)
    ids = await asyncio.to_thread(model.tokenizer.encode, body.text)
    return JSONResponse({'tokens': ids, 'count': len(ids), 'max_model_len': model.thread.max_length})


async def detokenize(http: Any) -> Response:
    service = service_of(http)
    body = await service.read(http, DetokenizeBody)
    model = service.model(body.model)
    model.check_tokens(body.tokens, 'tokens')
    return JSONResponse({'text': await asyncio.to_thread(model.tokenizer.decode, body.tokens)})
