"""The text of a compiled program in a run directory: `program.hlo.txt.gz`."""

import gzip
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pretrax.errors import UserError, system_errors
from pretrax.hlo.parse import ENTRY
from pretrax.hlo.program import MESH, Program, parse_program
from pretrax.storage import AnyPath
from pretrax.storage.locate import write_whole
from pretrax.system.gzip_file import gunzip
from pretrax.system.software import need_extra

if TYPE_CHECKING:
    import jax

TEXT = 'program.hlo.txt.gz'
_PICTURES, _TEXTS = ('.html', '.svg'), ('.txt', '.txt.gz', '.hlo', '.hlo.gz')


def write_program(directory: AnyPath, compiled: 'jax.stages.Compiled', mesh: Mapping[str, int]) -> Program:
    """Writes the optimized program with its mesh to `program.hlo.txt.gz`, for `read_program`, and returns it parsed."""
    text = compiled.as_text() or ''
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / TEXT, packed(text, mesh))
    return parse_program(text, mesh)


def packed(text: str, mesh: Mapping[str, int]) -> bytes:
    """The content of a `.txt.gz` file with a program and its mesh."""
    first = MESH + ' '.join(f'{axis}={size}' for axis, size in mesh.items())
    return gzip.compress(f'{first}\n{text}'.encode(), 6, mtime=0)


def write(path: AnyPath, content: bytes) -> None:
    """Writes a file. Raises UserError if that is not possible."""
    with system_errors(f'--graph {path}: cannot be written'):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def is_text(path: str) -> bool:
    """Whether the name of a file says that it contains the text of a program."""
    return path.endswith(_TEXTS)


def check_name(path: AnyPath) -> AnyPath:
    """The path of a file to write. Raises UserError if its name says nothing that can be written of a program, or if
    the package that lays out an .svg file is not installed.
    """
    if not path.name.endswith((*_PICTURES, '.txt.gz')):
        raise UserError(
            f'--graph {path}: its name must end in .html (a page whose groups open), .svg (a picture) or .txt.gz (the '
            'text)\n'
            'for example: --graph program.html'
        )
    if path.suffix == '.svg':
        need_extra('pictures', f'--graph {path}', 'quickjs')
    return path


def read_program(path: AnyPath) -> Program:
    """Reads a program that `write_program` or XLA (`--xla_dump_hlo_as_text`) has written, compressed or not.

    Raises:
        UserError: the file cannot be read, or contains no program.
    """
    try:
        content = path.read_bytes()
        text = (gunzip(content) if content[:2] == b'\x1f\x8b' else content).decode(errors='replace')
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: cannot be read: {getattr(error, "strerror", None) or error}') from error
    program = parse_program(text)
    if not program.computations.get(ENTRY):
        raise UserError(
            f'{path}: it contains no compiled program\n'
            'expected the text of an optimized HLO module, as in RUN/program/program.hlo.txt.gz (log.graph=true)'
        )
    return program
