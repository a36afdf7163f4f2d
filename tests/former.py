"""What a pretrax with flat keys of `model:` wrote, before they were in sections; `tests/goldens/flat_model.tar.xz` has
it.

`configs/` are its configurations, and `models.json` what it read in them. `runs/old` is a run that stopped after step 2
of 4; `expected.json` and `generated.txt` are what the same process got at step 4. `step-manifest.json` describes its
compiled step.
"""

import functools
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrax.model.option_names import RENAMED, dotted

ARCHIVE = Path(__file__).parent / 'goldens' / 'flat_model.tar.xz'


def unpacked(directory: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter='data')
    return directory


@functools.cache
def content(name: str) -> str:
    with tarfile.open(ARCHIVE) as archive:
        file = archive.extractfile(f'./{name}')
        assert file is not None
        return file.read().decode()


def stored_config() -> dict:
    """The configuration in the manifest of the checkpoint."""
    return json.loads(content('runs/old/checkpoints/2/manifest.json'))['description']['config']


def flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section `model:` with the names of pretrax 0.1."""
    names = {key: name for name, key in RENAMED.items()}
    return {names.get(key, key): value for key, value in dotted(section).items()}
