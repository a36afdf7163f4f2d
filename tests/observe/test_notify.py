"""Notifications reach a real HTTP server and a real command; what fails is one warning without the secret URL."""

import http.server
import json
import sys
import threading
import time

import pytest

from pretrax.observe import notify
from pretrax.observe.notify import Notice, Notifier

ALL = ('finished', 'stopped', 'failed', 'diverged', 'stalled', 'recovered')
FINISHED = Notice('finished', 'gpt', 'runs/gpt', 500, 500, '')


class Server(http.server.ThreadingHTTPServer):
    """Answers with the given codes in turn, the last one for ever; None: not at all."""

    def __init__(self, codes):
        super().__init__(('127.0.0.1', 0), Handler)
        self.codes, self.bodies, self.over = list(codes), [], threading.Event()
        self.url = f'http://127.0.0.1:{self.server_port}/services/SECRET'

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers['Content-Length']))
        server.bodies.append((self.headers['Content-Type'], json.loads(body)))
        code = server.codes.pop(0) if len(server.codes) > 1 else server.codes[0]
        if code is None:
            server.over.wait(60)
            return
        self.send_response(code)
        self.send_header('Location', '/moved')
        self.end_headers()

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def without_a_pause(monkeypatch):
    monkeypatch.setattr(notify, 'WAIT', 0.0)


def sent(notice=FINISHED, *, url=None, command=None, events=ALL):
    said = []
    notifier = Notifier(url, command, events, said.append)
    notifier.send(notice)
    notifier.close()
    return said


def test_a_webhook_receives_the_event_and_a_text_for_a_person():
    with Server([200]) as server:
        assert sent(Notice('failed', 'gpt', 's3://b/gpt', 120, 500, 'killed: SIGKILL'), url=server.url) == []
    ((kind, body),) = server.bodies
    assert kind == 'application/json'
    assert body['text'] == 'gpt failed at step 120 of 500: killed: SIGKILL'
    assert {key: body[key] for key in ('event', 'run', 'run_dir', 'step', 'steps', 'why')} == {
        'event': 'failed',
        'run': 'gpt',
        'run_dir': 's3://b/gpt',
        'step': 120,
        'steps': 500,
        'why': 'killed: SIGKILL',
    }
    assert abs(body['time'] - time.time()) < 600


@pytest.mark.parametrize(('codes', 'requests', 'warning'), [
    ([500, 429, 204], 3, None),
    ([503], 4, 'answered 503'),
    ([404], 1, 'answered 404'),
    ([302], 1, 'answered 302'),
    ([None, 200], 2, None),
    ([None], 4, 'does not answer: timed out'),
])  # fmt: skip
def test_a_server_that_fails_is_asked_again(monkeypatch, codes, requests, warning):
    if None in codes:
        monkeypatch.setattr(notify, 'TIMEOUT', 0.2 if codes == [None] else 2.0)
    with Server(codes) as server:
        said = sent(url=server.url)
    assert len(server.bodies) == requests
    assert len(said) == (warning is not None)
    assert all(
        'SECRET' not in line and 'WARNING: log.notify: "finished" was not sent: 127.0.0.1' in line for line in said
    )
    assert warning is None or said[0].split('127.0.0.1 ')[1].lower().startswith(warning[:16])


@pytest.mark.parametrize('url', ['http://127.0.0.1:9/SECRET', 'http://no.such.host.invalid/SECRET', 'http://[SECRET'])
def test_a_url_that_cannot_be_reached_is_a_warning(url):
    (said,) = sent(url=url)
    assert said.startswith('WARNING: log.notify: "finished" was not sent: ')
    assert 'SECRET' not in said


def test_a_command_has_the_event_as_input_and_in_its_environment(tmp_path):
    program = 'import os, sys; open(sys.argv[1], "w").write(os.environ["PRETRAX_EVENT"] + sys.stdin.read())'
    assert sent(command=[sys.executable, '-c', program, str(tmp_path / 'out; touch x')]) == []
    text = (tmp_path / 'out; touch x').read_text()  # without a shell
    assert text.startswith('finished{')
    assert json.loads(text.removeprefix('finished'))['text'] == 'gpt finished at step 500 of 500'


@pytest.mark.parametrize(('program', 'warning'), [
    ('import sys; print("no mail server", file=sys.stderr); sys.exit(3)', 'failed with exit code 3: no mail server'),
    ('import subprocess; subprocess.run(["sleep", "60"])', 'took longer than 0.5 s'),
    ('import os; os.close(0); os.close(2)', None),
])  # fmt: skip
def test_a_command_that_fails_or_hangs_is_a_warning(monkeypatch, program, warning):
    if warning and 'longer' in warning:
        monkeypatch.setattr(notify, 'COMMAND_SECONDS', 0.5)
    said = sent(command=[sys.executable, '-c', program])
    assert [warning in line for line in said] == ([True] if warning else [])


def test_a_command_does_not_wait_for_a_webhook(monkeypatch, tmp_path):
    monkeypatch.setattr(notify, 'CLOSE_SECONDS', 0.0)
    monkeypatch.setattr(notify, 'TIMEOUT', 600.0)
    said = []
    with Server([None]) as server:
        notifier = Notifier(server.url, ['touch', str(tmp_path / 'called')], ALL, said.append)
        notifier.send(FINISHED)
        until = time.monotonic() + 60
        while not ((tmp_path / 'called').exists() and server.bodies):
            assert time.monotonic() < until
            time.sleep(0.01)
        notifier.close()
        assert said == ['WARNING: log.notify: a notification was not sent within 0 s']


def test_a_command_that_does_not_exist_is_a_warning():
    assert sent(command=['no-such-program']) == [
        'WARNING: log.notify: "finished" was not sent: no-such-program cannot be run: No such file or directory'
    ]


def test_only_the_chosen_events_are_sent_and_none_without_a_way():
    with Server([200]) as server:
        sent(url=server.url, events=('failed',))
        assert server.bodies == []
    threads = threading.active_count()
    assert sent() == []
    assert threading.active_count() == threads


def test_sending_does_not_wait_and_the_end_waits_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(notify, 'CLOSE_SECONDS', 0.1)
    monkeypatch.setattr(notify, 'TIMEOUT', 3.0)
    with Server([None]) as server:
        assert sent(url=server.url) == ['WARNING: log.notify: a notification was not sent within 0.1 s']
