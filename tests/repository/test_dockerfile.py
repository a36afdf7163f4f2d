"""The Dockerfile has an image for each target, from files and extras that exist, whose user is not root.

Nothing here can pull an image, so the file is read, not built.
"""

import re
import shlex
import tomllib

import pytest

from repository.commands import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / 'pyproject.toml').read_text())['project']
TEXT = re.sub(r'\\\n', ' ', (REPOSITORY / 'Dockerfile').read_text())
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in TEXT.splitlines() if line and not line.startswith('#')]


def stages():
    """{stage: (its base, its instructions)}, in order."""
    found = {}
    for name, text in INSTRUCTIONS:
        if name == 'FROM':
            base, _, stage = text.partition(' AS ')
            found[stage] = (base, [])
        else:
            list(found.values())[-1][1].append((name, text))
    return found


def with_bases(stage):
    """The instructions of a stage, those of its bases first."""
    base, own = stages()[stage]
    return [*(with_bases(base) if base in stages() else []), *own]


def test_the_targets_are_those_of_the_comment_and_the_last_is_for_cpus():
    named = set(re.findall(r'^#   docker build --target (\S+)', TEXT, re.MULTILINE))
    assert named == {'cpu', 'cuda', 'tpu'}
    assert named <= set(stages())
    assert list(stages())[-1] == 'cpu'


@pytest.mark.parametrize('target', ['cpu', 'cuda', 'tpu'])
def test_the_user_of_an_image_is_not_root_and_the_environment_is_that_of_the_target(target):
    users = [text for name, text in with_bases(target) if name == 'USER']
    assert users
    assert users[-1].split(':')[0] not in ('root', '0')
    [copied] = [text for name, text in stages()[target][1] if name == 'COPY']
    source = copied.split()[0].removeprefix('--from=')
    assert source == f'build-{target}'
    last = [text for name, text in with_bases(source) if name == 'RUN'][-1]
    extras = re.findall(r'--extra (\S+)', last)
    assert set(extras) - {'cuda', 'tpu'} == {'cloud', 'tensorboard'}
    assert set(extras) & {'cuda', 'tpu'} == {target} - {'cpu'}
    assert '--locked' in last


def test_extras_exist():
    extras = set(re.findall(r'--extra (\S+)', TEXT))
    assert extras
    assert extras <= set(PROJECT['optional-dependencies'])


def test_what_is_copied_exists_and_reaches_the_build():
    ignored = (REPOSITORY / '.dockerignore').read_text().splitlines()
    sources = {
        source
        for name, text in INSTRUCTIONS
        if name == 'COPY' and not text.startswith('--from')
        for source in shlex.split(text)[:-1]
    }
    assert {'pyproject.toml', 'uv.lock', '.'} <= sources
    for source in sources - {'.'}:
        assert (REPOSITORY / source).exists(), source
    kept = {line.removeprefix('!') for line in ignored if line.startswith('!')}
    assert ignored[1] == '*'
    assert all((REPOSITORY / name).exists() for name in kept)
    needed = {
        'README.md',
        *PROJECT['license-files'],
        'src',
        'configs',
        'pyproject.toml',
        'uv.lock',
        'scripts/package_readme.py',
    }
    assert needed <= kept  # what a build of the wheel reads
