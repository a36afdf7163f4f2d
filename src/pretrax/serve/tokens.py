"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them: clients then need no tokenizer of their own."""

from typing import Any

from starlette.responses import JSONResponse, Response

from pretrax.serve.bodies import DetokenizeBody, TokenizeBody
from pretrax.serve.service import service_of


async def tokenize(http: Any) -> Response:
    service = service_of(http)
    body = await service.read(http, TokenizeBody)
    model = service.model(body.model)
    ids = await model.encode(body.content, body)
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
