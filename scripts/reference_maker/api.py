"""The pages of the Python interface, from signatures and docstrings in the source. Nothing is imported.

Signatures are written as they are in the source, so that a type such as f32['B/d L M'] keeps its text. Tools that read
annotations take the text of a type for a name: they show i32['S'] as i32[S], and f32['M/d'] as a division.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

from reference_maker.markdown import prose
from reference_maker.source import SOURCE, tree

WIDTH = 100  # columns of a signature in one line


class Part(NamedTuple):
    """A section of the page.

    Attributes:
        title: its heading.
        text: what its names are for.
        names: {module: names}; no names: all of `__all__`.
    """

    title: str
    text: str
    names: dict[str, tuple[str, ...]]


PARTS = [
    Part(
        'pretrax',
        '[Python library](../library.md) has an example of each name. JAX is imported when one that needs it is used.',
        {'pretrax': ()},
    ),
    Part(
        'pretrax.train',
        'The training step, which is pure: `state, metrics = step(state, batch)`.',
        {
            'pretrax.train.step': (
                'TrainState', 'Recipe', 'make_step', 'training_step', 'make_gradients',
            ),
            'pretrax.train.state': ('init_state', 'state_shardings', 'abstract_state'),
            'pretrax.train.validation': ('make_evaluate',),
        },
    ),
    Part(
        'Models and data of your own',
        'What a [component](../architecture.md#contracts) derives from, gets and returns.',
        {
            'pretrax.model.request': ('ModelRequest',),
            'pretrax.model.base': ('Model', 'AutomaticModel'),
            'pretrax.model.attention': ('attention',),
            'pretrax.model.matmul': ('product',),
            'pretrax.model.loss': ('Batch', 'LossTerms', 'loss_terms', 'cross_entropy'),
            'pretrax.model.axes': ('AXES',),
            'pretrax.data.batches.source': ('DataRequest', 'HostBatch', 'Source', 'pack_rows'),
        },
    ),
    Part(
        'pretrax.checkpoint',
        '[Reliability](../reliability.md#checkpoints) describes what checkpoints promise.',
        {'pretrax.checkpoint': ()},
    ),
    Part(
        'Files of runs',
        '[Files of a run](../files.md) lists them. A run may be in a bucket.',
        {
            'pretrax.storage': ('locate',),
            'pretrax.observe.metrics': ('read_metrics',),
            'pretrax.observe.layer_statistics': ('read_layer_statistics',),
            'pretrax.view.trace.run_trace': ('find_traces', 'open_newest'),
            'pretrax.view.trace.table': ('text',),
            'pretrax.data.tokens.flat_tokens_check': ('verify',),
        },
    ),
    Part(
        'pretrax.infer',
        '[Inference](../inference.md) describes the engine.',
        {
            'pretrax.infer.generate': ('generate', 'open_engine'),
            'pretrax.infer.engine': ('Engine',),
            'pretrax.infer.request': ('Sampling', 'Request', 'Token', 'Update', 'EngineStatus', 'check_request'),
            'pretrax.infer.text': ('TextStream', 'text_after'),
        },
    ),
    Part(
        'pretrax.shardlib',
        '[shardlib](../shardlib.md) introduces the notation. shardlib can be used without pretrax. The types of '
        'arrays are '
        '`f32`, `bf16`, `f16`, `f8`, `f8_e5m2`, `i32`, `u32`, `i8`, `u8`, `bool_`, `key` (of `jax.random`) and `num` '
        '(any dtype); '
        "`Array['layers', Layer]` is every array of `Layer` with one more leading dimension.",
        {'pretrax.shardlib': ()},
    ),
]  # fmt: skip
# Types of arrays, which part of shardlib makes in a loop; the section of shardlib lists them.
DTYPES = ('Array', 'bf16', 'bool_', 'f8', 'f8_e5m2', 'f16', 'f32', 'i8', 'i32', 'key', 'num', 'u8', 'u32')
INTRODUCTION = """\
# Python interface

Signatures as they are in the source. A type such as `f32['B/d L M']` names the dtype, the dimensions, and after each
dimension the mesh axes that shard it: see [shardlib](../shardlib.md). What is not on this page may change without
notice.
"""


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for part in PARTS:
        lines.append(f'## {part.title}\n\n{part.text}\n')
        for module, names in part.names.items():
            for name in names or _all(module):
                lines += _entry(module, name) if name not in DTYPES else []
    return '\n'.join(lines)


def _tree(module: str) -> ast.Module:
    file = '/'.join(module.split('.')[1:])
    return tree(f'{file}/__init__.py'.lstrip('/') if (SOURCE / file).is_dir() else f'{file}.py')


def _all(module: str) -> list[str]:
    [names] = [node.value for node in _tree(module).body if isinstance(node, ast.Assign) and _target(node) == '__all__']
    return ast.literal_eval(names)


def _target(node: ast.stmt) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
    return getattr(node, 'name', None) or getattr(target, 'id', None)


def _definition(module: str, name: str) -> tuple[str, ast.stmt]:
    """The module that defines a name, and its statement; re-exports are followed."""
    tree = _tree(module)
    for node in tree.body:
        if _target(node) == name:
            return module, node
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(node.module, alias.name)
    raise KeyError(f'{module} does not define {name}')


def _entry(module: str, name: str) -> Iterator[str]:
    """The section of a name: its signature, its docstring, and the public methods of a class."""
    where, node = _definition(module, name)
    yield f'### {name}\n\n`{module}.{name}`' + ('' if where == module else f', defined in `{where}`') + '\n'
    if isinstance(node, ast.ClassDef):
        yield from _class(node, name)
    elif isinstance(node, ast.FunctionDef):
        yield _signature(node, name)
        yield _docstring(node)
    else:
        yield _code(ast.unparse(node))
        yield _comment(where, node)


def _class(node: ast.ClassDef, name: str) -> Iterator[str]:
    bases = ', '.join(ast.unparse(base) for base in node.bases)
    fields = [f'    {ast.unparse(each)}' for each in node.body if isinstance(each, ast.AnnAssign) and _is_public(each)]
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    constructor = next((each for each in methods if each.name == '__init__'), None)
    heading = f'class {name}({bases})' if bases else f'class {name}'
    yield _code('\n'.join([f'{heading}:', *fields]) if fields else heading)
    if constructor is not None:
        yield _signature(constructor, name)
    yield _docstring(node)
    for each in methods:
        decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
        if _is_public(each) and 'overload' not in decorators:
            if any('property' in decorator for decorator in decorators):
                returns = f': {ast.unparse(each.returns)}' if each.returns else ''
                yield _code(f'{name}.{each.name}{returns}')
            else:
                yield _signature(each, f'{name}.{each.name}')
            yield _docstring(each)


def _is_public(node: ast.stmt) -> bool:
    return not (_target(node) or '_').startswith('_')


def _signature(node: ast.FunctionDef, name: str) -> str:
    """A call of the function, in one line if it is short, without `self`."""
    arguments = list(_arguments(node.args))
    returns = f' -> {ast.unparse(node.returns)}' if node.returns and node.name != '__init__' else ''
    line = f'{name}({", ".join(arguments)}){returns}'
    if len(line) <= WIDTH:
        return _code(line)
    inner = ''.join(f'    {each},\n' for each in arguments)
    return _code(f'{name}(\n{inner}){returns}')


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Each parameter as it is written, and the marks `/` and `*`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True), start=1):
        if number > 1 or argument.arg not in ('self', 'cls'):
            yield _argument(argument, default)
        if number == len(arguments.posonlyargs):
            yield '/'
    if arguments.vararg:
        yield f'*{_argument(arguments.vararg, None)}'
    elif arguments.kwonlyargs:
        yield '*'
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f'**{_argument(arguments.kwarg, None)}'


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f': {ast.unparse(argument.annotation)}' if argument.annotation else ''
    equals = ' = ' if annotation else '='
    return f'{argument.arg}{annotation}' + ('' if default is None else f'{equals}{ast.unparse(default)}')


def _code(text: str) -> str:
    return f'```python\n{text}\n```\n'


def _comment(module: str, node: ast.stmt) -> str:
    """The comment at the end of the line of a definition, or in the lines before it."""
    path = SOURCE.joinpath(*module.split('.')[1:]).with_suffix('.py')
    lines = path.read_text().splitlines()
    _, mark, comment = lines[node.lineno - 1].partition('  # ')
    if mark:
        return f'{prose(comment)}\n'
    start = node.lineno - 1
    while start and lines[start - 1].startswith('# '):
        start -= 1
    return prose(' '.join(line.removeprefix('# ') for line in lines[start : node.lineno - 1])) + '\n'


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The docstring as Markdown: `Args:` and the like become lists."""
    lines = inspect.cleandoc(ast.get_docstring(node) or '').splitlines()
    found, in_list = [], False
    for line in lines:
        if re.fullmatch(r'(Args|Attributes|Raises|Returns|Yields):', line):
            found += [f'**{line.rstrip(":")}**', '']
            in_list = True
        elif in_list and (item := re.fullmatch(r'    (\*{0,2}\w[\w., ]*): (.*)', line)):
            found.append(f'- `{item[1]}`: {prose(item[2])}')
        elif in_list and line.startswith('    '):
            found.append(f'  {prose(line.strip())}')
        else:
            in_list = in_list and not line
            found.append(line if line.startswith('    ') else prose(line))
    return '\n'.join(found).strip() + '\n'
