"""The file of layer statistics: standard JSON, read back as it was, and cut where a run continues."""

import json

import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.observe.layer_statistics import FILE, LayerStatisticsLog, read_layer_statistics


def written(directory, steps, said):
    log = LayerStatisticsLog(directory, 0, said.append)
    for step in steps:
        log.write(
            step,
            {'residual_rms': np.array([step, np.nan]), 'by_head': np.array([[1.5, -np.inf]]), 'x': np.float32(np.inf)},
        )
    log.close()


def refuse(constant):
    raise AssertionError(f'{constant} is not standard JSON')


def test_values_that_are_not_finite_are_null_and_named_and_come_back(tmp_path):
    written(tmp_path, [2], [])
    (line,) = (tmp_path / FILE).read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record == {
        'step': 2, 'residual_rms': [2.0, None], 'by_head': [[1.5, None]], 'x': None,
        'nonfinite': {'residual_rms[1]': 'nan', 'by_head[0][1]': '-inf', 'x': 'inf'},
    }  # fmt: skip
    (back,) = read_layer_statistics(tmp_path)
    assert np.isnan(back.pop('residual_rms')[1])
    assert back == {'step': 2, 'by_head': [[1.5, -np.inf]], 'x': np.inf}


def test_steps_that_are_trained_again_are_removed(tmp_path):
    said = []
    written(tmp_path, [2, 4, 6], said)
    with (tmp_path / FILE).open('a') as file:
        file.write('{"step": 8, "resid')  # cut by a kill
    LayerStatisticsLog(tmp_path, 4, said.append).close()
    assert [line['step'] for line in read_layer_statistics(tmp_path)] == [2, 4]
    assert any('after step 4' in line for line in said)
    LayerStatisticsLog(tmp_path / 'another', 4, said.append).close()
    assert not (tmp_path / 'another').exists()


def test_places_that_do_not_exist_are_ignored(tmp_path):
    line = {'step': 1, 'a': [None], 'nonfinite': {'a[0]': 'nan', 'a[7]': 'nan', 'b[0]': 'inf', '[x': 'inf'}}
    (tmp_path / FILE).write_text(json.dumps(line) + '\n')
    (record,) = read_layer_statistics(tmp_path)
    assert record.keys() == {'step', 'a'}
    assert np.isnan(record['a'][0])


def test_a_run_without_the_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match='no such file'):
        read_layer_statistics(tmp_path)
