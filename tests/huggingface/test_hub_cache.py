"""Ids of the hub without a network, from the cache that huggingface_hub keeps: refs, snapshots of links, blobs.

The layout is built by hand, as huggingface.co/docs/huggingface_hub/guides/manage-cache has it, and read in a process of
its own, since the library takes its variables from the environment when it is imported.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

GOLDEN = Path(__file__).parents[1] / 'goldens' / 'llama2'
MAIN, OLDER = '1' * 40, '2' * 40
# Each argument is a command line as JSON; what it printed is followed by how it ended.
COMMANDS = """
import json, sys
from pretrax.cli import main
for command in sys.argv[1:]:
    try:
        main(json.loads(command))
    except SystemExit as ended:
        print('ended', ended.code or 0, flush=True)
"""


def cached(cache, repository, revisions):
    """A repository in the cache: the files of each commit are links to blobs, which are named by their content."""
    root = cache / f'models--{repository.replace("/", "--")}'
    for commit, (refs, files) in revisions.items():
        for ref in refs:
            (root / 'refs' / ref).parent.mkdir(parents=True, exist_ok=True)
            (root / 'refs' / ref).write_text(commit)
        (root / 'snapshots' / commit).mkdir(parents=True)
        for name, content in files.items():
            blob = root / 'blobs' / hashlib.sha256(content).hexdigest()
            blob.parent.mkdir(exist_ok=True)
            blob.write_bytes(content)
            (root / 'snapshots' / commit / name).symlink_to(Path('../../blobs') / blob.name)
    return root


def pretrax(cache, *commands):
    """How each command ended, and what was said in all."""
    environment = os.environ | {'HF_HUB_OFFLINE': '1', 'HF_HUB_CACHE': str(cache)}
    environment.pop('XLA_FLAGS', None)
    done = subprocess.run(
        [sys.executable, '-c', COMMANDS, *(json.dumps([str(word) for word in command]) for command in commands)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    parts = done.stdout.split('ended ')
    return [int(part.split()[0]) for part in parts[1:]], done.stdout


@pytest.fixture
def cache(tmp_path):
    """org/tiny: main and a tag, which have other weights."""
    config = (GOLDEN / 'config.json').read_bytes()
    weights = load_file(GOLDEN / 'model.safetensors')
    before = save({name: x + 1 for name, x in weights.items()})
    main = {'config.json': config, 'model.safetensors': (GOLDEN / 'model.safetensors').read_bytes()}
    older = {'config.json': config, 'model.safetensors': before}
    root = cached(tmp_path / 'hub', 'org/tiny', {MAIN: (['main'], main), OLDER: (['v1'], older)})
    assert len(list((root / 'blobs').iterdir())) == 3  # both commits share config.json
    return tmp_path / 'hub'


@pytest.mark.slow
def test_hub_id_is_read_from_the_cache_by_revision(cache, tmp_path):
    places = {'main': 'org/tiny', 'tag': 'org/tiny@v1', 'commit': f'org/tiny@{OLDER}'}
    commands = [command for name, place in places.items() for command in (
        ('import', place, '--out', tmp_path / name), ('export', tmp_path / name, tmp_path / 'out' / name))]  # fmt: skip
    refused = [('import', place, '--out', tmp_path / 'no') for place in ('org/other', 'org/tiny@v9')]
    codes, said = pretrax(cache, *commands, *refused)
    assert codes == [0] * 6 + [2] * 2, said
    expected = load_file(GOLDEN / 'model.safetensors')
    for name, more in (('main', 0), ('tag', 1), ('commit', 1)):
        found = load_file(tmp_path / 'out' / name / 'model.safetensors')
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], x + more) for key, x in expected.items()), name
    for place in ('org/other', 'org/tiny@v9'):
        assert f'{place}: no such directory, and it cannot be downloaded from the hub; HF_HUB_OFFLINE is set' in said
    assert not (tmp_path / 'no').exists()


@pytest.mark.slow
def test_interrupted_download_is_rejected(cache, tmp_path):
    """The snapshot is there, and a link of it leads nowhere, or a file of it was never asked for."""
    snapshot = cache / 'models--org--tiny' / 'snapshots' / MAIN
    (snapshot / 'model.safetensors').resolve().unlink()
    codes, said = pretrax(cache, ('import', 'org/tiny', '--out', tmp_path / 'run'))
    assert codes == [2], said
    assert f'{MAIN}: model.safetensors is a broken link\n' in said
    (snapshot / 'model.safetensors').unlink()
    codes, said = pretrax(cache, ('import', 'org/tiny', '--out', tmp_path / 'run'))
    assert codes == [2], said
    assert 'no .safetensors file' in said
    assert not (tmp_path / 'run').exists()
