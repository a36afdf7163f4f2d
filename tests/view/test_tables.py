"""Tables of text."""

from pretrax.view.tables import csv_table, markdown_table, text_table


def test_tables_keep_their_cells_apart():
    rows = [['name', 'n'], ['a|b<c', '1'], ['*x*', '20']]
    assert text_table(rows, left=(0,)) == ['name    n', 'a|b<c   1', '*x*    20']
    assert markdown_table(rows) == ['| name | n |', '| --- | --- |', '| a\\|b&lt;c | 1 |', '| \\*x\\* | 20 |']
    assert csv_table([['a', 1], ['b,c', None]]) == 'a,1\n"b,c",\n'
