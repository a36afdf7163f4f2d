"""Python files of assignments are read and never executed."""

import pytest

from pretrax.errors import UserError
from pretrax.translate.python_assignments import Computed, read_assignments


def test_literals_and_arithmetic_have_python_s_values():
    text = (
        '"""A docstring."""\na = 5 * 8\nb: int = a // 3 + 2**3\nc = -1e-1\nd = not True\n'
        "e = 'x' + 'y'\nf = None\ng = [a, 1.5]\na = b % 4\n"
    )
    names = {}
    exec(text, names)  # what Python makes of it
    assert read_assignments(text, 'a.py') == {name: names[name] for name in 'abcdefg'}


@pytest.mark.parametrize(
    ('line', 'what'),
    [
        ('a = open("touched", "w")', 'a call'),
        ('import os\na = os.getpid()', 'a call'),
        ('from os import curdir\na = curdir', 'not a plain value'),
        ('a = "ft-" + str(1)', 'a call'),
        ('a = unknown', 'not a plain value'),
        ('a = (1).real', 'not a plain value'),
        ('a, b = 1, 2', 'not a plain value'),
        ('a = 1\na += 1', 'not a plain value'),
        ('for a in [1]: pass', 'not a plain value'),
        ('a = [b for b in (1, 2)]', 'not a plain value'),
        ('a = f"{1}"', 'not a plain value'),
        ('a = 1 if True else 2', 'not a plain value'),
        ('a = 1 / 0', 'division by zero'),
        ('a = 10 ** 10 ** 10', 'exponent'),
        ('a = 2 ** 64', 'larger than 64 bits'),
        ('a = 9999999999999999999999', 'larger than 64 bits'),
        ('a = "x" * 1000000000', 'not a number'),
        ('a = ' + '-' * 5000 + '1', 'a.py'),
        ('a: 1', 'not a plain value'),
        ('a =', 'not Python'),
        ('a = "\\0' + '\0"', 'not Python'),
    ],
)
def test_all_else_is_refused_with_its_line(tmp_path, monkeypatch, line, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        read_assignments(line, 'a.py')
    assert what in str(refused.value)
    assert str(refused.value).startswith('a.py')
    assert len(str(refused.value).splitlines()) <= 10
    assert not (tmp_path / 'touched').exists()


def test_an_import_is_skipped_and_a_name_that_may_be_computed_keeps_its_source(tmp_path, monkeypatch):
    (tmp_path / 'module_of_mine.py').write_text('open("touched", "w")\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = "import module_of_mine\nlabel = 'ft-' + str(open('touched', 'w'))\na = 1\n"
    assert read_assignments(text, 'a.py', {'label'}) == {'label': Computed("'ft-' + str(open('touched', 'w'))"), 'a': 1}
    assert not (tmp_path / 'touched').exists()
    with pytest.raises(UserError, match='cannot be computed'):
        read_assignments('label = str(3)\na = label * 2\n', 'a.py', {'label'})
