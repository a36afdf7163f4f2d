"""The pages whose looks are tested, of made-up runs and answers. `PAGES` has for each how it is shown."""

import contextlib
import gzip
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from playwright.sync_api import Page

from live_server import watching
from page_stub import Stub, running
from pretrax.hlo.program import parse_program
from pretrax.system.locks import lock_directory
from pretrax.view.charts.curves import chart, curve, load_runs
from pretrax.view.charts.page import chart_page
from pretrax.view.compare.comparison import compare
from pretrax.view.compare.text import compare_page
from pretrax.view.program.picture import page_of
from pretrax.view.record.run_record import read_run
from pretrax.view.report import write_report
from pretrax.view.search.report import write_report as write_search
from pretrax.view.sweep_report import write_report as write_sweep
from pretrax.view.trace.run_trace import open_newest
from pretrax.view.trace.table import as_html
from view.trace.test_run_trace import gpu, place

STEPS, BATCH = 400, 4096
TEXT = '''def read_lines(path):
    """The lines of a file, without those that are empty."""
    with open(path) as file:
        return [line.rstrip() for line in file if line.strip()]
'''
PROGRAM = Path(__file__).parents[1] / 'hlo' / 'programs' / 'tpu.hlo.txt.gz'
LONG = 'a_name_without_any_place_to_break_it_' * 3


def write_run(path: Path, name: str = 'quickstart', seed: int = 0, rate: float = 1.0, far: float = 0) -> Path:
    """A finished run, whose loss has one value `far` out if that is given."""
    path.mkdir(parents=True)
    noise = np.random.default_rng(seed).normal(scale=0.05, size=STEPS)
    lines = []
    for step in range(4, STEPS + 1, 4):
        loss = 2.2 + 5 * math.exp(-rate * step / 70) + noise[step - 1]
        line = {
            'step': step, 'tokens': step * BATCH, 'loss': far if far and step == 240 else loss, 'time': 1.79e9 + step,
            'learning_rate': 6e-3 * min(step / 40, 1 - step / 500), 'grad_norm': 0.4 + abs(noise[step - 1]),
            'tokens_per_second': 41000 + 9000 * noise[step - 1], 'mfu': 0.31 + noise[step - 1] / 9, 'skipped_steps': 0,
        }  # fmt: skip
        lines.append(line)
        if step % 40 == 0:
            lines.append({'step': step, 'val_loss': loss - noise[step - 1] + 0.08, 'time': 1.79e9 + step})
    for file, records in {
        'metrics.jsonl': lines,
        'attempts.jsonl': [
            {'time': 1.79e9, 'event': 'began', 'step': 0},
            {'time': 1.79e9 + 3, 'event': 'stepped', 'step': 1},
            {'time': 1.79e9 + STEPS, 'event': 'finished', 'step': STEPS},
        ],
        'samples.jsonl': [{'step': step, 'prompt': 'def ', 'text': TEXT} for step in (200, STEPS)],
        'pauses.jsonl': [{'time': 1.79e9 + 200, 'step': 200, 'work': 'save', 'seconds': 1.5}],
    }.items():
        (path / file).write_text(''.join(json.dumps(record) + '\n' for record in records))
    (path / 'config.yaml').write_text(
        f'# Every value\nname: {name}  # override\nseed: {seed}  # override\nsteps: {STEPS}  # a.yaml:2\nbatch:\n'
        f'  tokens: {BATCH}  # a.yaml:3\noptimizer:\n  learning_rate: {rate}  # a.yaml:4\n'
        f'  weight_decay: 0.1  # default\ndata:\n  text: {LONG}  # a.yaml:5\n'
    )
    environment = {
        'devices': 8, 'device_kind': 'TPU v5e', 'processes': 2, 'parameters': 1_311_872, 'peak_flops': 1.97e14,
        'flops_per_token': 8e6, 'mesh': {'d': 4, 't': 2}, 'mesh_devices': [[n, n // 4] for n in range(8)],
        'memory': {'planned': {'weights': 5e9, 'moments': 1e10}, 'compiled': 2e10, 'peak': 2.3e10, 'limit': 3e10},
        'versions': {'jax': '0.12.1', 'python': '3.12.1'}, 'command': ['pretrax', 'train', f'data.text={LONG}'],
    }  # fmt: skip
    (path / 'environment.json').write_text(json.dumps(environment))
    return path


def report(directory: Path) -> Path:
    write_run(directory / 'quickstart', far=58_000.0)
    return Path(str(write_report('quickstart')))  # the page shows the path as it is given


def comparison(directory: Path) -> str:
    arms = {'base': 1.0, 'faster': 1.4}
    paths = [write_run(directory / f'{arm}-{seed}', arm, seed, rate) for arm, rate in arms.items() for seed in (0, 1)]
    return compare_page(compare([read_run(path) for path in paths]))


def plot(directory: Path) -> str:
    runs = load_runs([str(write_run(directory / LONG))])
    return chart_page(chart([curve(runs[0], key) for key in ('loss', 'val_loss', 'mfu')]), LONG)


def search(directory: Path) -> Path:
    trials = [
        {
            'number': number, 'state': 'done' if number % 3 else 'failed', 'steps': 10, 'value': 3 + 0.1 * number,
            'why': '',
            'values': {'optimizer.learning_rate': 0.01 * (number + 1), 'model.activation': f'{LONG}{number}'},
            'curve': [(step, 4 + 0.1 * number - 0.1 * step) for step in range(1, 11)],
        }
        for number in range(6)
    ]  # fmt: skip
    parameters = {'optimizer.learning_rate': True, 'model.activation': False}
    command = f'pretrax search {LONG}.yaml'
    write_search(directory, 'mine', command, 'val_loss', 10, parameters, trials, dict.fromkeys(parameters, 0.5))
    return directory / 'report.html'


def sweep(directory: Path) -> Path:
    rows = [
        {
            'status': 'done', 'changes': {'model.n_layers': n, 'data.text': LONG}, 'n_params': 1000 * n, 'devices': 8,
            'batch_tokens': BATCH, 'step_seconds': 0.1, 'tokens_per_second': 5e4 / n, 'mfu': 0.4, 'memory': 1e9 * n,
        }
        for n in (2, 4, 8)
    ]  # fmt: skip
    write_sweep(directory, LONG, {'device': 'TPU v5e'}, f'pretrax bench {LONG}.yaml', rows)
    return directory / 'results.html'


def trace(directory: Path) -> str:
    about = {'first_step': 41, 'last_step': 42, 'reason': 'log.profile', 'device_kind': 'NVIDIA H100 80GB HBM3'}
    return as_html(open_newest(place(directory, gpu(0), gpu(1), about=about)), 'operation', LONG)


def program(directory: Path) -> str:
    del directory
    return page_of(parse_program(gzip.decompress(PROGRAM.read_bytes()).decode()), 'quickstart', '4 x TPU v5e')


class Shown(NamedTuple):
    """A page that can be opened.

    Attributes:
        show: waits, with the page at its address, until it has its contents.
    """

    address: str
    show: Callable[[Page], None]


type Opener = Callable[[Path], AbstractContextManager[Shown]]


def _wait_for_plots(page: Page) -> None:
    if page.locator('.plot').count():
        page.locator('.plot .main-svg').first.wait_for()


def _file(write: Callable[[Path], Path | str]) -> Opener:
    """Shows a page in one file: `write` writes it and returns its path, or returns its text."""

    @contextlib.contextmanager
    def shown(directory: Path) -> Iterator[Shown]:
        written = write(directory)
        if isinstance(written, str):
            (directory / 'page.html').write_text(written)
            written = directory / 'page.html'
        yield Shown(written.absolute().as_uri(), _wait_for_plots)

    return shown


def _watch(names: list[str]) -> Opener:
    """Shows the live page of runs, the first of which still trains, at a time shortly after its last line."""

    def show(page: Page) -> None:
        page.locator('#runs tbody tr').nth(len(names) - 1).wait_for()
        page.locator('.sample').first.wait_for()
        page.wait_for_function(DRAWN, arg=len(names))

    @contextlib.contextmanager
    def shown(directory: Path) -> Iterator[Shown]:
        paths = [write_run(directory / 'runs' / name, name, seed, 1 + 0.4 * seed) for seed, name in enumerate(names)]
        config = paths[0] / 'config.yaml'
        config.write_text(config.read_text().replace(f'steps: {STEPS}', f'steps: {2 * STEPS}'))
        attempts = paths[0] / 'attempts.jsonl'
        attempts.write_text(''.join(attempts.read_text().splitlines(keepends=True)[:-1]))
        for age, path in enumerate(paths):  # the newest is the first in the table
            os.utime(path / 'metrics.jsonl', (1.79e9 - age, 1.79e9 - age))
        with (
            lock_directory(paths[0], pytest.fail),
            mock.patch('time.time', return_value=1.79e9 + STEPS + 10),
            watching(directory / 'runs' if len(names) > 1 else paths[0]) as address,
        ):
            yield Shown(address, show)

    return shown


@contextlib.contextmanager
def empty_chat(directory: Path) -> Iterator[Shown]:
    del directory
    with running(Stub(name='quickstart')) as address:
        yield Shown(address, lambda page: page.locator('.example').first.wait_for())


@contextlib.contextmanager
def chat(directory: Path) -> Iterator[Shown]:
    """The chat page with an answer of text, a program and a long word."""
    del directory
    stub = Stub(chat=True, name='quickstart')
    answer = f'This function reads a file:\n\n```python\n{TEXT}```\n\nIt leaves out empty lines. {LONG}'
    stub.answers = [re.findall(r'\s+|\S+', answer)]

    def show(page: Page) -> None:
        page.get_by_role('textbox', name='Message').fill('Write a function that reads the lines of a file.')
        page.keyboard.press('Enter')
        page.get_by_role('article').last.filter(has_text='token limit').wait_for()
        page.locator('#stop').wait_for(state='hidden')
        page.evaluate(STEADY_SPEED)

    with running(stub) as address:
        yield Shown(address, show)


DRAWN = """count => {
    const plots = [...document.querySelectorAll('.plot')].filter(plot => {
        const { top, width } = plot.getBoundingClientRect();
        return width && top < innerHeight;
    });
    return plots.length && plots.every(({ data }) => data?.filter(({ meta }) => meta === 'values').length === count);
}"""
STEADY_SPEED = """() => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(/\\d+ tokens\\/s/, '100 tokens/s');
}"""

PAGES: dict[str, Opener] = {
    written.__name__: _file(written) for written in (report, comparison, plot, search, sweep, trace, program)
} | {
    'watch_runs': _watch(['quickstart', 'faster', LONG]),
    'watch_run': _watch(['quickstart']),
    'empty_chat': empty_chat,
    'chat': chat,
}
