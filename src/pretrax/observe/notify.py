"""Notifications about a run: a webhook receives a JSON object, or a command is run.

Notifications are sent by threads. If it cannot be sent, that is a warning: it never changes how a run goes or ends.
"""

import dataclasses
import json
import os
import queue
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Sequence

from pretrax.errors import Report
from pretrax.system.children import Child

TRIES = 4
WAIT = 1.0  # seconds before the second try; doubled before each other one
TIMEOUT = 5.0  # seconds for one request
COMMAND_SECONDS = 30.0  # for a command
CLOSE_SECONDS = 15.0  # the end of a run waits at most this long for its notifications

type _Payload = dict[str, str | int | float]


@dataclasses.dataclass(frozen=True)
class Notice:
    """What happened to a run."""

    event: str  # one of `log.notify.events`
    run: str
    run_dir: str
    step: int
    steps: int
    why: str  # the reason, for a person; may be ''

    def payload(self) -> _Payload:
        """The JSON object. `text` is what Slack and Mattermost show."""
        why = f': {self.why}' if self.why else ''
        text = f'{self.run} {self.event} at step {self.step} of {self.steps}{why}'
        return {
            **dataclasses.asdict(self),
            'text': text,
            'time': round(time.time(), 3),
            'host': socket.gethostname(),
        }


class Notifier:
    """Sends notices, in their order.

    Args:
        url: URL of the webhook, with http or https; None: none.
        command: program and arguments, run without a shell; None: none.
        events: the events to send; others are ignored.
    """

    def __init__(self, url: str | None, command: Sequence[str] | None, events: Collection[str], report: Report):
        self._report, self._events = report, events
        self._ways: list[_Way] = []
        if url is not None:
            self._ways.append(_Way(lambda payload: _post(url, payload), report))
        if command is not None:
            self._ways.append(_Way(lambda payload: _run(command, payload), report))

    def send(self, notice: Notice) -> None:
        """Sends a notice. Returns at once."""
        if not self._ways or notice.event not in self._events:
            return
        payload = notice.payload()
        for way in self._ways:
            way.send(payload)

    def close(self) -> None:
        """Waits until the notices are sent, for a limited time."""
        deadline = time.monotonic() + CLOSE_SECONDS
        unsent = [way for way in self._ways if not way.close(deadline)]
        if unsent:
            self._report(f'WARNING: log.notify: a notification was not sent within {CLOSE_SECONDS:g} s')


class _Way:
    """The webhook or the command, with a thread of its own, so that neither waits for the other."""

    def __init__(self, call: Callable[[_Payload], None], report: Report):
        self._call, self._report = call, report
        self._queue: queue.SimpleQueue[_Payload | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, payload: _Payload) -> None:
        """Sends a payload. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name='notifications', daemon=True)
            self._thread.start()
        self._queue.put(payload)

    def close(self, deadline: float) -> bool:
        """Waits until all is sent, or until a time of `time.monotonic`. Returns whether all is sent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._queue.put(None)
        thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()

    def _send_all(self) -> None:
        while (payload := self._queue.get()) is not None:
            try:
                self._call(payload)
            except Exception as error:  # an output, not the training
                # An error may quote the URL, which is a secret.
                why = str(error) if isinstance(error, _NotSentError) else type(error).__name__
                self._report(f'WARNING: log.notify: "{payload["event"]}" was not sent: {why}')


class _NotSentError(Exception):
    """A notice that could not be sent, with a reason that holds no secret."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would follow it with a GET request, which has no notice."""

    def redirect_request(
        self, req: object, fp: object, code: object, msg: object, headers: object, newurl: object
    ) -> None:
        return None


def _post(url: str, payload: _Payload) -> None:
    """Sends a POST request, and repeats it if the server or the network fails."""
    request = urllib.request.Request(
        url, json.dumps(payload).encode(), {'Content-Type': 'application/json', 'User-Agent': 'pretrax'}
    )
    opener = urllib.request.build_opener(_NoRedirects)
    host = urllib.parse.urlsplit(url).hostname
    why = ''
    for attempt in range(TRIES):
        try:
            with opener.open(request, timeout=TIMEOUT):
                return
        except urllib.error.HTTPError as error:
            error.close()
            why = f'{host} answered {error.code}'
            if error.code < 500 and error.code not in (408, 429):
                break
        except OSError as error:
            reason = getattr(error, 'reason', error)
            why = f'{host} does not answer: {getattr(reason, "strerror", None) or type(reason).__name__}'
        if attempt + 1 < TRIES:
            time.sleep(WAIT * 2**attempt)
    raise _NotSentError(why)


def _run(command: Sequence[str], payload: _Payload) -> None:
    """Runs the command, with the payload as its input and each value in the environment, as PRETRAX_EVENT and so on."""
    environment = os.environ | {f'PRETRAX_{key.upper()}': str(value) for key, value in payload.items()}
    try:
        process = Child(command, environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        raise _NotSentError(f'{command[0]} cannot be run: {error.strerror}') from None
    try:
        _, errors = process.communicate(json.dumps(payload).encode(), timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise _NotSentError(f'{command[0]} took longer than {COMMAND_SECONDS:g} s') from None
    finally:
        if process.poll() is None:
            process.kill_all()
            process.communicate()
    if process.returncode:
        last = (errors.decode(errors='replace').strip().splitlines() or [''])[-1][:200]
        raise _NotSentError(f'{command[0]} failed with exit code {process.returncode}: {last}')
