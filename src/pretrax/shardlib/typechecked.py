"""`typechecked`: checks the arguments, the result and annotated locals of a function while it is traced."""

import ast
import functools
import inspect
import itertools
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pretrax.shardlib.check import check, current_scope
from pretrax.shardlib.errors import ShardingError
from pretrax.shardlib.types import is_array_annotation

_HERE = str(Path(__file__).parent)


def typechecked[F: Callable](function: F) -> F:
    """Checks the arguments, the result and every annotated local assignment `x: f32['B/d M'] = ...` of a function.

    The outermost checked function opens a scope, and the functions it calls share it. Annotations other than array
    types are ignored. Local assignments are read from the function's source; if there is no source, a warning reports
    that they are not checked. Its operations are in a named scope of its name. Apply it as the innermost decorator.
    """
    if not hasattr(function, '__name__'):
        raise TypeError(f'{function!r:.60} is not a function: decorate the function that it calls')
    hints: dict[str, Any] = {}
    signature = inspect.signature(function)
    body = _with_checked_locals(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not hints:
            hints.update({'return': None}, **array_hints(function, signature))
        bound = signature.bind(*args, **kwargs)
        with current_scope(), jax.named_scope(function.__name__):
            for name, value in bound.arguments.items():
                bound.arguments[name] = check(value, hints.get(name), f"argument '{name}{{}}' of {function.__name__}")
            return check(body(*bound.args, **bound.kwargs), hints['return'], f'result of {function.__name__}')

    checked._locals_are_checked = True  # type: ignore[attr-defined]
    return typing.cast(F, checked)


def array_hints(function: Any, signature: inspect.Signature) -> dict[str, Any]:
    """The annotations of a function that contain array types. Annotations written as strings are evaluated."""
    annotations = function.__annotations__
    if any(isinstance(annotation, str) for annotation in annotations.values()):
        unwrapped = inspect.unwrap(function)
        try:
            annotations = typing.get_type_hints(unwrapped, localns=dict(inspect.getclosurevars(unwrapped).nonlocals))
        except NameError as error:
            raise ShardingError(
                f"an annotation of {function.__name__} names '{error.name}', which is not defined where the "
                'annotation is evaluated',
                fix='string annotations (from __future__ import annotations) can use only global names',
            ) from error
    hints = {name: annotation for name, annotation in annotations.items() if is_array_annotation(annotation)}
    for name, parameter in signature.parameters.items():
        if name in hints and parameter.kind is parameter.VAR_POSITIONAL:
            hints[name] = types.GenericAlias(tuple, (hints[name], Ellipsis))
        elif name in hints and parameter.kind is parameter.VAR_KEYWORD:
            hints[name] = types.GenericAlias(dict, (str, hints[name]))
    return hints


class _CheckLocals(ast.NodeTransformer):
    """Rewrites `x: T = value` to `x = check(value, T, 'x')` in one function, but not in functions defined inside it."""

    def __init__(self, checker: str):
        self.checker, self.changed, self.depth = checker, False, 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.depth:
            return node
        self.depth += 1
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None or not isinstance(node.target, ast.Name):
            return node
        annotation = node.annotation
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):  # x: "f32['M']" = ...
            annotation = ast.parse(annotation.value, mode='eval').body
        what = ast.Constant(f"local '{node.target.id}{{}}', line {node.lineno}")
        call = ast.Call(ast.Name(self.checker, ast.Load()), [node.value, annotation, what], [])
        self.changed = True
        return ast.copy_location(ast.Assign([node.target], ast.copy_location(call, node.value)), node)


def _with_checked_locals(function: Any) -> Any:
    """Adds checks of annotated local assignments to a function."""
    if getattr(function, '_locals_are_checked', False) or function.__name__ == '<lambda>':
        return function
    if not isinstance(function, types.FunctionType) or hasattr(function, '__wrapped__'):
        warnings.warn(
            f'{function.__name__} is wrapped by another decorator: its locals are not checked. Make typechecked or '
            'typed_shard_map the innermost decorator',
            skip_file_prefixes=(_HERE,),
        )
        return function
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        warnings.warn(
            f'the source of {function.__name__} is not available: its locals are not checked',
            skip_file_prefixes=(_HERE,),
        )
        return function
    if lines[0][:1].isspace():  # inside `if True:` the source can keep its indentation
        module = ast.increment_lineno(ast.parse('if True:\n' + ''.join(lines)), first - 2)
        definition = typing.cast(ast.If, module.body[0]).body[0]
    else:
        module = ast.increment_lineno(ast.parse(''.join(lines)), first - 1)
        definition = module.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return function
    free = function.__code__.co_freevars
    taken = {*free, *function.__globals__, *function.__code__.co_varnames}
    checker = next(name for name in map('_check{}'.format, itertools.count()) if name not in taken)
    rewriter = _CheckLocals(checker)
    rewriter.visit(definition)
    return _recompiled(function, definition, {checker: types.CellType(check)}) if rewriter.changed else function


def _recompiled(function: Any, definition: ast.FunctionDef, more_cells: dict[str, types.CellType]) -> Any:
    """The function with another body, and the same globals, closure, defaults and line numbers."""
    definition.decorator_list, definition.returns = [], None
    every = definition.args
    for argument in [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]:
        if argument is not None:
            argument.annotation = None
    every.defaults = [ast.Constant(None) for _ in every.defaults]
    every.kw_defaults = [default and ast.Constant(None) for default in every.kw_defaults]
    # The closure's variables become arguments of an enclosing function, so that the copy has the same free variables.
    # A method stays in a class of the same name, which is part of what `self.__name` means.
    free = function.__code__.co_freevars
    names = [name for name in (*free, *more_cells) if name != '__class__']
    body: list[ast.stmt] = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    owner = function.__qualname__.split('.')[-2:-1]
    if owner and owner != ['<locals>']:
        attribute = ast.Attribute(ast.Name(owner[0], ast.Load()), definition.name, ast.Load())
        body = [ast.ClassDef(owner[0], [], [], [definition], [], type_params=[]), ast.Return(attribute)]
    arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    outer = ast.FunctionDef('_outer', arguments, body, [], None, type_params=[])
    module = ast.fix_missing_locations(ast.Module([outer], []))
    namespace: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, 'exec'), function.__globals__, namespace)
    code = namespace['_outer'](*names).__code__
    cells = dict(zip(free, function.__closure__ or (), strict=True)) | more_cells
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
