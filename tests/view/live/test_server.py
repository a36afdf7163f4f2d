"""The server of the live page: what it sends, whom it lets in, and what somebody gets who was away."""

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from live_server import WrittenRun, watching
from pretrax.errors import UserError
from pretrax.serve.access import Keys
from pretrax.view.live import feed as live_feed
from pretrax.view.live import runs as live_runs
from pretrax.view.live.feed import Feed
from pretrax.view.live.runs import MOST_RUNS, Places
from pretrax.view.live.server import address

PRETRAX = Path(sys.executable).with_name('pretrax')


@pytest.fixture
def written(tmp_path):
    run = WrittenRun(tmp_path / 'runs' / 'tiny')
    run.train(10)
    return run


@pytest.fixture
def ask():
    """Asks for a path; the answers are closed after the test."""
    with contextlib.ExitStack() as stack:

        def asked(url, path, **headers):
            connection = http.client.HTTPConnection(url.removeprefix('http://'), timeout=30)
            stack.callback(connection.close)
            connection.request('GET', path, headers=headers)
            return stack.enter_context(connection.getresponse())

        yield asked


def events(response):
    """(type, data, id) of a stream, until it ends."""
    event = {}
    for line in response:
        name, _, content = line.decode().rstrip('\n').partition(': ')
        if name:
            event[name] = content
        else:
            yield event['event'], json.loads(event['data']), event.get('id', '')
            event = {}


def until(stream, kind, accept=lambda data: True):
    """The events up to one of this kind."""
    found = []
    for event in itertools.islice(stream, 10_000):
        found.append(event)
        if event[0] == kind and accept(event[1]):
            return found
    raise AssertionError(f'no event {kind} in {found}')


def test_who_connects_gets_everything_and_then_what_is_new(ask, written):
    with watching(written.directory) as url:
        stream = events(ask(url, '/events'))
        first = until(stream, 'curves', lambda data: data['keys'].get('loss', {}).get('step') == list(range(1, 11)))
        assert {'runs', 'terms', 'definitions'} <= {kind for kind, _, _ in first}
        written.train(1)
        _, data, number = until(stream, 'curves', lambda data: 11 in data['keys']['loss']['step'])[-1]
        assert (data['keys']['loss']['start'], data['keys']['loss']['step']) == (10, [11])
        assert re.fullmatch(r'[0-9a-f]+-\d+', number)


def test_who_was_away_gets_only_what_was_missed(ask, written):
    with watching(written.directory) as url:
        until(events(ask(url, '/events')), 'curves', lambda data: 10 in data['keys'].get('loss', {}).get('step', ()))
        last = until(events(ask(url, '/events')), 'ready')[-1][2]
        written.train(2)
        again = until(
            events(ask(url, '/events', **{'Last-Event-ID': last})),
            'curves',
            lambda data: 12 in data['keys']['loss']['step'],
        )
        assert 'terms' not in {kind for kind, _, _ in again}
        sent = [step for kind, data, _ in again if kind == 'curves' for step in data['keys']['loss']['step']]
        assert sent[-2:] == [11, 12]
        other = until(events(ask(url, '/events', **{'Last-Event-ID': '0123-5'})), 'ready')  # of another server
        assert {'runs', 'terms', 'curves'} <= {kind for kind, _, _ in other}


def test_who_reads_too_slowly_gets_everything_again_and_nothing_grows(monkeypatch, written):
    monkeypatch.setattr(live_feed, 'MOST_BYTES', 1000)

    async def slowly():
        feed = Feed()
        stream = feed.stream('')
        kinds = []
        async for piece in stream:
            kinds.append(re.search(rb'event: (\w+)', piece)[1].decode())
            if kinds.count('ready') < 2:
                for number in range(100):
                    feed.publish('samples', {'id': 'tiny', 'samples': [number]})
            elif kinds[-1] == 'time':
                break
        assert feed._bytes <= 1000
        feed.close()
        await stream.aclose()
        return kinds

    kinds = asyncio.run(slowly())
    assert kinds.count('ready') >= 2


def test_the_page_has_a_policy_and_no_address_of_another_server(ask, written):
    with watching(written.directory) as url:
        response = ask(url, '/')
        page = response.read().decode()
        policy = response.getheader('content-security-policy')
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r'(src|href)="(https?:)?/', page)  # a tunnel or a proxy may have another address
        for name in re.findall(r'(?:src|href)="([^"#]+)"', page):
            assert ask(url, f'/{name}', **{'Accept-Encoding': 'gzip'}).read(), name
        plotly = ask(url, '/plotly.js', **{'Accept-Encoding': 'gzip'})
        assert plotly.getheader('content-encoding') == 'gzip'
        assert len(plotly.read()) < 600_000


@pytest.mark.parametrize(
    'headers', [{'Host': 'evil.example'}, {'Host': '127.0.0.1.evil.example:80'}, {'Origin': 'https://evil.example'}]
)
def test_a_page_of_somebody_else_gets_nothing(ask, written, headers):
    with watching(written.directory) as url:
        for path in ('/', '/events'):
            assert ask(url, path, **headers).status == 403


def test_with_keys_the_events_need_one(ask, written):
    with watching(written.directory, keys=Keys(['secret'])) as url:
        assert ask(url, '/').status == 200
        assert ask(url, '/events').status == 401
        assert ask(url, '/events', Authorization='Bearer wrong').status == 401
        response = ask(url, '/events', Authorization='Bearer secret')
        assert next(events(response))[0] == 'runs'


def test_prometheus_sees_the_runs_with_a_key(ask, written):
    with watching(written.directory, keys=Keys(['secret'])) as url:
        assert ask(url, '/metrics').status == 401
        until(events(ask(url, '/events', Authorization='Bearer secret')), 'curves')
        response = ask(url, '/metrics', Authorization='Bearer secret')
        assert (response.status, response.getheader('content-type').partition(';')[0]) == (200, 'text/plain')
        assert b'pretrax_run{key="tokens_per_second",run="tiny"} 1000.0' in response.read()


def test_runs_that_appear_in_a_directory_are_added(ask, tmp_path):
    (tmp_path / 'runs').mkdir()
    with watching(tmp_path / 'runs') as url:
        stream = events(ask(url, '/events'))
        until(stream, 'runs', lambda data: data['where'])
        WrittenRun(tmp_path / 'runs' / 'sweep' / 'second').train(3)
        assert until(stream, 'runs', lambda data: data['ids'])[-1][1]['ids'] == [
            str(tmp_path / 'runs' / 'sweep' / 'second')
        ]
        assert until(stream, 'run', lambda data: data['step'])[-1][1]['name'] == 'sweep/second'


def test_the_newest_runs_are_watched_and_the_others_counted(tmp_path):
    for number in range(MOST_RUNS + 3):
        run = WrittenRun(tmp_path / f'run-{number}')
        os.utime(run.directory / 'metrics.jsonl', (number, number))
    places = Places([str(tmp_path)])
    names = [run.name for run in places.look()[0]]
    assert names == [f'run-{number}' for number in range(MOST_RUNS + 2, 2, -1)]
    assert places.hidden == 3
    assert places.look() == ([], [])


def test_a_run_that_appears_takes_the_place_of_the_oldest_that_has_ended(tmp_path):
    for number in range(MOST_RUNS + 3):
        run = WrittenRun(tmp_path / 'runs' / f'run-{number:02}')
        os.utime(run.directory / 'metrics.jsonl', (number, number))
    places = Places([str(tmp_path / 'runs')])
    first, _ = places.look()
    first[-1].state = 'running'  # run-03
    WrittenRun(tmp_path / 'runs' / 'new')
    os.utime(tmp_path / 'runs' / 'run-01' / 'metrics.jsonl')  # it is resumed
    found, dropped = places.look()
    assert {run.name for run in found} == {'new', 'run-01'}
    assert [run.name for run in dropped] == ['run-04', 'run-05']
    assert places.hidden == 4
    assert places.look() == ([], [])


def test_the_page_shows_a_run_that_appears_among_many(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(live_runs, 'MOST_RUNS', 2)
    for number in range(3):
        run = WrittenRun(tmp_path / f'run-{number}')
        os.utime(run.directory / 'metrics.jsonl', (number, number))
    with watching(tmp_path) as url:
        stream = events(ask(url, '/events'))
        until(stream, 'runs', lambda data: len(data['ids']) == 2)
        WrittenRun(tmp_path / 'new').train(2)
        about = until(stream, 'runs', lambda data: str(tmp_path / 'new') in data['ids'])[-1][1]
        assert about['ids'] == [str(tmp_path / name) for name in ('run-2', 'new')]
        assert about['hidden'] == 2
        until(stream, 'curves', lambda data: data['id'] == str(tmp_path / 'new'))


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    paths = [str(WrittenRun(tmp_path / place / 'tiny').directory) for place in 'ab']
    assert [run.name for run in Places(paths).look()[0]] == ['tiny', paths[1]]


def test_a_run_that_does_not_exist_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    WrittenRun(tmp_path / 'runs' / 'tiny').train(1)
    with pytest.raises(UserError, match=r'no run at runs/tinny, did you mean runs/tiny\?\nto wait for a run'):
        Places(['runs/tinny'])


def test_the_address_says_how_to_come_from_another_machine():
    text = address('127.0.0.1', 8100, True)
    assert text.startswith('watching: http://127.0.0.1:8100/\n')
    assert 'ssh -L 8100:127.0.0.1:8100 ' in text
    assert address('0.0.0.0', 8100, False) == 'watching: http://0.0.0.0:8100/'


def run(*words, **options):
    return subprocess.run([PRETRAX, 'watch', *words], capture_output=True, text=True, timeout=120, **options)


def test_ctrl_c_ends_the_server_with_code_0(written):
    with subprocess.Popen(
        [PRETRAX, 'watch', written.directory, '--port', '0'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = re.search(r'http://\S+', process.stdout.readline())[0]
            with urllib.request.urlopen(url) as page, urllib.request.urlopen(f'{url}events') as stream:
                assert b'<title>' in page.read()
                assert stream.readline() == b'event: runs\n'
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0
            assert process.stderr.read() == ''
        finally:
            process.kill()


@pytest.mark.slow
def test_mistakes_are_said_in_words(written, tmp_path):
    with watching(written.directory) as url:
        port = url.rpartition(':')[2]
        for words, said in [
            ((tmp_path / 'missing',), 'no run at'),
            ((written.directory, '--port', port), 'Address already in use'),
            ((written.directory, '--host', '0.0.0.0'), 'anyone who reaches this machine could watch'),
            ((written.directory, '--api-key-file', tmp_path / 'missing'), '--api-key-file'),
        ]:
            done = run(*words)
            assert done.returncode == 2
            assert said in done.stderr
            assert 'Traceback' not in done.stderr


@pytest.mark.slow
def test_a_run_in_a_bucket_is_watched(ask, written, s3):
    for file in ('metrics.jsonl', 'attempts.jsonl'):
        s3.put(f'runs/tiny/{file}/000000', (written.directory / file).read_bytes())
    s3.put('runs/tiny/config.yaml', (written.directory / 'config.yaml').read_bytes())
    with watching(f'{s3.url}/runs') as url:
        stream = events(ask(url, '/events'))
        until(stream, 'curves', lambda data: data['keys'].get('loss', {}).get('step') == list(range(1, 11)))
        written.train(2)
        s3.put('runs/tiny/metrics.jsonl/000000', (written.directory / 'metrics.jsonl').read_bytes())
        newest = until(stream, 'curves', lambda data: 12 in data['keys']['loss']['step'])[-1][1]
        assert newest['keys']['loss']['step'] == [11, 12]
