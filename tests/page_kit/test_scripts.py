"""The scripts of pages in one file, and what their colors share with the pictures."""

import re
from importlib.resources import files

import pytest

from pretrax.page_kit import KIT, script_text
from pretrax.view.charts.chart import COLORS

SCRIPTS = [files('pretrax.view').joinpath(path) for path in ('charts/page.js', 'program/page.js', 'report/page.js')]


@pytest.mark.parametrize('script', SCRIPTS, ids=str)
def test_a_script_has_each_module_of_the_kit_once_and_imports_nothing(script):
    text = script_text(script)
    assert not re.search(r'^(import|export)\b', text, re.MULTILINE)
    assert text.count('const byId = ') == 1


def test_modules_of_the_kit_that_import_each_other_come_before_their_users(tmp_path):
    (tmp_path / 'page.js').write_text("import { askForKey } from './served.js';\naskForKey('why');\n")
    text = script_text(tmp_path / 'page.js')
    assert text.index('const byId') < text.index('function askForKey') < text.index("askForKey('why')")


def test_pictures_and_pages_have_the_same_colors():
    light = re.search(r'light: \[(.*)\]', KIT.joinpath('plots.js').read_text())
    assert light is not None
    assert tuple(re.findall('#[0-9a-f]{6}', light[1])) == COLORS
