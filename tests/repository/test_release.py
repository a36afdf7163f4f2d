"""scripts/release.py builds packages that train outside the repository, and refuses a release whose files disagree."""

import datetime
import importlib.util
import shutil
import subprocess
import sys

import pytest

from pretrax import __version__
from repository.commands import REPOSITORY


@pytest.fixture
def clone(tmp_path):
    """A copy of the files under version control, with the date of a release in CHANGELOG.md."""
    listed = subprocess.run(
        ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', 'src', 'configs', 'scripts', '*.md',
        '*.cff', '*.toml', 'LICENSE', 'uv.lock', '.gitignore'],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.rstrip('\0').split('\0')  # fmt: skip
    for name in listed:
        (tmp_path / 'clone' / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / 'clone' / name)
    changelog = tmp_path / 'clone' / 'CHANGELOG.md'
    dated = datetime.date(2026, 1, 31).isoformat()
    changelog.write_text(changelog.read_text().replace('] - unreleased', f'] - {dated}'))
    return tmp_path / 'clone'


def release(clone, *flags):
    return subprocess.run(
        [sys.executable, clone / 'scripts' / 'release.py', *flags],
        cwd=clone, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip


def change(file, old, new):
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_a_release_whose_files_disagree_is_refused(clone):
    script = module(clone)
    assert script.version_problems(clone, script.version_of(clone)) == []
    change(clone / 'src/pretrax/__init__.py', f"'{__version__}'", "'9.9.9'")
    change(clone / 'CHANGELOG.md', '] - 2026-01-31', '] - unreleased')
    done = release(clone, '--any-tree')
    assert done.returncode == 1
    assert f'CHANGELOG.md begins with {__version__}, but src/pretrax/__init__.py has 9.9.9' in done.stderr
    assert f'CITATION.cff has version {__version__}; write 9.9.9' in done.stderr
    [undated] = script.version_problems(clone, __version__)
    assert "is 'unreleased'; write the date of the release" in undated


def test_a_tree_with_changes_is_refused(clone):
    subprocess.run(['git', 'init', '--quiet'], cwd=clone, check=True)
    done = release(clone)
    assert done.returncode == 1
    assert 'the working tree has changes that are not committed' in done.stderr
    assert not (clone / 'dist').exists()


def test_metadata_that_an_index_refuses_is_found(clone):
    script = module(clone)
    good = (
        f'Metadata-Version: 2.4\nName: pretrax\nVersion: {__version__}\nSummary: S\nRequires-Python: >=3.12\n'
        'License-Expression: Apache-2.0\nLicense-File: LICENSE\nDescription-Content-Type: text/markdown\n\n# pretrax\n'
    )
    problems = [
        script.metadata_problems(script.Parser().parsestr(text), __version__)
        for text in (
            good,
            good.replace('\n# pretrax\n', ''),
            'Requires-Dist: a @ file:///tmp/a\n' + good,
            f'{good}[a](https://b.c) [d](#d) [e](docs/e.md) ![f](docs/f.png)\n',
        )
    ]
    assert [len(found) for found in problems] == [0, 1, 1, 2]


def test_the_readme_of_a_package_has_no_links_into_the_repository():
    readme_for_index = module(REPOSITORY, 'package_readme').readme_for_index
    text = '[a](docs/a.md#b) ![c](docs/c.png) [d](https://d.e) [f](#f)'
    assert readme_for_index(text, None, '1') == 'a  [d](https://d.e) [f](#f)'
    at = 'https://forge.example/pretrax'
    assert readme_for_index(text, f'{at}/', '1') == (
        f'[a]({at}/blob/v1/docs/a.md#b) ![c]({at}/raw/v1/docs/c.png) [d](https://d.e) [f](#f)'
    )
    assert '](docs' not in readme_for_index((REPOSITORY / 'README.md').read_text(), None, '1')


@pytest.mark.nightly
def test_both_packages_of_a_release_train_in_a_new_environment(clone, monkeypatch):
    monkeypatch.setenv('UV_OFFLINE', '1')
    done = release(clone, '--any-tree', '--locked')
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.name for path in (clone / 'dist').iterdir()} - {'.gitignore'}
    assert built == {f'pretrax-{__version__}-py3-none-any.whl', f'pretrax-{__version__}.tar.gz'}
    assert 'uv publish ' in done.stdout.splitlines()[-1]


def module(clone, name='release'):
    spec = importlib.util.spec_from_file_location(name, clone / 'scripts' / f'{name}.py')
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
