"""Errors as the clients of OpenAI's interface expect them: `{"error": {"message", "type", "param", "code"}}`."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

_TYPES = {401: 'authentication_error', 403: 'permission_error', 404: 'not_found_error', 429: 'rate_limit_error'}


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, 'server_error' if self.status >= 500 else 'invalid_request_error')
        error = {'message': self.message, 'type': kind, 'param': self.param, 'code': self.code}
        return json.dumps({'error': error}).encode()

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, 'application/json')


def busy(message: str, seconds: float, code: str) -> ApiError:
    """429: the client should try again after the given number of seconds."""
    return ApiError(429, message, code=code, headers={'retry-after': str(max(1, round(seconds + 0.5)))})


def invalid(error: ValidationError, known: Iterable[str]) -> ApiError:
    """400 for the first problem of a JSON body; it names the field."""
    problems: list[Any] = error.errors(include_url=False)
    problem = min(problems, key=lambda one: one['type'] != 'extra_forbidden')  # it may explain a field that is missing
    kind, where = problem['type'], [str(part) for part in problem['loc']]
    if inner := problem.get('ctx', {}).get('field'):  # of an object that was looked at whole
        where.append(inner)
    field = '.'.join(where)
    if kind == 'unsupported':
        return ApiError(400, f'{field}: {problem["msg"]}', param=field, code='unsupported_parameter')
    if kind == 'extra_forbidden':
        near = difflib.get_close_matches(where[-1], list(known), 1) if len(where) == 1 else []
        hint = f'; did you mean {near[0]}?' if near else ''
        return ApiError(400, f'{field}: unknown field{hint}', param=field, code='unknown_parameter')
    if kind in ('missing', 'absent'):
        return ApiError(400, f'{field}: missing', param=field, code='missing_required_parameter')
    message = problem['msg'].removeprefix('Value error, ')
    message = message[:1].lower() + message[1:]
    return ApiError(400, f'{field}: {message}' if field else message, param=field or None, code='invalid_value')
