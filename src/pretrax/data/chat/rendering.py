"""Renders a Jinja template in a process of its own, so that a template that never ends costs only this process.

Jinja's sandbox keeps a template from attributes and functions of Python, but limits neither its time nor its memory:
`range(99999)` in three loops, or a text that is doubled 40 times. The process has a limit of memory (on Linux), each
rendering one of time and length. Requests and answers are lines of JSON. `python -m pretrax.data.chat.rendering` is the
process.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from pretrax.errors import UserError

SECONDS = 5.0  # of a rendering
MEMORY = 512 << 20  # bytes, besides those of an idle process
MOST_CHARACTERS = 10_000_000  # of a rendered text


class Renderer:
    """Renders one template. Its process starts with the first rendering, and again after one that failed.

    Args:
        seconds: limit of a rendering; None: SECONDS.
    """

    def __init__(self, source: str, name: str, seconds: float | None = None):
        self._source, self._name, self._seconds = source, name, seconds or SECONDS
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of the template with these variables, which are JSON.

        Raises UserError if the template refuses them, has an error, or exceeds a limit.
        """
        request = json.dumps({'source': self._source, 'variables': variables}).encode() + b'\n'
        with self._lock:
            if self._process is None:
                command = [sys.executable, '-m', __name__]
                # A group of its own: Ctrl-C in the terminal is for the server, which still answers what runs.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
                )
                self._end = weakref.finalize(self, _end, self._process)
                assert self._process.stdout is not None
                self._process.stdout.readline()  # it is ready
            answer = self._ask(request, self._process)
            if answer is None:
                self._end()
                self._process = None
                problem = f'rendering takes longer than {self._seconds:g} s, or more than {MEMORY >> 20} MiB'
                raise UserError(f'{self._name}: {problem}')
        if 'error' in answer:
            raise UserError(f'{self._name}: {answer["error"]}')
        return answer['text']

    def _ask(self, request: bytes, process: subprocess.Popen) -> dict[str, str] | None:
        """The answer to a request; None if there is none in time."""
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        until, answer = time.monotonic() + self._seconds, b''
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            with contextlib.suppress(BrokenPipeError):  # it has ended, so there is nothing to read either
                stdin.write(request)
                stdin.flush()
            while not answer.endswith(b'\n'):
                if not selector.select(max(until - time.monotonic(), 0)):
                    return None
                part = os.read(stdout.fileno(), 1 << 20)
                if not part:
                    return None
                answer += part
        return json.loads(answer)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            stream.close()  # type: ignore[union-attr]


def environment() -> Any:
    """Jinja as `transformers` sets it up for chat templates."""
    import datetime

    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks what a model is trained on: its content."""

        tags = {'generation'}  # noqa: RUF012  # as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(('name:endgeneration',), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters['tojson'] = tojson
    made.globals['raise_exception'] = refuse
    made.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
    return made


def main() -> None:
    """Answers lines until standard input ends."""
    _limit_memory()
    jinja, templates = environment(), {}
    print(flush=True)  # ready
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        try:
            source = request['source']
            if source not in templates:
                templates = {source: jinja.from_string(source)}
            text = templates[source].render(**request['variables'])
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f'the text has {len(text):,} characters, more than {MOST_CHARACTERS:,}')
            answer = {'text': text}
        except MemoryError:
            answer = {'error': f'rendering takes more than {MEMORY >> 20} MiB'}
        except Exception as error:  # a template can raise anything
            answer = {'error': str(error) or type(error).__name__}
        text = None  # may be large
        sys.stdout.buffer.write(json.dumps(answer).encode() + b'\n')
        sys.stdout.buffer.flush()


def _limit_memory() -> None:
    if sys.platform == 'linux':  # elsewhere the limit is not enforced
        import resource

        with open('/proc/self/statm') as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


if __name__ == '__main__':
    main()
