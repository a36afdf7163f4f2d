"""Text that every machine has, and that the built-in corpus (`text: stdlib`) leaves out: of Python's own installation."""

import ast
import functools
import sysconfig
from pathlib import Path

from pretrax.errors import UserError

_PLACES = ('idlelib/idle_test', 'test', 'turtledemo')  # the first that is there; some installations have no tests
_SMALLEST, _LARGEST = 2_000, 200_000  # bytes


@functools.cache
def documentation() -> tuple[str, ...]:
    """The topics of Python's language reference, English prose with some code, in the order of their names."""
    path = Path(sysconfig.get_path('stdlib')) / 'pydoc_data' / 'topics.py'
    try:
        tree = ast.parse(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}; these tasks are made from it') from None
    [values] = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    topics: dict[str, str] = ast.literal_eval(values)
    return tuple(dict.fromkeys(topics[name] for name in sorted(topics)))


@functools.cache
def python_files() -> tuple[str, ...]:
    """Source files in the order of their paths."""
    root = Path(sysconfig.get_path('stdlib'))
    for place in _PLACES:
        paths = sorted(path for path in (root / place).glob('*.py') if _SMALLEST <= path.stat().st_size <= _LARGEST)
        if paths:
            return tuple(path.read_text(encoding='utf-8', errors='replace') for path in paths)
    raise UserError(f'{root} has none of {", ".join(_PLACES)}; these tasks are made from their files')


@functools.cache
def paragraphs() -> tuple[tuple[int, str], ...]:
    """The paragraphs of prose of the documentation on one line each, with the number of their topic."""
    found = {}
    for number, topic in enumerate(documentation()):
        for block in topic.split('\n\n'):
            if (
                not block.startswith((' ', '*', '>'))
                and block.endswith('.')
                and '::=' not in block
                and '====' not in block
            ):
                found.setdefault(' '.join(block.split()), number)
    return tuple((number, text) for text, number in found.items())
