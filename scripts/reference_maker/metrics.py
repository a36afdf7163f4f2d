"""The page of metrics: the definitions of `view/definitions.yaml`, and the file that computes each number."""

import ast
from collections.abc import Iterator

from pretrax.observe.goodput import CAUSES
from pretrax.view.definitions import DEFINITIONS, LAYER_DEFINITIONS, Definition
from reference_maker.markdown import code, table
from reference_maker.source import files, tree

# Functions that return metrics of a line, besides those named in ALWAYS, in any file of MODELS.
EMITTERS = {
    'run/step_metrics.py': ('_measured', '_log_step'),
    'run/replay.py': ('metrics',),
    'run/validation.py': ('losses_of_state', 'losses'),
    'run/utilization.py': ('__call__',),
    'run/logged_program.py': ('curves', 'read'),
    'train/step.py': ('training_step',),
    'run/run_log.py': ('write',),
    'observe/device_memory.py': ('memory_in_use',),
    'evaluate/results.py': ('flat',),
    'federation/island.py': ('_after',),
    'view/federation/lines.py': ('_round_lines', '_found_lines', '_mean_loss', '_speed', 'spread'),
}
MODELS = ('model/', 'distill/')  # where a metric may come from any file
ALWAYS = ('denominators', 'summarize', 'metrics')  # also as the last word: `routing_denominators`
ARGUMENTS = {'constants'}  # keys in these functions that are arguments of another one

INTRODUCTION = """\
# Keys of metrics

## metrics.jsonl

Every key that pretrax writes to `metrics.jsonl`, and sends to trackers. A key that ends in `/NAME` stands for all keys
with this beginning. A model or a plugin may add keys of its own. A value that is not a finite number is null, and
`nonfinite` names it. [Metrics](../metrics.md) explains the file, MFU and memory.

"""
LAYERS = """
## layer_statistics.jsonl

`log.layers=N` writes these to `layer_statistics.jsonl`, in lines with their `step`.
[Metrics](../metrics.md#layer-statistics) explains how they are measured. With the name of a weight, such as
`gradient_norm/q`, a statistic covers only that weight.

"""


def page() -> str:
    """The whole page."""
    sources = emitted()
    return ''.join(
        [
            INTRODUCTION,
            table(('key', 'name', 'unit', 'meaning', 'source'), [_row(*item, sources) for item in DEFINITIONS.items()]),
            LAYERS,
            table(('key', 'name', 'unit', 'meaning'), [_row(*item) for item in LAYER_DEFINITIONS.items()]),
        ]
    )


def emitted() -> dict[str, list[str]]:
    """{key of metrics.jsonl: files that compute it}, from the source; what follows a `/` is NAME, or a cause."""
    found: dict[str, list[str]] = {}
    wanted = [file for file in files() if file.startswith(MODELS)]
    for file in (*EMITTERS, *wanted):
        names = EMITTERS.get(file, ())
        for function in ast.walk(tree(file)):
            if isinstance(function, ast.FunctionDef) and (function.name in names or _is_always(file, function.name)):
                for key in _keys(function):
                    if key not in ARGUMENTS and file not in found.setdefault(key, []):
                        found[key].append(file)
    return found | dict.fromkeys((f'seconds/{cause}' for cause in CAUSES), found.pop('seconds/NAME'))


def _is_always(file: str, name: str) -> bool:
    return file.startswith(MODELS) and name.rpartition('_')[2] in ALWAYS


def _keys(function: ast.FunctionDef) -> Iterator[str]:
    """Constant keys of the dictionaries that a function makes."""
    for node in ast.walk(function):
        nodes: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            nodes += node.keys
        elif isinstance(node, ast.DictComp):
            tuples = [each.iter for each in node.generators if isinstance(each.iter, ast.Tuple)]
            nodes += [node.key] if not isinstance(node.key, ast.Name) else [one for each in tuples for one in each.elts]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            nodes.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == 'setdefault':
            nodes += node.args[:1]
        yield from (key for each in nodes if (key := _text(each)))


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        return f'{str(node.values[0].value).partition("/")[0]}/NAME'
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _row(key: str, definition: Definition, sources: dict[str, list[str]] | None = None) -> tuple[str, ...]:
    cells = (code(key), definition.name, definition.unit, definition.meaning)
    return cells if sources is None else (*cells, ', '.join(code(file) for file in sources.get(key, ())))
