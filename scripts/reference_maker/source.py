"""The source of pretrax, parsed once."""

import ast
import functools
from pathlib import Path

SOURCE = Path(__file__).parents[2] / 'src' / 'pretrax'


@functools.cache
def files() -> dict[str, ast.Module]:
    """{path below src/pretrax/: syntax tree} of every file, in order."""
    paths = sorted(SOURCE.rglob('*.py'))
    return {path.relative_to(SOURCE).as_posix(): tree(path.relative_to(SOURCE).as_posix()) for path in paths}


@functools.cache
def tree(file: str) -> ast.Module:
    """The syntax tree of a file, by its path below src/pretrax/."""
    return ast.parse((SOURCE / file).read_text())


@functools.cache
def nodes(file: str) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(tree(file)))


@functools.cache
def calls(file: str) -> list[ast.Call]:
    """The calls in a file."""
    return [node for node in nodes(file) if isinstance(node, ast.Call)]
