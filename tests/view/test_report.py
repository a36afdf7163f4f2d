"""The report, read in a browser without a network:
its numbers are those of the files, and nothing in them is executed.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chromium import launched, needs_chromium, observe
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.view.record.run_record import read_run
from pretrax.view.report import write_report
from pretrax.view.report.encoding import Arrays
from pretrax.view.report.facts import time_data

NASTY = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><b>&amp;</b>'
CONFIG = f"""\
# Every value of this run and where it came from; pretrax 0.1.0.
name: {json.dumps(NASTY)}  # override
steps: 3000  # configs/{NASTY}.yaml:2
seed: 0  # default
batch:
  tokens: 640  # configs/a.yaml:3
"""


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run that was killed, resumed, and rolled back, with numbers that are not finite and text that is HTML."""
    path = tmp_path_factory.mktemp('runs') / 'a<b>run'
    path.mkdir()
    draw = np.random.default_rng(0)
    lines = []
    for step in range(1, 3001):
        speed = float(draw.random() * 1e5)
        line = {
            'step': step, 'tokens': step * 640, 'loss': float(np.float32(3 + draw.random())),
            'grad_norm': float(draw.random()),
            'learning_rate': float(np.float32(1e-3 * (1 - step / 3000))), 'tokens_per_second': speed,
            'mfu': speed * 6e9 / 3e14,
            'goodput': float(draw.random()), 'skipped_steps': step // 1000, '<i>key</i>$x$': step / 3,
            'time': 1.79e9 + 0.5 * step + (3600 if step > 1500 else 0),
        }  # fmt: skip
        if step in (40, 2000):
            line |= {'loss': None, 'grad_norm': None, 'nonfinite': {'loss': 'nan', 'grad_norm': 'inf'}}
        lines.append(line)
        if step % 500 == 0:
            lines.append({'step': step, 'val_loss': 2.5 + 1 / step, 'val_loss/code': 2.0, 'time': line['time'] + 0.1})
    (path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (path / 'config.yaml').write_text(CONFIG)
    (path / 'startup.txt').write_text(f'devices: 8 x {NASTY}\n')
    events = [
        {'time': 1.79e9, 'event': 'began', 'step': 0},
        {'time': 1.79e9 + 0.5, 'event': 'stepped', 'step': 1},
        {'time': 1.79e9 + 4300, 'event': 'began', 'step': 1500},
        {'time': 1.79e9 + 4351, 'event': 'stepped', 'step': 1501},
        {'time': 1.79e9 + 5000, 'event': 'rolled back', 'step': 2500, 'from_step': 2600},
        {'time': 1.79e9 + 6000, 'event': 'failed', 'step': 3000, 'why': NASTY},
    ]
    (path / 'attempts.jsonl').write_text(''.join(json.dumps(event) + '\n' for event in events))
    samples = [{'step': step, 'prompt': 'def ', 'text': f'def f{step}: {NASTY}\u2028'} for step in (1000, 2000)]
    (path / 'samples.jsonl').write_text(''.join(json.dumps(sample) + '\n' for sample in samples))
    environment = {
        'flops_per_token': 6e9, 'mesh': {'r': 2, 'd': 2, 't': 2, 'c': 1}, 'versions': {'jax': NASTY},
        'command': ['pretrax', NASTY],
        'mesh_devices': [[device, device // 4] for device in range(8)], 'devices': 8, 'device_kind': NASTY,
        'peak_flops': 3e14,
        'memory': {'planned': {'weights': 5, 'moments': 10}, 'compiled': 20, 'peak': 30, 'limit': 40},
    }  # fmt: skip
    (path / 'environment.json').write_text(json.dumps(environment))
    layers = [
        {'step': step, 'gradient_norm': [step / 1, None, step / 3], 'gradient_norm/q': [1, step, 3],
        'gradient_norm/embed': step}
        for step in (10, 20)
    ]  # fmt: skip
    (path / 'layer_statistics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in layers))
    return path


@pytest.fixture(scope='module')
def page(run):
    """The report in a browser that has no network, with all its charts drawn."""
    path = write_report(str(run))
    with launched() as browser:
        context = browser.new_context(offline=True, reduced_motion='reduce')
        page = context.new_page()
        page.requests, page.faults = observe(page)
        page.goto(Path(path).absolute().as_uri())
        page.wait_for_function('window.pretraxReport?.ready')
        page.evaluate('pretraxReport.drawAll()')
        yield page
        assert page.faults == []
        assert [url for url in page.requests if not url.startswith(('file:', 'data:', 'blob:'))] == []


def series(page, key):
    """The steps and the values of a key in the page, as text that keeps every bit."""
    return page.evaluate(
        """key => {
            const one = pretraxReport.series[key], steps = pretraxReport.arrays[pretraxReport.data.curves.steps];
            return Array.from(one.values, (value, i) => [steps[one.lines[i]], String(value)]);
        }""",
        key,
    )


@needs_chromium
def test_every_number_of_the_page_is_that_of_the_file(page, run):
    lines = read_metrics(run / 'metrics.jsonl', pytest.fail)
    keys = {key for line in lines for key in line} - {'step', 'time'}
    assert set(page.evaluate('Object.keys(pretraxReport.series)')) == keys
    for key in keys:
        expected = [(line['step'], line[key]) for line in lines if key in line]
        shown = [(step, float(value.replace('Infinity', 'inf'))) for step, value in series(page, key)]
        assert [step for step, _ in shown] == [step for step, _ in expected]
        np.testing.assert_array_equal([value for _, value in shown], [value for _, value in expected], key)
    times = page.evaluate('Array.from(pretraxReport.arrays[pretraxReport.data.curves.times])')
    assert times == [line['time'] for line in lines]


def drawn(page, title):
    """The x and y of the first curve of a chart as it is drawn."""
    return page.evaluate(
        """title => {
            const chart = pretraxReport.data.curves.charts.find(chart => chart.title === title);
            const trace = document.getElementById(chart.id).data[0];
            return {x: Array.from(trace.x), y: Array.from(trace.y), shapes: document.getElementById(chart.id).layout.shapes.length};
        }""",
        title,
    )


@needs_chromium
def test_a_drawn_curve_has_the_extremes_and_after_zooming_every_point(page, run):
    by_step = {line['step']: line['loss'] for line in read_metrics(run / 'metrics.jsonl') if 'loss' in line}
    finite = [value for value in by_step.values() if math.isfinite(value)]
    whole = drawn(page, 'Loss')
    assert len(whole['x']) < 2700
    known = [y for y in whole['y'] if y is not None]
    assert (min(known), max(known)) == (min(finite), max(finite))
    assert all(y is None or by_step[x] == y for x, y in zip(whole['x'], whole['y'], strict=True))
    assert whole['shapes'] == 4  # a restart, a rollback, and NaN twice
    page.evaluate("Plotly.relayout('chart-0', {'xaxis.range[0]': 1990, 'xaxis.range[1]': 2010})")
    part = drawn(page, 'Loss')
    assert part['x'] == list(range(1989, 2012))
    assert part['y'] == [None if x == 2000 else by_step[x] for x in part['x']]
    assert drawn(page, 'Goodput')['x'] == part['x']
    page.get_by_role('button', name='Show all steps').click()
    assert drawn(page, 'Loss')['x'] == whole['x']


@needs_chromium
@pytest.mark.parametrize(
    ('axis', 'expected'), [('tokens', 640), ('flops', 640 * 6e9), ('time', '2026-09-21 14:13:20.500'), ('step', 1)]
)
def test_the_x_axis_is_chosen(page, axis, expected):
    page.locator('#axis').select_option(axis)
    assert drawn(page, 'Loss')['x'][0] == expected


@needs_chromium
def test_smoothing_is_an_exponential_moving_average_without_bias(page, run):
    page.evaluate(
        "{const s = document.getElementById('smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input'))}"
    )
    shown = page.evaluate('Array.from(pretraxReport.series.grad_norm.smooth.values)')
    opacities = page.evaluate("document.getElementById('chart-0').data.map(trace => trace.opacity ?? 1)")
    assert set(opacities) == {1}, 'dark Chromium draws bands of color behind translucent lines'
    page.evaluate("{const s = document.getElementById('smoothing'); s.value = 0; s.dispatchEvent(new Event('input'))}")
    values = [line['grad_norm'] for line in read_metrics(run / 'metrics.jsonl') if 'grad_norm' in line]
    weights = 0.9 ** np.arange(39)[::-1]
    assert shown[38] == pytest.approx(np.sum(weights * values[:39]) / np.sum(weights))


@needs_chromium
def test_text_of_names_samples_and_configurations_is_not_executed(page):
    assert page.evaluate('window.hacked') is None
    assert page.locator('#sample').inner_text() == f'def f2000: {NASTY}\u2028'
    assert page.locator('h1').inner_text().startswith(NASTY)
    assert page.locator('.why').inner_text() == NASTY
    assert page.locator('#settings tbody tr').first.inner_text().count('window.hacked = 1') == 1
    assert page.locator('.gtitle, .legendtext').filter(has=page.locator('img, script')).count() == 0
    assert page.locator('#plain th', has_text='<i>key</i>$x$').count() == 1


@needs_chromium
def test_definitions_settings_and_the_mesh_can_be_read(page):
    for button in page.locator('.info').all():
        definition = page.locator(f'#{button.get_attribute("aria-controls")}')
        assert definition.is_hidden()
        button.focus()
        page.keyboard.press('Enter')
        assert len(definition.inner_text()) > 20
        page.keyboard.press('Enter')
        assert definition.is_hidden()
    page.locator('#search').fill('batch configs')
    assert page.locator('#settings tbody tr:visible').count() == 1
    page.locator('#search').fill('')
    page.locator('#show-defaults').check()
    assert page.locator('#found').inner_text() == '4 of 4'
    assert [cell.inner_text() for cell in page.locator('.cell').all()] == [str(device) for device in range(8)]
    assert page.locator('.group .name').all_inner_texts() == ['r = 0', 'r = 1']


@needs_chromium
def test_layer_statistics_are_a_heat_map(page):
    z = page.evaluate("document.getElementById('layer-0').data[0].z")
    assert z == [[10, 20], [None, None], [10 / 3, 20 / 3]]


@needs_chromium
def test_statistics_of_a_weight_are_chosen(page):
    assert page.locator('#layers figure').count() == 1
    assert page.locator('#layer-0-weight option').all_inner_texts() == ['all', 'q', 'embed']
    page.locator('#layer-0-weight').select_option('q')
    assert page.evaluate("document.getElementById('layer-0').data[0].z") == [[1, 1], [10, 20], [3, 3]]
    page.locator('#layer-0-weight').select_option('embed')
    assert page.evaluate("document.getElementById('layer-0').data[0].y") == [10, 20]
    page.locator('#layer-0-weight').select_option('all')
    assert page.evaluate("document.getElementById('layer-0').data[0].z")[0] == [10, 20]


def test_the_time_of_a_step_is_measured_traced_and_at_the_limit(run):
    found = time_data(read_run(run), {'forward': 0.25})
    speeds = [line['tokens_per_second'] for line in read_metrics(run / 'metrics.jsonl') if 'tokens_per_second' in line]
    assert found['measured'] == pytest.approx(640 / np.median(speeds))
    assert found['limit'] == pytest.approx(640 * 6e9 / (8 * 3e14))
    assert (found['traced'], found['phases']) == ({'forward': 0.25}, [])


def test_the_time_is_told_by_cause_the_longest_first(tmp_path):
    history = [('began', 100.0, {}), ('stepped', 110.0, {'compile': 10.0}), ('finished', 200.0, {})]
    events = [{'time': time, 'event': event, 'step': 1, **what} for event, time, what in history]
    (tmp_path / 'attempts.jsonl').write_text(''.join(json.dumps(event) + '\n' for event in events))
    pause = {'time': 150.0, 'step': 1, 'work': 'save', 'seconds': 40.0}
    (tmp_path / 'pauses.jsonl').write_text(json.dumps(pause) + '\n')
    text = Path(write_report(str(tmp_path))).read_text()
    assert 'Where the time went' in text
    assert 'steps kept 50.0%, checkpoints 40.0%, compilation 10.0%' in text


def test_a_trace_that_is_damaged_is_a_warning(tmp_path):
    (tmp_path / 'attempts.jsonl').write_text('{"time": 1.0, "event": "began", "step": 0}\n')
    place = tmp_path / 'profile' / 'plugins' / 'profile' / '2026'
    place.mkdir(parents=True)
    (place / 'host.xplane.pb').write_bytes(b'\xff\xff')
    text = Path(write_report(str(tmp_path))).read_text()
    assert text.count('the newest trace cannot be shown') == 1


@pytest.mark.parametrize(
    ('values', 'codec'),
    [
        (np.arange(1000.0), 'decimal'),
        (np.round(1.79e9 + 0.7 * np.arange(1000), 3), 'decimal'),
        (np.float32(np.random.default_rng(0).random(1000)), 'f32'),
        (np.random.default_rng(0).random(1000), 'f64'),
        (np.array([1.0, np.nan, np.inf, -np.inf]), 'f32'),
        (np.array([0.1, np.nan, 1e300]), 'f64'),
        (np.array([]), 'f32'),
    ],
)
def test_numbers_are_stored_small_and_not_twice(values, codec):
    arrays = Arrays()
    assert arrays.add(values) == arrays.add(values.copy()) == 0
    assert arrays.add(values * 1.1 + 1) == (1 if len(values) else 0)
    assert arrays.page()['arrays'][0]['codec'] == codec


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    (tmp_path / 'attempts.jsonl').write_text('{"time": 1.0, "event": "began", "step": 0}\n')
    text = Path(write_report(str(tmp_path))).read_text()
    assert 'has no metrics yet' in text
    assert 'id="curves"' not in text


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('environment.json', '{"flops_per_token": 6e9, "devices": 0, "peak_flops": 3e14, "predicted": {"phases": 3}}'),
        ('environment.json',
        '{"flops_per_token": 1e999, "memory": {"peak": NaN}, "predicted": {"phases": [{"exposed": 1}]}}'),
        ('pauses.jsonl', '{"time": 1, "step": 1, "work": "save", "seconds": NaN}\n'),
        ('attempts.jsonl', '{"time": NaN, "event": "began"}\n{"time": 1, "event": "started", "processes": 5}\n'
        '{"time": 2, "event": "rolled back"}\n'),
    ],
)  # fmt: skip
def test_numbers_that_no_run_writes_cost_only_their_part(tmp_path, name, content):
    (tmp_path / 'config.yaml').write_text('steps: 3\nbatch:\n  tokens: 10\n')
    (tmp_path / 'metrics.jsonl').write_text('{"step": 3, "loss": 1.5, "tokens_per_second": 20}\n')
    (tmp_path / name).write_text(content)
    text = Path(write_report(str(tmp_path))).read_text()
    assert '<span class="value">1.5000</span>' in text
    assert '>nan<' not in text.lower()


def test_mistakes_are_explained(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match='no run at'):
        write_report(str(tmp_path / 'nothing'))
    for out, message in (('a.pdf', 'a name that ends in .html'), (str(tmp_path), 'a name that ends in .html')):
        with pytest.raises(SystemExit) as ended:
            main(['report', str(run), '--out', out])
        assert ended.value.code == 2, message
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot write'):
        write_report(str(run), tmp_path / 'file' / 'report.html')


@needs_chromium
@pytest.mark.slow
def test_the_pictures_of_the_documentation_are_taken(run, tmp_path):
    script = Path(__file__).parents[1] / 'report_pictures.py'
    subprocess.run([sys.executable, script, run, tmp_path], check=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {'report.png', 'report-layers.png', 'report-attempts.png', 'report-memory.png'}
    assert all((tmp_path / name).read_bytes().startswith(b'\x89PNG') for name in names)
