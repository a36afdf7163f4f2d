"""Reads `name = value` lines of Python without executing them: literals, and arithmetic of literals and earlier names.

Imports are skipped: nothing is imported, so a value that needs one is not a plain value.
"""

import ast
import dataclasses
import operator
from collections.abc import Callable, Set
from typing import Any

from pretrax.errors import UserError

_LARGEST = 2**63
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclasses.dataclass(frozen=True)
class Computed:
    """A value that only running the file would give, such as a time stamp."""

    source: str


def read_assignments(text: str, name: str, computed: Set[str] = frozenset()) -> dict[str, Any]:
    """{name: value} in the order of the file; a later assignment replaces an earlier one.

    Args:
        text: the file.
        name: what messages call it.
        computed: names whose value may be any expression, since nothing depends on it. It becomes a `Computed`.

    Raises:
        UserError: the text is not Python, or has something other than imports and assignments of such values.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f':{error.lineno}' if isinstance(error, SyntaxError) and error.lineno else ''
        raise UserError(f'{name}{line}: not Python: {getattr(error, "msg", error)}') from None
    found: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case (
                ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom()
            ):  # a docstring, or an import
                continue
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value):
                pass
            case _:
                raise _refused(node, text, name)
        try:
            found[target] = _value(value, found)
        except RecursionError:
            raise _refused(node, text, name) from None
        except _NotALiteralError as problem:
            if target not in computed:
                raise _refused(problem.node, text, name) from None
            found[target] = Computed(_first_line(value, text))
        except (ArithmeticError, TypeError) as error:
            raise UserError(f'{name}:{node.lineno}: {target} cannot be computed: {error}') from None
    return found


class _NotALiteralError(Exception):
    def __init__(self, node: ast.AST):
        self.node = node


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | str() | None):
            return node.value
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.Name(id=known) if known in names:
            return names[known]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, names)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(operand, names)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, names)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, names) for part in parts]
        case ast.BinOp(op=ast.Add(), left=left, right=right) if isinstance(_value(left, names), str):
            return _value(left, names) + _value(right, names)
        case ast.BinOp(op=operation, left=left, right=right) if type(operation) in _OPERATORS:
            first, second = _number(left, names), _number(right, names)
            if isinstance(operation, ast.Pow) and abs(second) > 64:
                raise ArithmeticError('an exponent is larger than 64')
            return _bounded(_OPERATORS[type(operation)](first, second))
        case _:
            raise _NotALiteralError(node)


def _number(node: ast.expr, names: dict[str, Any]) -> int | float:
    value = _value(node, names)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'{ast.unparse(node)[:80]} is not a number')
    return value


def _bounded(value: int | float) -> int | float:
    if not abs(value) < _LARGEST:
        raise ArithmeticError('a number is larger than 64 bits')
    return value


def _refused(node: ast.AST, text: str, name: str) -> UserError:
    line = getattr(node, 'lineno', 1)
    what = 'a call' if any(isinstance(part, ast.Call) for part in ast.walk(node)) else 'not a plain value'
    return UserError(
        f'{name}:{line}: {_first_line(node, text)}: {what}\n'
        '  expected lines such as  batch_size = 12 * 8 ; the file is read, and never executed\n'
        '  write the value itself, or remove the line'
    )


def _first_line(node: ast.AST, text: str) -> str:
    return (ast.get_source_segment(text, node) or '').partition('\n')[0][:100]
