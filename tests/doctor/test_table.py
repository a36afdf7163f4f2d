"""The table: every line fits in 100 columns, and failures come first."""

import json

from pretrax.doctor.comparison import Diagnosis, Row, names_of

NAMES = {index: f'a-node-with-a-long-name-{index}' for index in range(40)}
ROWS = [
    Row('memory', 'ok', tuple(NAMES), '200 GB free'),
    Row('huge pages', 'warning', (3,), 'never', 'sudo ' + 'word ' * 40),
    Row('GPU errors', 'failure', (7, 8, 9), 'uncorrected ' * 20, 'replace the GPU'),
]


def test_the_table_has_100_columns_and_failures_first():
    lines = Diagnosis(ROWS, NAMES, 12.3).lines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line and not line.startswith(' ')][1:4] == ['FAILURE', 'warning', 'ok']
    assert 'and 1 more' in '\n'.join(lines)
    assert lines[-1] == '1 failure, 1 warning: training would fail'
    assert ' '.join(' '.join(lines).split()).count('word') == 40, 'nothing is cut off'


def test_warnings_do_not_fail():
    assert Diagnosis(ROWS, NAMES, 1.0).exit_code == 1
    assert Diagnosis(ROWS[:2], NAMES, 1.0).exit_code == 0


def test_json_has_every_row():
    found = json.loads(Diagnosis(ROWS, NAMES, 1.0).to_json())
    assert found['exit_code'] == 1
    assert [row['nodes'] for row in found['checks']][1] == [NAMES[3]]
    assert len(found['checks']) == 3


def test_processes_of_one_host_have_different_names():
    assert names_of({0: 'a', 1: 'b', 2: 'b', 3: ''}) == {0: 'a', 1: 'b/1', 2: 'b/2', 3: 'process 3'}
