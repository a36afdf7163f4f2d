"""The file of a sweep: which configurations it means, and what is wrong with it, before anything runs."""

import json
from pathlib import Path

import pytest

from launched import BASE
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.experiments.sweep import read_sweep

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / 'base.yaml').write_text(json.dumps(BASE))

    def read(**values):
        (tmp_path / 'sweep.yaml').write_text(json.dumps({'base': 'base.yaml', **values}))
        return read_sweep(tmp_path / 'sweep.yaml', tmp_path / 'run')

    return read


def test_a_sweep_has_every_combination_and_the_additional_rows(sweep, tmp_path):
    _, rows = sweep(
        change={'seed': 1, 'optimizer': {'name': 'lion', 'learning_rate': 1e-3}},
        grid={'model.n_layers': [1, 2], 'batch.tokens': [64, 128], 'devices': [4]},
        rows=[{'model': {'n_layers': 3}, 'seed': 2}],
    )
    found = [(r.config.model.options.n_layers, r.config.batch.tokens, r.devices, r.config.seed) for r in rows]
    assert found == [(1, 64, 4, 1), (1, 128, 4, 1), (2, 64, 4, 1), (2, 128, 4, 1), (3, 64, None, 2)]
    assert rows[1].label == 'model.n_layers=1 batch.tokens=128 devices=4'
    assert {row.config.optimizer.name for row in rows} == {'lion'}
    assert {row.config.run_dir for row in rows} == {tmp_path / 'run'}


def test_a_sweep_without_changes_has_one_row(sweep):
    _, rows = sweep()
    assert [(row.label, row.config.seed) for row in rows] == [('unchanged', 7)]


@pytest.mark.parametrize(
    ('values', 'said'),
    [
        ({'gird': {}}, r'sweep.yaml:1: gird is not a key that exists\n    did you mean grid\?'),
        ({'grid': {'model.n_layers': 2}}, r'grid.*model.n_layers.* is 2; expected a list'),
        ({'grid': {'model.n_layers': []}}, r'is an empty list; expected the values to try'),
        ({'grid': {'model.n_layer': [2]}},
        r'(?s)row 1 \(model.n_layer=2\) is not a valid configuration:\n.*write model.n_layers=2'),
        ({'rows': [{}, {'batch.tokens': 65}]}, r'(?s)row 2 \(batch.tokens=65\) .*expected a multiple of batch.seq'),
        ({'rows': [{'name': 'mine'}]}, r'row 1: a row cannot set name'),
        ({'rows': [{'devices': 0}]}, r'row 1: devices is 0; expected a number of devices'),
        ({'grid': {'seed': list(range(101)), 'batch.tokens': [16 * i for i in range(1, 101)]}},
        r'10,100 rows; expected at'),
        ({'steps': 0}, r'steps is 0; expected at least 1'),
        ({'minutes': -1}, r'minutes is -1; expected greater than 0'),
        ({'base': 'bass.yaml'}, r'sweep.yaml:1: base: .*bass.yaml does not exist; did you mean .*base.yaml'),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_any_row_runs(sweep, values, said):
    with pytest.raises(UserError, match=said) as told:
        sweep(**values)
    assert len(told.value.short_text().splitlines()) <= 10


def test_the_command_line_exits_with_2(tmp_path, capsys):
    for name, text in (('missing.yaml', None), ('list.yaml', '[1]'), ('no.yaml', 'rows: []')):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(['bench', str(tmp_path / name), '--out', str(tmp_path / 'out')])
        assert ended.value.code == 2
        assert str(tmp_path / name) in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_the_sweeps_in_the_repository_are_valid(tmp_path):
    files = sorted((REPOSITORY / 'configs' / 'sweeps').glob('*.yaml'))
    assert files
    for file in files:
        assert read_sweep(file, tmp_path)[1]
