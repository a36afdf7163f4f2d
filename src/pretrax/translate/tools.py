"""The tools whose configurations can be translated, how their files are read, and how one is recognized."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrax.config import from_values
from pretrax.config.source import read_file
from pretrax.errors import UserError, system_errors
from pretrax.tables import nested
from pretrax.translate import maxtext, modalities, nanogpt
from pretrax.translate.python_assignments import read_assignments
from pretrax.translate.translation import Translation

_LARGEST = 256 * 1024  # bytes; a larger file is not a configuration


@dataclasses.dataclass(frozen=True)
class Tool:
    """How the files of a tool are read, and which keys they have."""

    title: str  # its name, as its authors write it
    read: Callable[[Path], dict[str, Any]]  # a file -> its keys; nested ones are dotted. Raises UserError.
    defaults: Mapping[str, Any]  # what its files may leave out
    source: str  # where the tool has these defaults
    typical: frozenset[str]  # each file of this tool has at least one of these keys
    # Fills in a translation, given the name of the file without its ending, and the number of devices
    fill: Callable[[Translation, str, int | None], None]


def _read_python(path: Path) -> dict[str, Any]:
    with system_errors(f'{path} cannot be read', '\nexpected a Python file of assignments'):
        content = path.read_bytes()
        if len(content) > _LARGEST:
            raise UserError(f'{path} has {len(content):,} bytes; expected a configuration, of at most {_LARGEST:,}')
        text = content.decode()
    return read_assignments(text, str(path), nanogpt.COMPUTED)


TOOLS = {
    'nanogpt': Tool(
        'nanoGPT', _read_python, nanogpt.DEFAULTS, nanogpt.SOURCE, frozenset(nanogpt.TYPICAL), nanogpt.translate
    ),
    'modalities': Tool(
        'Modalities',
        lambda path: modalities.flat(read_file(path).values),
        {},
        modalities.SOURCE,
        frozenset({modalities.MARK}),
        modalities.translate,
    ),
    'maxtext': Tool(
        'MaxText', maxtext.read, maxtext.DEFAULTS, maxtext.SOURCE, frozenset(maxtext.TYPICAL), maxtext.translate
    ),
}


def translate(tool: str, path: Path, devices: int | None = None) -> Translation:
    """Translates a file of `tool`, one of TOOLS. Each of its keys is translated, dropped with a reason, or refused.

    Args:
        tool: a key of TOOLS.
        path: the file. It is read as data: nothing in it is executed, and no variable of the environment is read.
        devices: how many devices the batch of the file is meant for, if it counts sequences per device.

    Raises:
        UserError: the file cannot be read, is of another tool, or has a value that cannot be translated.
    """
    chosen = TOOLS[tool]
    try:
        given = chosen.read(path)
    except UserError as error:
        if found := _looks_like(chosen, path):
            raise UserError(f'{path} is not a configuration of {chosen.title}\n{found}') from error
        raise
    if not _is_of(chosen, given):
        keys = ', '.join(sorted(chosen.typical)[:4])
        message = f'{path} is not a configuration of {chosen.title}: it has none of its keys, such as {keys}'
        raise UserError('\n'.join(filter(None, [message, _looks_like(chosen, path)])))
    translation = Translation(chosen.title, path.name, given, chosen.defaults, chosen.source)
    chosen.fill(translation, path.stem, devices)
    translation.finish()
    try:
        from_values(nested(translation.values))
    except UserError as error:
        raise UserError(
            f'{path}: its values do not form a valid configuration of pretrax:\n{str(error).replace("values: ", "")}'
        ) from error
    return translation


def _is_of(tool: Tool, given: Mapping[str, Any]) -> bool:
    return any(key in tool.typical or key.rpartition('.')[2] in tool.typical for key in given)


def _looks_like(tool: Tool, path: Path) -> str:
    """A line that names the other tool that the file belongs to; '' if it is of none."""
    for name, other in TOOLS.items():
        try:
            if other is not tool and _is_of(other, other.read(path)):
                return f'  it looks like one of {other.title}: pretrax import-config {name} {path}'
        except UserError:
            continue
    return ''
