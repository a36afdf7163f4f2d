"""The parts of a message are joined by a space, a line break or punctuation: no 'does not existdid you mean'.

A part is a string, or an expression in an f-string or beside a `+`. Its texts are followed through conditional
expressions, variables, tables, and the functions that are called for it.
"""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from reference_maker.source import SOURCE, calls, files, nodes, tree

UNKNOWN = '\0'  # a text that is not in the source
TEXTS_FOR_USERS = re.compile(r'\w*Error|print|say|warn|notice|Problem|mistake|exit')
PLURALS = {'', 's', 'es'}
# Two literals that follow each other, with a word at the end of the first and at the beginning of the second
GLUED_LITERALS = re.compile(r"""(?:(?<!\\)\w|[,;:.!?])['"]\s*\n\s*f?['"](?![A-Z]{2})\w.*""")


@functools.cache
def assigned(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """{variable: what a function or a module assigns to it}."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.NamedExpr) and node.value is not None:
            for target in getattr(node, 'targets', None) or [node.target]:
                values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
                pairs = [(target, value) for value in values]
                if isinstance(target, ast.Tuple):
                    pairs = [
                        pair for each in values for pair in zip(target.elts, getattr(each, 'elts', []), strict=False)
                    ]
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, []).append(value)
    return found


def parameters(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """{parameter: its default}."""
    arguments = function.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    defaults = [None] * (len(names) - len(arguments.defaults)) + arguments.defaults
    names += [each.arg for each in arguments.kwonlyargs]
    return dict(zip(names, [*defaults, *arguments.kw_defaults], strict=True))


def values(name: str, file: str, scope: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """What a variable may be, and where: what it is assigned, or for a parameter its default or what callers pass."""
    if name in assigned(scope) or not isinstance(scope, ast.FunctionDef) or name not in parameters(scope):
        yield from ((value, scope) for value in (assigned(scope).get(name) or assigned(tree(file)).get(name, [])))
    elif default := parameters(scope)[name]:
        yield default, scope
    else:
        place = list(parameters(scope)).index(name) - ('self' in parameters(scope))
        for caller in [node for node in nodes(file) if isinstance(node, ast.FunctionDef)]:
            for call in ast.walk(caller):
                if (
                    isinstance(call, ast.Call)
                    and getattr(call.func, 'id', getattr(call.func, 'attr', '')) == scope.name
                ):
                    passed = [each.value for each in call.keywords if each.arg == name]
                    yield from ((value, caller) for value in passed or call.args[place : place + 1])


def definition(name: str, file: str) -> tuple[str, ast.FunctionDef] | None:
    """The function of a name and its file; imports from pretrax are followed."""
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return file, node
    for node in nodes(file):
        is_ours = isinstance(node, ast.ImportFrom) and (node.module or '').startswith('pretrax.')
        if is_ours and any(each.name == name for each in node.names):
            other = '/'.join(node.module.split('.')[1:])
            return definition(name, f'{other}.py' if (SOURCE / f'{other}.py').exists() else f'{other}/__init__.py')
    return None


def texts(node: ast.AST, file: str, scope: ast.AST, depth: int = 8) -> list[str]:
    """The texts that an expression may have, with UNKNOWN for what the source does not tell."""
    again = functools.partial(texts, file=file, scope=scope, depth=depth - 1)
    found: list[str] = []
    match node:
        case _ if depth == 0:
            pass
        case ast.Constant(value):
            found = [str(value)]
        case ast.FormattedValue(value):
            found = again(value)
        case ast.JoinedStr() | ast.BinOp(op=ast.Add()):
            found = ['']
            for part in parts(node):
                found = [before + text for before in found for text in again(part)][:50]
        case ast.IfExp(body=one, orelse=other):
            found = [*again(one), *again(other)]
        case ast.BoolOp(ast.Or(), options):
            found = [text for option in options for text in again(option)]
        case ast.Name(name):
            for value, place in values(name, file, scope):
                found += texts(value, file, place, depth - 1)
        case ast.Call(func=ast.Name(name)) if function := definition(name, file):
            for each in ast.walk(function[1]):
                if isinstance(each, ast.Return) and each.value is not None:
                    found += texts(each.value, *function, depth - 1)
        case ast.Subscript(value=ast.Name(name)) | ast.Call(func=ast.Attribute(ast.Name(name), 'get')):
            for table, place in values(name, file, scope):
                for value in table.values if isinstance(table, ast.Dict) else []:
                    found += texts(value, file, place, depth - 1)
            for default in getattr(node, 'args', [])[1:]:
                found += again(default)
    return found or [UNKNOWN]


def parts(node: ast.AST) -> list[ast.AST]:
    """The parts of a message, from left to right."""
    match node:
        case ast.JoinedStr(inner):
            return [part for each in inner for part in parts(each)]
        case ast.BinOp(left, ast.Add(), right):
            return [*parts(left), *parts(right)]
    return [node]


def is_glued(left: str, right: str) -> bool:
    """Whether a text ends in a word or a closing mark, and the next one begins with a word."""
    if not left or not right:
        return False
    if UNKNOWN in (left[-1], right[0]):  # a name or a number, which may follow 'data.' or an opening quote
        return bool(re.search(r"""[a-z]{3}\Z|[)\]]\Z|\w['"]\Z""", left) or re.match(r'[a-z]{3}', right))
    return bool(re.search(r"""\w\Z|[)\],;.!?]\Z|\w['"]\Z""", left) and re.match(r'(?![A-Z]{2})\w', right))  # KEY=VALUE


def problems(file: str, scope: ast.AST, message: ast.AST) -> list[str]:
    """The joins in a message that have no separator."""
    found = []
    for left, right in zip(parts(message), parts(message)[1:], strict=False):
        before, after = texts(left, file, scope), texts(right, file, scope)
        if set(after) <= PLURALS or (UNKNOWN in {*before, *after} and not (is_written(left) or is_written(right))):
            continue
        if any(is_glued(one, other) for one in before for other in after):
            found.append(f'{file}:{message.lineno}: {ast.unparse(left)[-40:]} + {ast.unparse(right)[:40]}')
    return found


def is_written(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant)


def messages(file: str) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What a file prints or raises, with the innermost function around it."""
    scopes = [node for node in nodes(file) if isinstance(node, ast.FunctionDef)]
    inside = {id(node): scope for scope in scopes for node in ast.walk(scope)}
    for call in calls(file):
        if TEXTS_FOR_USERS.fullmatch(getattr(call.func, 'id', getattr(call.func, 'attr', ''))):
            for argument in [*call.args, *(each.value for each in call.keywords)]:
                yield from ((inside.get(id(call), tree(file)), each) for each in ast.walk(argument)
                            if isinstance(each, ast.JoinedStr | ast.BinOp))  # fmt: skip


@pytest.mark.parametrize('room', sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob('*.py')}))
def test_no_words_of_a_message_are_glued(room):
    here = [file for file in files() if file.partition('/')[0] == room]
    assert not [each for file in here for scope, text in messages(file) for each in problems(file, scope, text)]
    assert not [f'{file}: {each}' for file in here for each in GLUED_LITERALS.findall((SOURCE / file).read_text())]


@pytest.mark.parametrize('hint', ["'did you mean a?'", "nearest(a, b, 'did you mean ')", "'' if a else f'see {a}'"])
def test_glued_words_are_found(hint):
    module = ast.parse(f"def check(a, b):\n    hint = {hint}\n    raise UserError(f'{{a}} does not exist{{hint}}')")
    [scope] = module.body
    [message] = [node for node in ast.walk(module) if isinstance(node, ast.JoinedStr) and 'exist' in ast.unparse(node)]
    assert problems('config/source.py', scope, message)
    assert GLUED_LITERALS.search("raise UserError('there is no'\n    'such file')")
    assert not GLUED_LITERALS.search("raise UserError('there is no\\n'\n    'such file')")
