"""The live page in a real Chromium, while a test writes the files that it follows."""

import json
import math
import re
import shutil
import socket

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from chromium import needs_chromium, observe
from live_server import Relay, WrittenRun, watching
from pretrax.observe.metrics import read_metrics
from pretrax.serve.access import Keys
from pretrax.system.locks import lock_directory
from pretrax.view.definitions import definition_of
from view.watch_picture import take

pytestmark = needs_chromium

expect.set_options(timeout=60_000)
HOSTILE = '<img src=x onerror="window.broken = 1">'


@pytest.fixture
def page(browser):
    """A page, which must make no error and ask no other server."""
    context = browser.new_context(viewport={'width': 1280, 'height': 1600}, reduced_motion='reduce')
    context.set_default_timeout(60_000)
    opened = context.new_page()
    requested, problems = observe(opened, ('error', 'warning'))
    opened.problems = problems
    yield opened
    context.close()
    assert not [text for text in problems if 'ERR_CONNECTION_REFUSED' not in text and 'ERR_INCOMPLETE' not in text]
    assert len({url.split('/')[2] for url in requested if '://' in url}) == 1


@pytest.fixture
def written(tmp_path):
    run = WrittenRun(tmp_path / 'runs' / 'tiny', steps=60)
    run.train(15)
    run.train(5, loss=math.nan, val_loss=3.5)
    run.train(1, val_loss=3.25)
    return run


def points(page: Page, label: str, run: int = 0, meta: str = 'values') -> list:
    """The (x, y) of a curve of the figure with this label."""
    read = """([label, run, meta]) => {
        const plot = document.querySelector(`section[aria-label="${label}"] .plot`);
        const found = (plot?.data ?? []).filter(trace => trace.meta === meta)[run];
        return found ? found.x.map((x, i) => [x, found.y[i]]) : [];
    }"""
    return [tuple(point) for point in page.evaluate(read, [label, run, meta])]


def in_file(run: WrittenRun, key: str) -> list:
    """The (step, number) of a key in the file, None for numbers that are not finite."""
    records = [record for record in read_metrics(run.directory / 'metrics.jsonl') if isinstance(record.get(key), float)]
    return [(record['step'], record[key] if math.isfinite(record[key]) else None) for record in records]


def shows(page: Page, run: WrittenRun, key: str = 'loss', number: int = 0) -> None:
    """Waits until a figure has what the file has, neither more nor less."""
    label, wanted = definition_of(key).name, json.dumps([list(point) for point in in_file(run, key)])
    page.wait_for_function(
        """([label, run, wanted]) => {
            const plot = document.querySelector(`section[aria-label="${label}"] .plot`);
            const found = (plot?.data ?? []).filter(trace => trace.meta === 'values')[run];
            return found && JSON.stringify(found.x.map((x, i) => [x, found.y[i]])) === JSON.stringify(JSON.parse(wanted));
        }""",
        arg=[label, number, wanted],
    )


@pytest.mark.slow
def test_a_figure_of_many_long_runs_is_drawn(page, tmp_path):
    lines = ''.join(f'{{"step": {step}, "loss": {3 + step % 7 / 10}}}\n' for step in range(1, 4001))
    for number in range(40):
        run = WrittenRun(tmp_path / 'runs' / f'run-{number}', steps=4000)
        (run.directory / 'metrics.jsonl').write_text(lines)
    page.set_viewport_size({'width': 1280, 'height': 4000})
    with watching(tmp_path / 'runs') as url:
        page.goto(url)
        page.wait_for_function(
            """() => {
                const plot = document.querySelector('section[aria-label="training loss"] .plot');
                return plot?.data?.length === 40 && plot.data.every(({ x }) => x.length === 4000);
            }"""
        )


def test_figures_are_the_file_through_appends_a_kill_and_a_resume(page, written):
    with watching(written.directory) as url:
        page.goto(url)
        shows(page, written)
        assert points(page, 'training loss', meta='nonfinite')[0][0] == 20
        shows(page, written, 'val_loss')
        written.train(5)
        shows(page, written)
        with (written.directory / 'metrics.jsonl').open('ab') as file:
            file.write(b'{"step": 27, "lo')  # it was killed
        written.begin(12)
        shows(page, written)
        expect(page.get_by_role('cell', name='12 of 60')).to_be_visible()
        assert points(page, 'training loss', meta='nonfinite') == []
        expect(page.locator('section[aria-label="validation loss"]')).to_have_count(0)
        written.train(48)
        shows(page, written)
        shows(page, written, 'grad_norm')
        written.end('finished')
        expect(page.locator('.state')).to_have_text('finished')
        expect(page.locator('#attempts tbody tr')).to_have_count(2)


@pytest.mark.slow
def test_a_lost_connection_is_said_and_mended_without_losing_or_doubling_points(page, written):
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    with watching(written.directory, port=port) as url:
        page.goto(url)
        shows(page, written)
        expect(page.locator('#connection')).to_have_text('live')
    expect(page.locator('#connection')).to_contain_text('connection lost')
    written.train(4)
    written.begin(22)
    written.train(6)
    with watching(written.directory, port=port):
        expect(page.locator('#connection')).to_have_text('live')
        shows(page, written)
        written.train(1)
        shows(page, written)


@pytest.mark.slow
def test_a_stream_that_breaks_continues_after_the_last_event(page, written):
    with watching(written.directory) as url, Relay(url) as relay:
        page.goto(relay.url)
        shows(page, written)
        with page.expect_request('**/events') as asked:
            relay.cut()
        assert re.fullmatch(r'[0-9a-f]+-\d+', asked.value.headers['last-event-id'])
        written.train(3)
        shows(page, written)
        expect(page.locator('#connection')).to_have_text('live')


@pytest.mark.slow
def test_runs_are_overlaid_smoothed_and_drawn_over_tokens_and_time(page, written, tmp_path):
    other = WrittenRun(tmp_path / 'runs' / 'other')
    other.train(15)
    with watching(written.directory, other.directory) as url:
        page.goto(url)
        shows(page, written)
        shows(page, other, number=1)
        page.get_by_label('Over').select_option('tokens')
        page.wait_for_function('() => document.querySelector(".plot").data[0].x[0] === 512')
        assert [x for x, _ in points(page, 'training loss')] == [512 * step for step, _ in in_file(written, 'loss')]
        assert points(page, 'validation loss') == [(512 * 20, 3.5), (512 * 21, 3.25)]
        page.get_by_label('Over').select_option('time')
        page.wait_for_function('() => document.querySelector(".plot").data[0].x[0] === 0')
        assert [x for x, _ in points(page, 'training loss', 1)] == pytest.approx(range(15))  # a step each second
        page.get_by_label('Over').select_option('step')
        page.get_by_label('Smoothing').fill('0.5')
        page.wait_for_function('() => document.querySelector(".plot").data.some(trace => trace.meta === "smoothed")')
        weighted = total = 0.0
        for (_, value), (_, smooth) in zip(
            in_file(other, 'loss'), points(page, 'training loss', 1, 'smoothed'), strict=True
        ):
            weighted, total = 0.5 * weighted + 0.5 * value, 0.5 * total + 0.5
            assert smooth == pytest.approx(weighted / total, rel=1e-12)
        page.get_by_label('Log y').check()
        page.wait_for_function('() => document.querySelector(".plot").layout.yaxis.type === "log"')
        page.get_by_role('checkbox', name='other').uncheck()
        page.wait_for_function(
            '() => document.querySelector(".plot").data.filter(one => one.meta === "values").length === 1'
        )
        page.get_by_text('Choose the curves').click()
        page.get_by_role('checkbox', name='tokens', exact=True).check()
        expect(page.get_by_role('rowheader', name='tokens', exact=True)).to_have_count(
            2
        )  # a straight line, and the newest value
        page.reload()  # choices are kept
        expect(page.get_by_label('Log y')).to_be_checked()
        expect(page.get_by_role('rowheader', name='tokens', exact=True)).to_have_count(2)


@pytest.mark.slow
def test_names_and_samples_are_text_and_every_figure_is_explained(page, tmp_path):
    run = WrittenRun(tmp_path / 'runs' / HOSTILE.replace('/', '-'))
    run.train(3, **{HOSTILE: 1.0})
    run.sample(HOSTILE, f'{HOSTILE}\n  twice')
    with watching(tmp_path / 'runs') as url, lock_directory(run.directory, pytest.fail):
        page.goto(url)
        expect(page.locator('.sample')).to_have_text(f'Step 3{HOSTILE}{HOSTILE}\n  twice')
        expect(page.get_by_role('heading', level=1)).to_have_text(HOSTILE)
        page.get_by_text('Choose the curves').click()
        page.get_by_role('checkbox', name=HOSTILE).last.check()
        expect(page.locator('#plain')).to_contain_text(f'{HOSTILE}1 at step 3')
        assert page.evaluate('window.broken') is None
        shows(page, run)
        for info in page.locator('.chart:visible .info').all():
            info.click()
        for chart in page.locator('.chart:visible').all():
            meaning = definition_of(chart.get_attribute('data-key')).meaning
            expect(chart.locator('.definition')).to_contain_text(meaning)
        page.get_by_role('button', name='What the columns mean').click()
        expect(page.get_by_text('stalled: running, without a new line')).to_be_visible()
        run.train(1, loss=math.inf)
        expect(page.get_by_role('list', name='Warnings')).to_contain_text('loss was inf at step 4')


LONG = 'llama-1.3b-fineweb-edu-adamw-lr3e-3-warmup2000-batch512k-seed7-resumed-from-checkpoint-18000'


def test_small_screens_have_every_figure_of_a_run_and_curves_that_are_not_covered(page, tmp_path):
    for name in (LONG, *'abcde'):
        run = WrittenRun(tmp_path / 'runs' / name, steps=60)
        run.train(30, val_loss=3.25)
    run.train(1, loss=58_000.0)
    page.emulate_media(reduced_motion='reduce')
    with watching(tmp_path / 'runs') as url:
        page.goto(url)
        shows(page, run, number=page_order(page).index('e'))
        page.set_viewport_size({'width': 390, 'height': 844})
        page.reload()
        expect(page.locator('#runs tbody tr')).to_have_count(6)  # which are above the curves
        page.locator('.plot').first.scroll_into_view_if_needed()
        page.locator('.plot .main-svg').first.wait_for()
        assert page.locator('.modebar-btn').count() == 0
        card = page.get_by_role('row').filter(has_text=LONG)
        assert re.sub(r'\s+', ' ', card.inner_text()).startswith(f'{LONG} lost 50.0 % · 30 of 60 ')
        labels = 'row => [...row.cells].filter(cell => cell.offsetWidth).map(cell => cell.dataset.label)'
        assert card.evaluate(labels) == [
            'Run',
            'State',
            'Progress',
            'Loss',
            'Val. loss',
            'Tokens/s',
            'MFU',
            'Last line',
        ]
        assert page.evaluate('document.querySelector(".plot").layout.yaxis.range[1] < 10')
        expect(page.locator('section[aria-label="MFU"]')).to_be_hidden()
        expect(page.get_by_role('row', name='MFU constant at 40 %')).to_be_visible()  # and no figure of a straight line
        page.get_by_label('Clip outliers').uncheck()
        page.wait_for_function('() => document.querySelector(".plot").layout.yaxis.range[1] > 10000')
        page.get_by_role('searchbox').fill('LLAMA')
        expect(page.locator('#runs tbody tr:visible')).to_have_count(1)
        page.wait_for_function(
            '() => document.querySelector(".plot").data.filter(one => one.meta === "values").length === 1'
        )


def page_order(page: Page) -> list[str]:
    """The names of the runs in the order of the table."""
    expect(page.locator('#runs tbody tr')).to_have_count(6)
    return page.locator('#runs .name').all_inner_texts()


@pytest.mark.slow
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_the_page_is_accessible(page, written, scheme):
    written.sample('Once', ' upon a time')
    page.emulate_media(color_scheme=scheme)
    with watching(written.directory) as url:
        page.goto(url)
        shows(page, written)
        page.get_by_text('Choose the curves').click()
        page.get_by_role('button', name='What training loss means').focus()
        page.keyboard.press('Enter')
        expect(page.locator('.chart .definition').first).to_be_visible()
        found = Axe().run(page).response['violations']
        assert not found, [(one['id'], [node['html'][:200] for node in one['nodes']]) for one in found]


@pytest.mark.slow
def test_the_page_asks_for_a_key(page, written):
    with watching(written.directory, keys=Keys(['secret'])) as url:
        page.goto(url)
        page.get_by_role('textbox', name='Key').fill('wrong')
        page.get_by_role('button', name='Connect').click()
        page.get_by_role('textbox', name='Key').fill('secret')
        page.get_by_role('button', name='Connect').click()
        shows(page, written)
        page.problems.clear()  # the browser reports each 401


@pytest.mark.slow
def test_a_directory_without_runs_says_so_and_shows_the_first_one(page, tmp_path):
    (tmp_path / 'runs').mkdir()
    with watching(tmp_path / 'runs') as url:
        page.goto(url)
        expect(page.locator('#notice')).to_contain_text('No runs yet in')
        run = WrittenRun(tmp_path / 'runs' / 'first')
        run.train(5)
        shows(page, run)
        expect(page.locator('#notice')).to_be_hidden()
        shutil.rmtree(run.directory)
        expect(page.locator('.state')).to_have_text('removed')


@pytest.mark.slow
def test_the_picture_of_the_documentation_can_be_taken(page, written, tmp_path):
    with watching(written.directory) as url:
        take(page, url, tmp_path / 'watch.png')
    assert (tmp_path / 'watch.png').read_bytes().startswith(b'\x89PNG')
