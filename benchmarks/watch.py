"""How late `pretrax watch` is, and how much memory its server takes.

    uv run python benchmarks/watch.py

Runs are written by this program, a line each 0.3 to 1.3 s. A line is late by the time from its `time` until a client
has its event, and until Chromium has drawn its point. Then a run of many lines is watched by several clients. Half of
them do not read.
"""

import argparse
import contextlib
import datetime
import http.client
import json
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import busy, processor

HERE = Path(__file__).parent
PRETRAX = Path(sys.executable).with_name('pretrax')
KEYS = ('loss', 'grad_norm', 'learning_rate', 'tokens_per_second', 'mfu', 'goodput', 'weight_norm', 'clipped_grad_norm')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--runs', type=int, default=4)
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--lines', type=int, default=1_000_000, help='of the long run')
    parser.add_argument('--clients', type=int, default=32, help='of the long run')
    parser.add_argument('--out', type=Path, default=HERE / 'results')
    options = parser.parse_args()
    load = busy()
    with tempfile.TemporaryDirectory() as directory:
        late = lateness(Path(directory) / 'live', options.runs, options.seconds)
        memory = long_run(Path(directory) / 'long', options.lines, options.clients)
    result = {
        'command': f'uv run python benchmarks/watch.py --runs {options.runs} --seconds {options.seconds:g} '
        f'--lines {options.lines} --clients {options.clients}',
        'date': datetime.date.today().isoformat(), 'processor': processor(), 'busy': load,
        'runs': options.runs, 'late': late, 'long_run': memory,
    }  # fmt: skip
    name = f'watch-{result["date"]}'
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f'{name}.json').write_text(json.dumps(result, indent=1) + '\n')
    (options.out / f'{name}.md').write_text(text := table(result))
    print(text)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    memory = result['long_run']
    rows = [
        f'| {where} | {found["count"]} | {found["median"]:.2f} | {found["p99"]:.2f} | {found["max"]:.2f} |'
        for where, found in result['late'].items()
    ]
    return '\n'.join([
        f'# pretrax watch, {result["date"]}', '', f'`{result["command"]}`', '',
        f'{result["processor"]}; {100 * result["busy"]:.0f} % busy with other work before the measurement.', '',
        f'A line each 0.3 to 1.3 s in each of {result["runs"]} runs. Seconds from the time in the line:', '',
        '| until | lines | median | 99 % | longest |', '|---|---|---|---|---|', *rows, '',
        f'A run of {memory["lines"]:,} lines ({memory["megabytes"]:.0f} MB) grows by {memory["appended"]:,} lines. '
        f'{memory["clients"]} clients watch it, and half of them do not read:', '',
        '| | |', '|---|---|',
        f'| seconds until all lines were read | {memory["seconds"]:.1f} |',
        f'| MiB of the server before | {memory["before_mib"]:.0f} |',
        f'| with the run | {memory["read_mib"]:.0f} |',
        f'| with the clients | {memory["clients_mib"]:.0f} |',
        f'| MB that a client is sent at first | {memory["snapshot_megabytes"]:.2f} |',
    ]) + '\n'  # fmt: skip


@contextlib.contextmanager
def server(path: Path) -> Iterator[tuple[int, int]]:
    """`pretrax watch`: its port and its process."""
    command = [str(PRETRAX), 'watch', str(path), '--port', '0']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            found = re.search(r':(\d+)/', process.stdout.readline())
            assert found
            yield int(found[1]), process.pid
        finally:
            process.terminate()


def line(step: int) -> str:
    values = dict.fromkeys(KEYS, 0.0) | {'loss': 3 + 1 / step}
    return json.dumps({'step': step, 'time': time.time(), 'tokens': 512 * step} | values) + '\n'


def lateness(directory: Path, runs: int, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds from a line until it is there: {where: statistics}."""
    written: dict[tuple[str, int], float] = {}
    late: dict[str, dict[tuple[str, int], float]] = {'a client has the event': {}, 'Chromium has drawn the point': {}}
    over = threading.Event()

    def write(number: int) -> None:
        path, chance = directory / f'run-{number}' / 'metrics.jsonl', random.Random(number)
        path.parent.mkdir(parents=True)
        for step in range(1, 1_000_000):
            text = line(step)
            with path.open('a') as file:
                file.write(text)
            written[path.parent.name, step] = json.loads(text)['time']
            if over.wait(0.3 + chance.random()):
                return

    writers = [threading.Thread(target=write, args=(number,)) for number in range(runs)]
    for writer in writers:
        writer.start()
    time.sleep(2)
    with server(directory) as (port, _):
        reader = threading.Thread(target=read_events, args=(port, late['a client has the event']), daemon=True)
        reader.start()
        in_chromium(port, seconds, late['Chromium has drawn the point'])
        over.set()
        for writer in writers:
            writer.join()
    return {where: summary(found, written) for where, found in late.items()}


def summary(seen: dict[tuple[str, int], float], written: dict[tuple[str, int], float]) -> dict[str, float]:
    """Without the lines that were there at the start."""
    first = min(seen.values()) + 2
    late = sorted(seen[key] - written[key] for key in seen if key in written and written[key] > first)
    return {
        'count': len(late), 'median': statistics.median(late), 'p99': late[int(0.99 * (len(late) - 1))],
        'max': late[-1],
    }  # fmt: skip


def read_events(port: int, seen: dict[tuple[str, int], float]) -> None:
    """Notes when each step arrives first."""
    kind = b''
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection('127.0.0.1', port)
        connection.request('GET', '/events')
        for text in connection.getresponse():
            kind = text if text.startswith(b'event:') else kind
            if text.startswith(b'data:') and kind.startswith(b'event: curves'):
                now, data = time.time(), json.loads(text[5:])
                for step in data['keys'].get('loss', {}).get('step', ()):
                    seen.setdefault((Path(data['id']).name, step), now)


def in_chromium(port: int, seconds: float, seen: dict[tuple[str, int], float]) -> None:
    """Notes when the figure of the loss has each step first."""
    from playwright.sync_api import sync_playwright

    watch = """() => {
        window.seen = {};
        const look = () => {
            const plot = document.querySelector('section[aria-label="training loss"] .plot');
            for (const trace of plot?.data ?? []) {
                const known = window.seen[trace.name] ??= {};
                for (let i = trace.x.length - 1; i >= 0 && !(trace.x[i] in known); i--)
                    known[trace.x[i]] = Date.now() / 1000;
            }
            requestAnimationFrame(look);
        };
        look();
    }"""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': 1280, 'height': 900})
        page.goto(f'http://127.0.0.1:{port}/')
        page.locator('.plot .main-svg').first.wait_for()
        page.evaluate(watch)
        page.wait_for_timeout(seconds * 1000)
        for name, steps in page.evaluate('() => window.seen').items():
            seen |= {(name, int(step)): when for step, when in steps.items()}
        browser.close()


def long_run(directory: Path, lines: int, clients: int) -> dict[str, float]:
    """How long a run of many lines is read, and the memory of the server with many clients."""
    path = directory / 'long' / 'metrics.jsonl'
    path.parent.mkdir(parents=True)
    with server(directory) as (port, pid):
        time.sleep(2)
        before, began = resident(pid), time.time()
        partial = path.with_name('partial')
        with partial.open('w') as file:
            file.writelines(line(step) for step in range(1, lines + 1))
        size, began = partial.stat().st_size, time.time()
        partial.rename(path)
        while (found := newest(port))[0] < lines:
            time.sleep(0.2)
        seconds, read = time.time() - began, resident(pid)
        with contextlib.ExitStack() as stack:
            for number in range(clients):
                opened = stack.enter_context(socket.create_connection(('127.0.0.1', port)))
                opened.sendall(b'GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n')
                if number % 2:
                    threading.Thread(target=read_on, args=(opened,), daemon=True).start()
            appended = 20_000
            for start in range(0, appended, 1000):
                with path.open('a') as file:
                    file.writelines(line(lines + start + number) for number in range(1, 1001))
                time.sleep(1)
            after = resident(pid)
    return {
        'lines': lines, 'megabytes': size / 1e6, 'clients': clients, 'appended': appended, 'seconds': seconds,
        'before_mib': before,
        'read_mib': read, 'clients_mib': after, 'snapshot_megabytes': found[1] / 1e6,
    }  # fmt: skip


def read_on(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while opened.recv(1 << 20):
            pass


def newest(port: int) -> tuple[int, int]:
    """The newest step that a new client receives, and the number of bytes until then."""
    connection, size, step = http.client.HTTPConnection('127.0.0.1', port), 0, 0
    connection.request('GET', '/events')
    for text in connection.getresponse():
        size += len(text)
        if text.startswith(b'data:') and b'"lines":' in text[:400]:
            step = json.loads(text[5:])['step'] or 0
        if text == b'event: ready\n':
            break
    connection.close()
    return step, size


def resident(pid: int) -> float:
    """MiB of a process."""
    found = re.search(r'VmRSS:\s+(\d+)', Path(f'/proc/{pid}/status').read_text())
    assert found
    return int(found[1]) / 1024


if __name__ == '__main__':
    main()
