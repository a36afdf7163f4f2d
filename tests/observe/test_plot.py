"""`pretrax plot`: the curves are where the numbers say, and every mistake is answered with what there is."""

import json
import math
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from pretrax.cli.plot import plot
from pretrax.errors import UserError
from pretrax.observe.plot import load_series, svg, text, ticks

SVG = '{http://www.w3.org/2000/svg}'


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs as training leaves them, the current directory above them."""
    monkeypatch.chdir(tmp_path)
    for name, start in (('small', 4.0), ('large', 8.0)):
        directory = pathlib.Path('runs', name)
        directory.mkdir(parents=True)
        lines = [{'step': step, 'loss': start / step, 'mfu': None} for step in (1, 2, 4)]
        lines.append({'step': 4, 'val_loss': start})
        (directory / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return tmp_path / 'runs'


def points(image):
    """The polylines of an SVG as lists of (x, y)."""
    lines = ElementTree.fromstring(image).iter(f'{SVG}polyline')
    return [[tuple(map(float, pair.split(','))) for pair in line.attrib['points'].split()] for line in lines]


def test_curves_are_drawn_to_scale():
    """Against positions computed here from the axes' own labels."""
    (series,) = load_series_of({'a': [(0, 1.0), (10, 3.0), (40, 2.0)]})
    image = svg([series], 'loss')
    labels = [(e.attrib, e.text) for e in ElementTree.fromstring(image).iter(f'{SVG}text')]
    x_labels = {float(t): float(a['x']) for a, t in labels if a.get('text-anchor') == 'middle' and t != 'step'}
    y_labels = {float(t): float(a['y']) - 4 for a, t in labels if a.get('text-anchor') == 'end' and t != 'a'}
    assert 30 < min(y_labels.values()) < max(y_labels.values()) < 440  # between the title and the steps
    ((first, second, third),) = points(image)
    assert first == pytest.approx((x_labels[0], y_labels[1]), abs=0.2)
    assert second == pytest.approx((x_labels[10], y_labels[3]), abs=0.2)
    assert third == pytest.approx((x_labels[40], y_labels[2]), abs=0.2)


def load_series_of(curves):
    from pretrax.observe.plot import Series

    return [Series(name, [s for s, _ in pairs], [v for _, v in pairs]) for name, pairs in curves.items()]


@pytest.mark.usefixtures('runs')
def test_a_file_has_one_curve_per_run(capsys):
    plot(['runs/small', 'runs/large/metrics.jsonl'], out='charts/both.svg')
    assert capsys.readouterr().out == 'wrote charts/both.svg\n'
    image = pathlib.Path('charts/both.svg').read_text()
    small, large = points(image)
    assert len(small) == len(large) == 3
    assert large[0][1] < small[0][1]  # the larger loss is higher on the page
    assert '>small<' in image
    assert '>large<' in image


@pytest.mark.usefixtures('runs')
def test_html_contains_the_same_image():
    plot(['runs/small'], out='a.svg')
    plot(['runs/small'], out='a.html')
    page = pathlib.Path('a.html').read_text()
    assert page.startswith('<!doctype html>')
    assert pathlib.Path('a.svg').read_text() in page


@pytest.mark.usefixtures('runs')
def test_without_a_file_it_draws_in_the_terminal(capsys):
    plot(['runs/small', 'runs/large'], key='loss')
    out = capsys.readouterr().out
    assert out.startswith('loss\n')
    assert 'o small: 4 to 1, lowest 1 at step 4' in out
    assert '+ large: 8 to 2, lowest 2 at step 4' in out


def test_the_text_chart_puts_marks_where_the_values_are():
    chart = text(load_series_of({'a': [(0, 0.0), (50, 10.0), (100, 0.0)]}), 'loss', width=40, height=11).splitlines()
    top, bottom = chart[1], chart[11]
    assert top.count('o') == 1
    assert bottom.count('o') == 2
    assert top.index('o') - bottom.index('o') == pytest.approx((bottom.rindex('o') - bottom.index('o')) / 2, abs=1)


def test_runs_of_the_same_name_have_different_labels(runs):
    other = runs / 'elsewhere' / 'small'
    other.mkdir(parents=True)
    (other / 'metrics.jsonl').write_text('{"step": 1, "loss": 1.0}\n')
    assert [s.name for s in load_series(['runs/small', str(other)], 'loss')] == ['runs/small', str(other)]


def test_nonfinite_values_are_skipped_and_counted(runs):
    file = runs / 'small' / 'metrics.jsonl'
    file.write_text(file.read_text() + '{"step": 5, "loss": null, "nonfinite": {"loss": "nan"}}\n')
    (series,) = load_series(['runs/small'], 'loss')
    assert series.nonfinite == 1
    assert all(map(math.isfinite, series.values))
    assert 'small (1 not finite)' in svg([series], 'loss')


def test_names_are_escaped_in_the_image():
    image = svg(load_series_of({'<a & b>': [(1, 1.0), (2, 2.0)]}), 'x<y')
    assert {'<a & b>', 'x<y'} <= {element.text for element in ElementTree.fromstring(image).iter(f'{SVG}text')}


@pytest.mark.parametrize(
    ('runs_given', 'options', 'parts'),
    [
        (['runs/smal'], {}, ['no run at runs/smal, did you mean runs/small?']),
        (['small'], {}, ['no run at small, did you mean runs/small?']),
        (['runs/other-thing'], {}, ['no run at runs/other-thing', 'runs: runs/large, runs/small']),
        (['runs'], {}, ['runs is not a run: it has no metrics.jsonl']),
        (['runs/small'], {'key': 'los'}, ["has no 'los', did you mean 'loss'?", 'it has: loss, val_loss']),
        (['runs/small'], {'key': 'mfu'}, ["has no 'mfu'", 'it has: loss, val_loss']),
        (['runs/small'], {'out': 'a.png'}, ['cannot draw a.png', '.svg or .html']),
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


@pytest.mark.parametrize(
    ('low', 'high'), [(0, 1), (2.31, 2.34), (-5, 1e6), (3.0, 3.0), (0, 0), (1e-9, 2e-9), (-2, -2), (0.999, 1000.001)]
)
def test_ticks_enclose_the_data_and_are_round(low, high):
    found = ticks(low, high)
    assert found[0] <= low + 1e-9 * abs(high - low)
    assert found[-1] >= high - 1e-9 * abs(high - low)
    assert 2 <= len(found) <= 10
    distance = found[1] - found[0]
    assert f'{distance:.1e}'[:3] in ('1.0', '2.0', '2.5', '5.0')


def test_plotting_does_not_import_jax(runs):
    code = 'import sys; from pretrax.cli.plot import plot; plot(["runs/small"]); sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=runs.parent, stdout=subprocess.DEVNULL).returncode == 0
