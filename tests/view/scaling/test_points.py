"""Points of a scaling law, from the rows of a table."""

import json

import pytest

from pretrax.errors import UserError
from pretrax.view.scaling.report import matching, read_table


def test_rows_with_the_same_run_are_a_curve(tmp_path):
    rows = [{'run': 'a', 'params': 10, 'tokens': tokens, 'loss': 5 - tokens / 100} for tokens in (100, 50)]
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (point,) = read_table(tmp_path / 'p.jsonl')
    assert (point.params, point.tokens, point.loss, point.flops) == (10, 100, 4, 6000)
    assert point.curve == ((50, 4.5), (100, 4))


def test_a_row_that_is_no_point_is_named(tmp_path):
    (tmp_path / 'p.csv').write_text('params,tokens,loss\n10,10,1\n10,x,1\n')
    with pytest.raises(UserError, match=r'p.csv:3 has no params, tokens and loss'):
        read_table(tmp_path / 'p.csv')


def test_the_name_of_a_run_may_have_brackets(tmp_path):
    for name in ('a [1]', 'a 1', 'b'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'metrics.jsonl').write_text('')
    assert matching(tmp_path, ['a [1]']) == [tmp_path / 'a [1]']
    assert matching(tmp_path, ['a*', f'{tmp_path}/b']) == [tmp_path / 'a 1', tmp_path / 'a [1]', tmp_path / 'b']
