"""Tables and plots of a sweep: every row is in them, and every point where its numbers say."""

import csv
import re
import xml.etree.ElementTree as ElementTree

import pytest

from pretrax.view.sweep_report import table_text, write_report


def done(layers, tokens, speed, devices=1, **more):
    return {
        'status': 'done', 'changes': {'model.n_layers': layers, 'batch.tokens': tokens}, 'n_params': 1000 * layers,
        'batch_tokens': tokens, 'devices': devices, 'step_seconds': tokens / speed, 'tokens_per_second': speed,
        'memory': 2e9 * layers, 'loss': 4.25, **more,
    }  # fmt: skip


RESULTS = [
    done(2, 64, 100.0, mfu=0.25), done(2, 128, 150.0, mfu=0.5), done(4, 64, 50.0, mfu=0.3), done(4, 128, 60.0,
    mfu=0.35),
    {'status': 'too large', 'why': 'about 9 | TB', 'changes': {'model.n_layers': 8, 'batch.tokens': 64}},
    {'status': 'not run', 'changes': {'model.preset': 'a"b<c'}},
]  # fmt: skip


@pytest.fixture
def written(tmp_path):
    write_report(tmp_path, 'mine', {'device': 'cpu <x>'}, 'pretrax bench mine.yaml', RESULTS)
    return tmp_path


def test_every_table_has_every_row(written):
    lines = [line for line in (written / 'results.md').read_text().splitlines() if line.startswith('|')]
    assert len(lines) == 2 + len(RESULTS)
    assert lines[2] == '| 2 | 64 |  | 2,000 | 1 | 640 | 100 | 25.0% | 4 | 4.2500 | done |'
    assert lines[6].endswith('| too large: about 9 \\| TB |')
    with (written / 'results.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert [row['status'] for row in rows] == [result['status'] for result in RESULTS]
    assert [row['tokens_per_second'] for row in rows] == ['100.0', '150.0', '50.0', '60.0', '', '']
    assert rows[5]['model.preset'] == 'a"b<c'
    page = (written / 'results.html').read_text()
    assert page.count('<tr>') == 1 + len(RESULTS)
    assert 'a&#34;b&lt;c' in page
    assert '<x>' not in page
    text = table_text(RESULTS)
    assert len(text) == 1 + len(RESULTS)
    assert text[1].split() == ['2', '64', '2,000', '1', '640', '100', '25.0%', '4', '4.2500', 'done']


def test_each_varied_key_has_a_plot(written):
    """Of three numbers by model size and by batch; all rows have one device.
    A curve for each value of the other key.
    """
    assert sorted(path.name for path in written.glob('*.svg')) == [
        f'plot-{y}-by-{x}.svg' for y in ('memory', 'mfu', 'tokens_per_second') for x in ('batch_tokens', 'n_params')
    ]
    image = (written / 'plot-tokens_per_second-by-n_params.svg').read_text()
    assert '>parameters</text>' in image
    assert re.findall(r'>(batch.tokens=\d+)</text>', image) == ['batch.tokens=64', 'batch.tokens=128']
    paths = re.findall(r'<g id="line-0-\d">\s*<path d="([^"]*)"', image)
    curves = [[float(y) for y in re.findall(r'[ML] \S+ (\S+)', path)] for path in paths]
    assert [len(points) for points in curves] == [2, 2]
    (low, high), (above, _) = curves
    assert low < high, 'y grows downwards, and 100 tokens/s is above 50'
    assert above < low
    page = (written / 'results.html').read_text()
    assert [ElementTree.fromstring(image).tag for image in re.findall(r'<svg .*?</svg>', page, re.DOTALL)]


def test_outdated_plots_are_removed(written):
    write_report(written, 'mine', {}, 'again', RESULTS[:1])
    assert not list(written.glob('*.svg'))
    assert '![' not in (written / 'results.md').read_text()
