"""Without the packages of the extra `pictures`, a verb says so before it works, and does all the rest."""

import json
import sys

import pytest

from pretrax import errors
from pretrax.cli import main

POINTS = [f'{n},{k * n},{2 + 90 / n**0.3 + 90 / (k * n) ** 0.3}' for n in (10**5, 10**6, 10**7) for k in (10, 20, 40)]


@pytest.fixture
def without_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in ('matplotlib', 'quickjs'):
        monkeypatch.setitem(sys.modules, package, None)  # importing it is an ImportError
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)


@pytest.mark.parametrize(
    ('command', 'what'),
    [
        ('mup check nothing.yaml -o a.png', 'a chart in a .png file needs the package matplotlib'),
        ('data inspect nothing --plot a.svg', 'a chart in a .svg file needs the package matplotlib'),
        ('compile nothing.yaml --graph a.svg', '--graph a.svg needs the package quickjs'),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(command, what, without_pictures, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    assert f'{what}\n  in the repository: uv sync --inexact --extra pictures --no-dev' in capsys.readouterr().err


def test_a_fit_without_its_picture_is_kept(without_pictures, tmp_path, capsys):
    (tmp_path / 'points.csv').write_text('\n'.join(['params,tokens,loss', *POINTS]))
    (tmp_path / 'laws.yaml').write_text(json.dumps({'points': 'points.csv', 'approaches': [3], 'bootstrap': 0}))
    with pytest.raises(SystemExit) as ended:
        main(['scaling', 'laws.yaml', '--out', 'laws'])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert 'wrote laws/fit.json\na chart in a .svg file needs the package matplotlib' in said, said
    assert [path.name for path in (tmp_path / 'laws').iterdir()] == ['fit.json']


def test_the_advice_of_an_installed_package_names_pip(tmp_path, monkeypatch):
    """A clone has a pyproject.toml above `src`, site-packages has none."""
    assert errors.install_extra('ray').startswith('in the repository: uv sync --inexact --extra ray --no-dev ')
    monkeypatch.setattr(errors, '__file__', str(tmp_path / 'site-packages' / 'pretrax' / 'errors.py'))
    assert errors.install_extra('ray').startswith("pip install 'pretrax[ray]' ")
