"""A file of metrics is read in pieces: the same numbers as line by line, and the extremes of what is thinned."""

import io
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pretrax.system import line_files
from pretrax.view.record.columns import MOST, read_columns
from pretrax.view.record.run_record import read_run
from pretrax.view.report.charts import charts_of, curves_data

NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**20), 10**20), st.sampled_from([0, 1, 0.0, 1.0])
)
VALUES = st.one_of(NUMBERS, NUMBERS, st.booleans(), st.none(), st.text(max_size=4), st.lists(NUMBERS, max_size=2))
LINES = st.one_of(
    *3
    * [
        st.dictionaries(st.sampled_from(['loss', 'lo2ss', 'mfu', 'note', 'time']), VALUES).map(
            lambda more: {'step': 3} | more
        )
    ],
    st.just({'step': 4, 'loss': None, 'nonfinite': {'loss': '-inf'}}),
).map(lambda record: json.dumps(record).encode())
FOREIGN = [
    b'{"step": 5, "loss": 1.', b'{"step": 5', b'17', b'{"loss": 2}', b'{"step": true}', b'{"step": 1}, {"step": 2}', b'', b' ',
    b'{"step": 6,\r"loss": 3}', b'{"step": 7, "loss": 1, "loss": 2}', b'\xff', b'{"step": 8, "nonfinite": 1}',
    b'{"step": 9, "note": "\\ud800", "loss": 4}', b'[' * 100_000,
    b'{"st1ep": 2, "loss": 3}', b'1{"step": 2, "loss": 3}', b'{"step": 2, "loss": 3}4', b'{"step": 2 5, "loss": 3}',
    b'{"step": 2, "loss": }', b'{"step": 2, "loss":- 3}', b'{"step": 2, "loss": 03}', b'{"step": 2, "loss": -}', b'{"step": 2, "loss": 3-4}',
    b'{"step": 2.0, "loss": 3}', b'{"step": 2, "loss": 3E2}', b'{"step": 2, "loss": 1e999}', b'{"loss": 3, "step": 2}',
    b'{"step": 2, "Loss": 3e-05}', b'{"step": 2, "l-e-oss": 3}', b'{"step": 2, "loss": 3,}', b'{"step": 2, "lo\tss": 3}',
]  # fmt: skip


def one_by_one(content):
    """{key: (line, number)} and the number of foreign lines, by `json` and a line at a time."""
    found, n_lines, skipped = {}, 0, 0
    for text in io.BytesIO(content):
        try:
            record = json.loads(text)
            ours = type(record['step']) is int and type(record.get('nonfinite', {})) is dict
        except (ValueError, TypeError, KeyError, RecursionError):
            ours = False
        if not ours:
            skipped += bool(text.strip()) and text.endswith(b'\n')
            continue
        record |= {key: float(text) for key, text in record.pop('nonfinite', {}).items()}
        for key, value in record.items():
            if type(value) in (int, float) and key not in ('step', 'time'):
                found.setdefault(key, []).append((n_lines, float(value)))
        n_lines += 1
    return found, skipped


@given(
    lines=st.lists(st.one_of(LINES, LINES, st.sampled_from(FOREIGN))),
    end=st.sampled_from([b'', b'\n']),
    piece=st.sampled_from([1, 40, 1 << 18]),
)
@example(lines=[b'{"step": 1, "note": "", "mfu": 2}', b'{"step": 2, "loss": 3}'], end=b'', piece=1 << 18)
def test_pieces_have_the_numbers_of_the_lines(lines, end, piece):
    content = b'\n'.join(lines) + end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_files, '_PIECE', piece)
        columns = read_columns(io.BytesIO(content))
    expected, skipped = one_by_one(content)
    found = {key: list(zip(one.lines.tolist(), one.values.tolist(), strict=True)) for key, one in columns.items()}
    assert found == expected
    assert sorted(found, key=lambda key: found[key][0][0]) == list(found), 'by their first line'
    assert columns.skipped == skipped


N = 2 * MOST + 20_000  # thinned twice


@pytest.fixture(scope='module')
def long_run(tmp_path_factory):
    """A run with a number that rarely stands out, one that is NaN once, and one of every thousandth line."""
    random = np.random.default_rng(0)
    values = {key: random.standard_normal(N) for key in ('loss', 'grad_norm', 'mfu')}
    values['grad_norm'][[70_001, N - 5]] = 1e9, -1e9
    with (tmp_path_factory.mktemp('runs') / 'metrics.jsonl').open('w') as file:
        for i in range(N):
            line = {'step': i + 1} | {key: float(column[i]) for key, column in values.items()}
            if i == 200_003:
                line |= {'grad_norm': None, 'nonfinite': {'grad_norm': 'nan'}}
            file.write(json.dumps(line | ({'val_loss': float(i)} if i % 1000 == 0 else {})) + '\n')
    values['grad_norm'][200_003] = np.nan
    return file.name, values


def test_a_long_curve_keeps_its_extremes(long_run):
    name, values = long_run
    with open(name, 'rb') as file:
        columns = read_columns(file, exact=['loss'])
    np.testing.assert_array_equal(columns['loss'].values, values['loss'])
    assert columns['val_loss'].values.tolist() == list(range(0, N, 1000))
    thin = columns['grad_norm']
    assert len(thin.values) <= MOST // 4 + 2
    np.testing.assert_array_equal(thin.values, values['grad_norm'][thin.lines])
    assert (thin.lines[0], thin.lines[-1]) == (0, N - 1)
    assert {70_001, 200_003, N - 5} <= set(thin.lines.tolist())
    edges = np.arange(0, N, 4096)  # of any larger groups, the lowest and highest number are there too
    for group in np.split(np.arange(N), edges[1:]):
        here = thin.values[(thin.lines >= group[0]) & (thin.lines <= group[-1])]
        assert np.nanmin(here) == np.nanmin(values['grad_norm'][group])
        assert np.isnan(here).any() or here.max() == values['grad_norm'][group].max()


def test_reading_a_long_file_needs_little_memory(long_run):
    name, _ = long_run
    with open(name, 'rb') as file:
        content = io.BytesIO(file.read(8 << 20))
    tracemalloc.start()
    read_columns(content, keys=['val_loss'])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20


def test_the_curves_of_a_long_report_are_at_their_steps(long_run):
    """All numbers of `loss` are read, for the verdict, and only its extremes are drawn."""
    arrays = []

    class Arrays:
        def add(self, values):
            arrays.append(values)
            return len(arrays) - 1

    record = read_run(long_run[0].removesuffix('metrics.jsonl').rstrip('/'))
    assert len(record.metrics['loss'].values) == N
    data = curves_data(record, charts_of(record), Arrays())
    steps = arrays[data['steps']]
    for key in ('loss', 'grad_norm', 'val_loss'):
        one = data['series'][key]
        values, lines = arrays[one['values']], arrays[one['lines']]
        assert len(values) <= MOST // 4 + 2
        np.testing.assert_array_equal(values, record.metrics[key].thinned().values)
        np.testing.assert_array_equal(steps[lines], record.metrics[key].thinned().steps)
