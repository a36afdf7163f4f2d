"""Messages in JSON after a header with their length, as language servers and debug adapters exchange them."""

import json
from typing import Any, BinaryIO


def write_message(stream: BinaryIO, message: dict[str, Any]) -> None:
    content = json.dumps(message).encode()
    stream.write(b'Content-Length: %d\r\n\r\n' % len(content) + content)
    stream.flush()


def read_message(stream: BinaryIO) -> dict[str, Any]:
    headers = dict(line.strip().split(b': ') for line in iter(stream.readline, b'\r\n'))
    return json.loads(stream.read(int(headers[b'Content-Length'])))
