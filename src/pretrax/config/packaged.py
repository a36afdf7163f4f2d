"""The configurations of pretrax: `quickstart` is configs/quickstart.yaml, `scale/16b` configs/scale/16b.yaml."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / 'configs', _PACKAGE.parents[1] / 'configs')  # in a wheel, and in the repository

SCHEMA = 'pretrax-schema.json'


def find_packaged(name: str) -> Path | None:
    """The file of a packaged configuration; None if there is none of this name."""
    return _packaged().get(name)


def packaged_schema() -> Path:
    """The JSON Schema of configurations, without plugins; `pretrax config schema` prints it."""
    return next(folder for folder in _FOLDERS if (folder / SCHEMA).is_file()) / SCHEMA


def packaged_names() -> list[str]:
    """The names of all packaged configurations."""
    return sorted(_packaged())


def _packaged() -> dict[str, Path]:
    folder = next((folder for folder in _FOLDERS if (folder / 'quickstart.yaml').is_file()), None)
    files = sorted(folder.rglob('*.yaml')) if folder else []
    return {path.relative_to(folder).with_suffix('').as_posix(): path for path in files if folder}
