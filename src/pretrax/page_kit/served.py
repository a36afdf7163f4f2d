"""Files of a page, read once, with headers that keep what is foreign out of it."""

import mimetypes
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources.abc import Traversable
from typing import Any

from starlette.responses import Response

from pretrax.page_kit import KIT

type Endpoint = Callable[[Any], Awaitable[Response]]


def page_files(folder: Traversable, policy: str) -> dict[str, Endpoint]:
    """The files of a page and of the kit by their paths, read once; `/` is index.html.

    Args:
        folder: the files of the page.
        policy: what the Content-Security-Policy allows besides the server itself: "connect-src 'self'
            http://127.0.0.1:8001".
    """
    headers = {
        'content-security-policy': f"default-src 'self'; {policy}; frame-ancestors 'none'; base-uri 'none'; "
        "form-action 'none'",
        'x-content-type-options': 'nosniff',
        'referrer-policy': 'no-referrer',
        'cache-control': 'no-cache',
    }
    found = {}
    for file in [*KIT.iterdir(), *(folder.iterdir() if folder.is_dir() else ())]:
        if file.name.endswith(('.html', '.css', '.js', '.svg')) and not file.name.startswith(('.', '_')):
            path = f'/{file.name}'.replace('/index.html', '/')
            found[path] = file_endpoint(file.read_bytes(), mimetypes.guess_type(file.name)[0], headers)
    return found


def file_endpoint(content: bytes, kind: str | None, headers: Mapping[str, str]) -> Endpoint:
    """An endpoint that answers with a file."""

    async def endpoint(http: Any) -> Response:
        del http
        return Response(content, headers=headers, media_type=kind)

    return endpoint
