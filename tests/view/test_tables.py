"""Tables of text."""

import math
from types import SimpleNamespace

import pytest
import rich.cells

from pretrax.doctor.comparison import Diagnosis, Row
from pretrax.evaluate.results import Results, table_rows
from pretrax.evaluate.task import Metric
from pretrax.plan.plan import report as plan_report
from pretrax.run.coordinate_check import as_text as widths_text
from pretrax.view.compare.arms import summary_text
from pretrax.view.run_list import RunSummary, runs_text
from pretrax.view.scaling.report import as_text as scaling_text
from pretrax.view.search.report import table_text as search_text
from pretrax.view.sweep_report import table_text as sweep_text
from pretrax.view.tables import csv_table, markdown_table, text_table

LONG = 'ablations/llama-without-weight-decay-on-norms/warmup=[2000]-and-a-longer-cosine/seed-7'
MANY = 123_456_789_012


def test_tables_keep_their_cells_apart():
    rows = [['name', 'n'], ['a|b<c', '1'], ['*x*', '20']]
    assert text_table(rows, left=(0,)) == ['name    n', 'a|b<c   1', '*x*    20']
    assert markdown_table(rows) == ['| name | n |', '| --- | --- |', '| a\\|b&lt;c | 1 |', '| \\*x\\* | 20 |']
    assert csv_table([['a', 1], ['b,c', None]]) == 'a,1\n"b,c",\n'


def runs():
    verdict = 'not learning: the loss was 7 at the start, and is 7'
    return runs_text(
        [
            RunSummary(LONG, '', 'finished', '', MANY, MANY, 2.1234, 2.2345, MANY, MANY, 0.0, verdict),
            RunSummary('日本語の実験', '', 'running', loss=math.nan),
        ]
    )


def seeds():
    metrics = SimpleNamespace(last=lambda key: 2.1234)
    return summary_text(SimpleNamespace(seeds=range(9), runs=[SimpleNamespace(metrics=metrics)] * 9))


def search():
    keys = [f'optimizer.a_rather_long_key_{number}' for number in range(6)]
    trial = {'number': MANY, 'state': 'done', 'steps': MANY, 'value': 2.1234, 'values': dict.fromkeys(keys, 0.123456)}
    return search_text([trial], 'val_loss', keys)


def sweep():
    numbers = {'n_params': MANY, 'devices': MANY, 'step_seconds': 1e9, 'tokens_per_second': MANY, 'mfu': 0.5}
    changes = {'model.attention.n_heads': 16, 'batch.micro': 8}
    done = {'changes': changes, 'status': 'done', 'memory': MANY, 'loss': 2.1234, **numbers}
    return sweep_text([done, {'changes': changes, 'status': 'refused', 'why': 'mesh: ' + 'too many words ' * 9}])


def scaling():
    fit = SimpleNamespace(
        approach=3, values={}, optimum=lambda flops: 1e9, interval=lambda flops: (1e8, 1e10), loss=lambda n, d: 2.1234
    )
    points = [SimpleNamespace(params=1e6), SimpleNamespace(params=1e9)]
    return scaling_text(points, [fit], [1e21])


def evaluation():
    results = Results({'a-task-with-a-long-name': {'normalized_accuracy': Metric(0.1234, 0.0123, MANY)}})
    return text_table(
        table_rows({f'{LONG}/checkpoints/{step}': results for step in (100, 200)}), left=(0, 1), drop=('documents',)
    )


def plan():
    phases = SimpleNamespace(seconds=123.4, mfu=0.5123, bound='products')
    options = 'mesh.d=8 mesh.t=8 batch.micro=16 model.save={attention: recompute, feed_forward: offload, norm: keep}'
    memory = SimpleNamespace(host=MANY)
    found = SimpleNamespace(prediction=phases, memory=memory, needed=MANY, compiled=None, written=lambda: options)
    device = SimpleNamespace(name='H100', bf16=1e15)
    hardware = SimpleNamespace(n_devices=64, device=device, memory=80e9)
    notes = {'now': None, 'why': '', 'slow_attention': '', 'left_out': ()}
    search = SimpleNamespace(tried=[found])
    return plan_report(SimpleNamespace(hardware=hardware, n_params=1, found=[found], search=search, **notes))[4:]


def doctor():
    rows = [Row('GPU errors', 'failure', (1,), 'uncorrected ' * 20, 'replace it')]
    return Diagnosis(rows, {0: 'a-node-with-a-long-name', 1: 'another-node-with-a-long-name'}, 1.0).lines()


def coordinates():
    sizes = {f'{what} of the last layer': 0.123 for what in ('logits', 'attention', 'hidden states')}
    return widths_text('standard', {2**power: sizes for power in range(7, 12)}).splitlines()


@pytest.mark.parametrize('width', [80, 60, 120])
@pytest.mark.parametrize(
    ('table', 'shown'),
    [
        (runs, ['loss', '2.1234', 'nan', 'not', 'learning', 'tokens/s', f'{MANY:,}', 'seed-', '日本語の実験']),
        (seeds, ['val_loss', 'mean', '95% interval', '2.1234 to 2.1234']),
        (search, ['trial', 'done', 'val_loss', '2.1234']),
        (sweep, ['tokens/s', f'{MANY:,}', 'loss', '2.1234', 'refused', 'status']),
        (scaling, ['approach', 'parameters', 'tokens', 'loss', '2.1234']),
        (evaluation, ['0.1234', '0.0123', 'metric', 'task']),
        (plan, ['step', '123s', 'MFU', '51.2%', 'memory', 'batch.micro=16', 'offload']),
        (doctor, ['FAILURE', 'GPU errors', 'fix: replace it']),
        (coordinates, ['standard', 'slope', '2048', 'logits']),
    ],
)
def test_tables_fit_the_terminal_and_keep_what_matters_most(monkeypatch, table, shown, width):
    """With long names and numbers of twelve digits. A pipe has every column, and the whole name in one line."""
    monkeypatch.setenv('COLUMNS', str(width))
    lines = table()
    assert max(map(rich.cells.cell_len, lines)) <= width, '\n'.join(lines)
    assert [text for text in shown if text not in '\n'.join(lines)] == [], '\n'.join(lines)
    monkeypatch.delenv('COLUMNS')
    piped = table()
    assert not [line for line in piped if line.startswith('not shown')]
    assert len(piped) <= len(lines)
    if table is runs:
        assert piped[1].startswith(LONG)


def test_a_narrow_terminal_names_the_columns_that_it_leaves_out(monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    assert ' '.join(runs()[-2:]).endswith(
        'not shown: at step, done, last line, best val loss, step (see a wider terminal or --json)'
    )
    rows = [['name', 'n', 'm'], ['x' * 90, '1', '2']]
    assert text_table(rows, (0,), ('n',), width=200)[0].split() == ['name', 'n', 'm']
    assert text_table(rows, (0,), ('n',), width=100)[0].split() == ['name', 'n', 'm'], 'a name is wrapped first'
    assert text_table(rows, (0,), ('n',), width=12)[0].split() == ['name', 'm']
