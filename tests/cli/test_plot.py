"""`pretrax plot`: the curves are where the numbers say, and every mistake is answered with what there is."""

import csv
import inspect
import json
import math
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from chromium import launched, needs_chromium, observe
from pretrax.cli import main
from pretrax.cli import plot as verb
from pretrax.cli._options import with_options
from pretrax.errors import UserError
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.charts.curves import chart, curve, load_runs, smoothed
from pretrax.view.charts.page import chart_page
from pretrax.view.charts.picture import chart_picture
from pretrax.view.charts.text import chart_text

VERB = with_options(verb.plot)
DEFAULTS = {name: option.default for name, option in inspect.signature(VERB).parameters.items()}
SVG = '{http://www.w3.org/2000/svg}'


def plot(runs, **options):
    VERB(**DEFAULTS | {'runs': runs} | options)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs as training leaves them, the current directory above them."""
    monkeypatch.chdir(tmp_path)
    for name, start in (('small', 4.0), ('large', 8.0)):
        directory = pathlib.Path('runs', name)
        directory.mkdir(parents=True)
        lines = [
            {'step': step, 'tokens': 100 * step, 'loss': start / step, 'mfu': None, 'goodput': 0.5, 'time': 7e8 + step}
            for step in (1, 2, 4)
        ]
        lines.append({'step': 4, 'val_loss': start, 'time': 7e8 + 5})
        (directory / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return tmp_path / 'runs'


def drawing(image):
    """{id: points} of the lines of an SVG, {text: x} below the panels, and {text: y} on their left."""
    root = ElementTree.fromstring(image)
    lines = {}
    for group in root.iter(f'{SVG}g'):
        if group.get('id', '').startswith('line-'):
            numbers = re.findall(r'[ML] (\S+) (\S+)', group.find(f'{SVG}path').get('d'))
            lines[group.get('id')] = [(float(x), float(y)) for x, y in numbers]
    x_labels, y_labels = {}, {}
    for group in root.iter(f'{SVG}g'):
        for axis, labels, place in (('xtick', x_labels, 'x'), ('ytick', y_labels, 'y')):
            if group.get('id', '').startswith(axis) and group.find(f'.//{SVG}text') is not None:
                labels[group.find(f'.//{SVG}text').text] = float(group.find(f'.//{SVG}use').get(place))
    return lines, x_labels, y_labels


def one_panel(curves, **more):
    lines = [Line(name, *zip(*points, strict=True), color=i) for i, (name, points) in enumerate(curves.items())]
    return Chart([Panel('loss', lines)], **more)


def texts(image):
    return {element.text for element in ElementTree.fromstring(image).iter(f'{SVG}text')}


def test_curves_are_drawn_to_scale():
    """Against positions that the ticks of the axes have."""
    image = chart_picture(one_panel({'a': [(0, 1.0), (10, 3.0), (40, 2.0)]}), '.svg')
    lines, x_labels, y_labels = drawing(image)
    first, second, third = lines['line-0-0']
    assert first == pytest.approx((x_labels['0'], y_labels['1']))
    assert second == pytest.approx((x_labels['10'], y_labels['3']))
    assert third == pytest.approx((x_labels['40'], y_labels['2']))


def test_logarithmic_axes_put_equal_factors_at_equal_distances():
    """Powers of ten, which lie evenly."""
    points = {'a': [(1, 0.001), (10, 0.1), (100, 10.0), (1000, 1000.0)]}
    lines, x_labels, y_labels = drawing(chart_picture(one_panel(points, log_x=True, log_y=True), '.svg'))
    xs, ys = zip(*lines['line-0-0'], strict=True)
    assert np.diff(xs) == pytest.approx([xs[1] - xs[0]] * 3)
    assert np.diff(ys) == pytest.approx([ys[1] - ys[0]] * 3)
    assert x_labels['100'] == pytest.approx(xs[2])
    assert y_labels['0.1'] == pytest.approx(ys[1])


@pytest.mark.usefixtures('runs')
def test_a_file_has_one_curve_per_run(capsys):
    plot(['runs/small', 'runs/large/metrics.jsonl'], out='charts/both.svg', key=['loss'])
    assert capsys.readouterr().out == 'wrote charts/both.svg\n'
    image = pathlib.Path('charts/both.svg').read_text()
    lines, _, _ = drawing(image)
    assert [len(points) for points in lines.values()] == [3, 3]
    assert lines['line-0-1'][0][1] < lines['line-0-0'][0][1]  # the larger loss is higher on the page
    assert {'small', 'large', 'loss (nats per token)', 'step'} <= texts(image)


@pytest.mark.usefixtures('runs')
def test_validation_is_beside_training_and_other_keys_below():
    plot(['runs/small', 'runs/large'], out='a.svg', key=['loss', 'val_loss', 'goodput'])
    image = pathlib.Path('a.svg').read_text()
    assert drawing(image)[0].keys() == {'line-0-0', 'line-0-1', 'line-0-2', 'line-0-3', 'line-1-0', 'line-1-1'}
    assert {'small loss', 'large loss', 'small val_loss', 'large val_loss', 'goodput', '50%'} <= texts(image)
    drawn = chart([curve(run, key) for key in ('loss', 'val_loss') for run in load_runs(['runs/small', 'runs/large'])])
    looks = [(line.color, line.style) for line in drawn.panels[0].lines]
    assert looks == [(0, 0), (1, 0), (0, 1), (1, 1)]  # the color is the run's, the style the key's


@pytest.mark.usefixtures('runs')
def test_without_a_key_it_draws_training_and_validation(capsys):
    plot(['runs/small'])
    out = capsys.readouterr().out
    assert 'o loss: 4 to 1, lowest 1 at step 4' in out
    assert '+ val_loss: 4 to 4' in out


@pytest.mark.parametrize(('suffix', 'start'), [('png', b'\x89PNG'), ('pdf', b'%PDF'), ('svg', b'<?xml')])
@pytest.mark.usefixtures('runs')
def test_a_picture_has_the_same_bytes_again(suffix, start):
    for name in ('a', 'b'):
        plot(['runs/small'], out=f'{name}.{suffix}', smooth=2)
    content = pathlib.Path(f'a.{suffix}').read_bytes()
    assert content.startswith(start)
    assert content == pathlib.Path(f'b.{suffix}').read_bytes()


@pytest.mark.usefixtures('runs')
def test_the_table_has_the_numbers_of_the_lines():
    plot(['runs/small', 'runs/large'], out='a.csv', key=['loss', 'val_loss'], x='tokens', smooth=1)
    with open('a.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['run'] for row in rows] == ['small'] * 3 + ['large'] * 3
    assert [float(row['loss']) for row in rows] == [4, 2, 1, 8, 4, 2]
    assert [float(row['tokens']) for row in rows] == [100, 200, 400] * 2
    assert [row['val_loss'] for row in rows] == ['', '', '4.0', '', '', '8.0']
    # After one half-life: (4/2 + 2) / (1/2 + 1); after two more: (4/8 + 2/4 + 1) / (1/8 + 1/4 + 1)
    assert [float(row['loss smoothed']) for row in rows[:3]] == pytest.approx([4, 8 / 3, 2 / 1.375])


def test_smoothing_is_the_weighted_mean_of_the_formula():
    random = np.random.default_rng(0)
    steps, values = np.cumsum(random.integers(1, 20, 60)), random.normal(size=60)
    for i, found in enumerate(smoothed(steps, values, 15.0)):
        weights = 0.5 ** ((steps[i] - steps[: i + 1]) / 15.0)
        assert found == pytest.approx((weights * values[: i + 1]).sum() / weights.sum())


@pytest.mark.usefixtures('runs')
def test_the_x_axis_is_time_or_tokens():
    (run,) = load_runs(['runs/small'])
    assert curve(run, 'loss', 'time').x.tolist() == [0, 1, 3]  # seconds since the first line
    assert curve(run, 'val_loss', 'time').x.tolist() == [4]
    assert curve(run, 'val_loss', 'tokens').x.tolist() == [400]  # its line has no tokens: those of its step
    plot(['runs/small'], out='a.svg', x='time')
    assert 'minutes' in texts(pathlib.Path('a.svg').read_text())


@pytest.mark.usefixtures('runs')
def test_points_without_a_place_on_a_logarithmic_axis_are_counted():
    pathlib.Path('runs/small/metrics.jsonl').write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.0}\n')
    plot(['runs/small'], out='a.svg', log_x=True, log_y=True)
    assert 'small (1 not above 0)' in texts(pathlib.Path('a.svg').read_text())
    pathlib.Path('runs/small/metrics.jsonl').write_text('{"step": 1, "loss": -1.0}\n')
    with pytest.raises(UserError, match="no point of 'loss' is above zero"):
        plot(['runs/small'], log_y=True)


def test_the_text_chart_puts_marks_where_the_values_are():
    drawn = one_panel({'a': [(0, 0.0), (50, 10.0), (100, 0.0)]})
    lines = chart_text(drawn, width=40, height=11).splitlines()
    top, bottom = lines[1], lines[11]
    assert top.count('o') == 1
    assert bottom.count('o') == 2
    assert top.index('o') - bottom.index('o') == pytest.approx((bottom.rindex('o') - bottom.index('o')) / 2, abs=1)


def test_runs_of_the_same_name_have_different_labels(runs):
    other = runs / 'elsewhere' / 'small'
    other.mkdir(parents=True)
    (other / 'metrics.jsonl').write_text('{"step": 1, "loss": 1.0}\n')
    assert [run.name for run in load_runs(['runs/small', str(other)])] == ['runs/small', str(other)]


def test_nonfinite_values_are_skipped_and_counted(runs):
    file = runs / 'small' / 'metrics.jsonl'
    file.write_text(file.read_text() + '{"step": 5, "loss": null, "nonfinite": {"loss": "nan"}}\n')
    found = curve(load_runs(['runs/small'])[0], 'loss')
    assert found.nonfinite == 1
    assert all(map(math.isfinite, found.values))
    assert 'small (1 not finite)' in texts(chart_picture(chart([found]), '.svg'))


HOSTILE = ['<a & b>', '_hidden', '$x^2$', '\u4e2d', 'two\nlines', '</script><script>window.broken = 1</script>']


def test_names_are_shown_as_they_are():
    """Underscores hide a label from Matplotlib, dollar signs start a formula, and Plotly reads some HTML."""
    image = chart_picture(one_panel({name: [(1, 1.0), (2, 2.0)] for name in HOSTILE}), '.svg')
    assert {name.replace('\n', ' ') for name in HOSTILE} <= texts(image)


@needs_chromium
def test_the_page_draws_the_points_without_a_network(tmp_path):
    points = {name: [(1, 1.0), (2, 2.0 + number)] for number, name in enumerate(HOSTILE)}
    (tmp_path / 'a.html').write_text(chart_page(one_panel(points, log_x=True), HOSTILE[-1]))
    with launched() as browser:
        page = browser.new_page()
        page.context.set_offline(True)
        requests, problems = observe(page)
        page.goto(f'file://{tmp_path}/a.html')
        page.locator('.legendtext').first.wait_for()
        assert page.locator('.legendtext').all_text_contents() == [name.replace('\n', ' ') for name in HOSTILE]
        drawn = page.evaluate('document.querySelector(".plot").calcdata.map(line => line.map(p => [p.x, p.y]))')
        assert drawn == [[list(point) for point in line] for line in points.values()]
        assert page.title() == HOSTILE[-1]
        assert page.evaluate('window.broken') is None
        assert (problems, len(requests)) == ([], 1)


@pytest.mark.parametrize(
    ('runs_given', 'options', 'parts'),
    [
        (['runs/smal'], {}, ['no run at runs/smal, did you mean runs/small?']),
        (['small'], {}, ['no run at small, did you mean runs/small?']),
        (['runs/other-thing'], {}, ['no run at runs/other-thing', 'runs: runs/large, runs/small']),
        (['runs'], {}, ['runs is not a run: it has no metrics.jsonl']),
        (['runs/small'], {'key': ['los']}, ["has no 'los', did you mean 'loss'?", 'it has: tokens, loss, goodput']),
        (['runs/small'], {'key': ['loss', 'mfu']}, ["has no 'mfu'", 'it has: tokens, loss, goodput, val_loss']),
        (['runs/small'], {'out': 'a.jpg'}, ['cannot write a.jpg', '.png, .svg, .pdf, .html, .csv']),
        (['runs/small'], {'out': 'runs/small/metrics.jsonl/a.svg'}, ['cannot write']),
        ([], {}, ['no run was given']),
    ],
)
@pytest.mark.usefixtures('runs')
def test_mistakes(runs_given, options, parts):
    with pytest.raises(UserError) as caught:
        plot(runs_given, **options)
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 10


def test_a_run_without_a_first_step(runs):
    (runs / 'small' / 'metrics.jsonl').write_text('')
    with pytest.raises(UserError, match='has no metrics yet'):
        plot(['runs/small'])


def test_a_run_with_only_nan_is_refused(runs):
    (runs / 'small' / 'metrics.jsonl').write_text('{"step": 1, "loss": null, "nonfinite": {"loss": "nan"}}\n')
    with pytest.raises(UserError, match='none of the 1 values'):
        plot(['runs/small'])


def test_a_run_without_times_has_no_axis_of_time(runs):
    (runs / 'small' / 'metrics.jsonl').write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(UserError, match="has no 'time': use --x step"):
        plot(['runs/small'], x='time')


@pytest.mark.usefixtures('runs')
def test_the_options_of_the_command(capsys):
    with pytest.raises(SystemExit) as end:
        main('plot runs/small --key loss --key goodput --smooth 2 --log-y --x tokens'.split())
    out = capsys.readouterr().out
    assert not end.value.code
    assert 'lowest 50% at tokens 100' in out
    with pytest.raises(SystemExit) as end:
        main('plot runs/small --smooth -1'.split())
    assert end.value.code == 2


def test_plotting_does_not_import_jax(runs):
    code = (
        'import contextlib, sys; from pretrax.cli import main\n'
        'with contextlib.suppress(SystemExit):\n    main(["plot", "runs/small"])\n'
        'sys.exit(not {"pretrax.view.charts.text"} <= set(sys.modules) or "jax" in sys.modules)'
    )
    assert subprocess.run([sys.executable, '-c', code], cwd=runs.parent, stdout=subprocess.DEVNULL).returncode == 0


def test_the_metrics_of_a_run_in_a_bucket_are_joined(s3):
    for number, step in enumerate((1, 2)):
        s3.put(f'runs/a/metrics.jsonl/00000{number}', f'{{"step": {step}, "loss": {1 / step}}}\n'.encode())
    [run] = load_runs([f'{s3.url}/runs/a'])
    found = curve(run, 'loss')
    assert (found.run, found.steps.tolist(), found.values.tolist()) == ('a', [1, 2], [1.0, 0.5])
    with pytest.raises(UserError, match=r'runs/none is not a run: it has no metrics.jsonl'):
        load_runs([f'{s3.url}/runs/none'])
    with pytest.raises(UserError, match=r'http:// is not supported'):
        load_runs(['http://bucket/runs/a'])
    s3.fault(times=99, status=403)
    with pytest.raises(UserError, match=r'runs/a/metrics.jsonl cannot be read: Access denied'):
        load_runs([f'{s3.url}/runs/a'])
