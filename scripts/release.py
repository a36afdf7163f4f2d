"""Builds the packages of a release and checks them. It uploads nothing.

    python scripts/release.py

The working tree must be clean, and src/pretrax/__init__.py, CHANGELOG.md and CITATION.cff must agree on the version.
The wheel, and a wheel that is built from the sdist, are each installed into a new environment outside the repository,
where they have to train with the newest packages that pyproject.toml allows.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TRAINING = ['steps=2', 'schedule.warmup=1', 'model.n_layers=1', 'data={name: synthetic, vocab_size: 64}', 'mesh.d=1']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=REPOSITORY / 'dist', help='directory of the packages (dist)')
    parser.add_argument('--any-tree', action='store_true', help='allow changes that are not committed')
    parser.add_argument('--locked', action='store_true', help='train with the packages of uv.lock, not the newest ones')
    options = parser.parse_args()
    version = version_of(REPOSITORY)
    problems = version_problems(REPOSITORY, version)
    if not options.any_tree and (changed := run('git', 'status', '--porcelain')):
        problems.append(f'the working tree has changes that are not committed:\n{changed.rstrip()}')
    if problems:
        sys.exit('\n'.join(problems))
    step(f'build pretrax {version}')
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob('pretrax-*'):
        old.unlink()
    run('uv', 'build', '--quiet', '--out-dir', str(options.out), str(REPOSITORY))
    [wheel], [sdist] = options.out.glob('pretrax-*.whl'), options.out.glob('pretrax-*.tar.gz')
    for package, metadata in ((wheel, wheel_metadata(wheel)), (sdist, sdist_metadata(sdist))):
        step(f'metadata of {package.name}')
        if wrong := metadata_problems(metadata, version):
            sys.exit('\n'.join(wrong))
    for package in (wheel, sdist):
        step(f'install {package.name} in a new environment, and train')
        try_package(package, version, options.locked)
    step('next')
    print(f'git tag -a v{version} -m "pretrax {version}"\nuv publish {wheel} {sdist}')


def version_of(repository: Path) -> str:
    """The version in `src/pretrax/__init__.py`."""
    text = (repository / 'src' / 'pretrax' / '__init__.py').read_text()
    found = re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE)
    assert found, 'src/pretrax/__init__.py has a version'
    return found[1]


def version_problems(repository: Path, version: str) -> list[str]:
    """Where the files disagree on the version, one line each."""
    problems = []
    heading = re.search(r'^## \[([^\]]+)\] - (.+)$', (repository / 'CHANGELOG.md').read_text(), re.MULTILINE)
    if heading is None or heading[1] != version:
        newest = heading[1] if heading else 'no version'
        problems.append(f'CHANGELOG.md begins with {newest}, but src/pretrax/__init__.py has {version}: add a section')
    elif not is_date(heading[2]):
        problems.append(f'CHANGELOG.md: {version} is {heading[2]!r}; write the date of the release, such as 2026-01-31')
    citation = re.search(r'^version: (.+)$', (repository / 'CITATION.cff').read_text(), re.MULTILINE)
    if citation is None or citation[1] != version:
        problems.append(f'CITATION.cff has version {citation[1] if citation else "none"}; write {version}')
    return problems


def is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def wheel_metadata(path: Path) -> Message:
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
        return Parser().parsestr(archive.read(name).decode())


def sdist_metadata(path: Path) -> Message:
    with tarfile.open(path) as archive:
        stream = archive.extractfile(f'{path.name.removesuffix(".tar.gz")}/PKG-INFO')
        assert stream, 'an sdist has PKG-INFO'
        return Parser().parsestr(stream.read().decode())


def metadata_problems(metadata: Message, version: str) -> list[str]:
    """What an index would refuse or show badly, one line each."""
    expected = {'Name': 'pretrax', 'Version': version, 'License-Expression': 'Apache-2.0'}
    problems = [
        f'{key} is {metadata[key]!r}; expected {value!r}' for key, value in expected.items() if metadata[key] != value
    ]
    if metadata['Description-Content-Type'] != 'text/markdown' or not metadata.get_payload():
        problems.append('README.md is missing, or is not marked as Markdown')
    problems += [f'{key} is missing' for key in ('Summary', 'Requires-Python', 'License-File') if not metadata[key]]
    links = re.findall(r'\]\((?!\w+:|#)([^)\s]+)\)', str(metadata.get_payload()))
    problems += [f'README.md has a link that only works in the repository: {link}' for link in links]
    problems += [f'not allowed in an index: {line}' for line in metadata.get_all('Requires-Dist', []) if ' @ ' in line]
    return problems


def try_package(package: Path, version: str, locked: bool) -> None:
    """Installs a package in a new environment, and runs it outside the repository."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = directory / 'environment'
        run('uv', 'venv', '--quiet', '--python', sys.executable, str(environment))
        if locked:
            run(
                'uv',
                'sync',
                '--quiet',
                '--locked',
                '--no-dev',
                '--no-install-project',
                UV_PROJECT_ENVIRONMENT=environment,
            )
        only = ['--no-deps'] if locked else []
        run('uv', 'pip', 'install', '--quiet', *only, '--python', str(environment), str(package))
        pretrax = str(environment / 'bin' / 'pretrax')
        expect(f'pretrax {version}', run(pretrax, '--version', directory=directory))
        expect('train', run(pretrax, '--help', directory=directory))
        shown = run(pretrax, 'config', 'show', 'quickstart', directory=directory)
        expect(str(environment), shown)  # the packaged file, not that of the repository
        expect('Done: 2 steps', run(pretrax, 'train', 'quickstart', *TRAINING, directory=directory))


def run(*command: str, directory: Path = REPOSITORY, **variables: Path) -> str:
    """What a command prints. A failure ends this script with its output."""
    outside = {key: value for key, value in os.environ.items() if key not in ('PYTHONPATH', 'VIRTUAL_ENV', 'XLA_FLAGS')}
    done = subprocess.run(
        command, cwd=directory, env=outside | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f'{" ".join(command)}\n{done.stdout}{done.stderr}')
    return done.stdout


def expect(text: str, printed: str) -> None:
    if text not in printed:
        sys.exit(f'expected {text!r} in:\n{printed}')


def step(text: str) -> None:
    print(f'== {text}', flush=True)


if __name__ == '__main__':
    main()
