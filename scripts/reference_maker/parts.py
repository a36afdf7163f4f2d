"""The picture of the packages: which part imports which, from the imports in the source."""

import ast
import functools

from reference_maker.source import files, nodes
from reference_maker.svg import COLORS, GREY, INK, PALE, document, rectangle, text

BY_NAME = 'config/registry.py'  # it imports components by the names in a configuration
# What each part is, in a few words; docs/architecture.md has more.
WHAT = {
    'amounts': 'sizes, counts and times for people',
    'errors': 'mistakes of the user, and exit codes',
    'tables': 'the YAML tables of pretrax',
    'option': 'what a user may set, declared once',
    'jax_compat': 'the private names of JAX that pretrax uses',
    'shardlib': 'sharding as types, and collectives',
    'model': 'the decoder, and Flax NNX models',
    'cost': 'formulas: FLOPs, memory, time',
    'hlo': 'readers of compiled programs',
    'system': 'the operating system: cores, memory, locks',
    'federation': 'runs that share only a bucket',
    'storage': 'buckets of Google Cloud Storage and S3',
    'config': 'the schema of configurations, and the registry',
    'data': 'from text to batches',
    'checkpoint': 'saving and restoring a state',
    'observe': 'metrics, trackers, notifications',
    'huggingface': 'checkpoints of Hugging Face',
    'infer': 'the engine that writes text',
    'evaluate': 'tasks, and their metrics',
    'train': 'the step, optimizers and schedules; pure',
    'page_kit': 'what the pages share',
    'serve': 'the HTTP server and its page',
    'view': 'reports, comparisons, live pages, traces',
    'weights': 'the model of a checkpoint, for runs and generation',
    'distill': 'everything about a teacher',
    'run': 'the life of a run: check, prepare, start, loop, end',
    'translate': 'configurations of other tools',
    'launch': 'starts runs as processes',
    'experiments': 'sweeps, searches, seeds, scaling laws',
    'plan': 'a step before it runs: planned, compiled, saved',
    'doctor': 'checks of machines before a run',
    'library': 'training and models for Python code',
    'cli': 'the commands',
}


@functools.cache
def imports() -> dict[str, set[str]]:
    """{part: the other parts that it imports}, in functions too."""
    found: dict[str, set[str]] = {name: set() for name in WHAT}
    for file in files():
        part = file.partition('/')[0].removesuffix('.py')
        if file == BY_NAME or part.startswith('__'):
            continue
        for target in _targets(file):
            if target != part and target != '__version__':
                found[part].add(target)
    return found


def _targets(file: str) -> set[str]:
    """The parts of pretrax that a file imports when it runs, not only for type checkers."""
    checks = [
        node for node in files()[file].body if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test)
    ]
    skipped = {id(node) for check in checks for node in ast.walk(check)}
    found: set[str] = set()
    for node in nodes(file):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or '').partition('.')[0] == 'pretrax':
            found |= set((node.module or '').split('.')[1:2]) or {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split('.') for alias in node.names]
            found |= {name[1] for name in names if name[0] == 'pretrax' and len(name) > 1}
    return found


def picture() -> str:
    """A table with a square where the part of a row imports that of a column. No square is right of the diagonal."""
    graph = imports()
    order: list[str] = []
    while len(order) < len(graph):
        order.append(next(part for part in graph if part not in order and graph[part] <= set(order)))
    cell, left, top = 22, 424, 152
    shapes = [
        text(24, 34, 'Which part imports which', size=16, weight=700),
        text(
            24,
            56,
            'A square: the part of the row imports the part of the column. Parts import only those to their left.',
            fill=GREY,
        ),
    ]
    for number, part in enumerate(order):
        y, x = top + number * cell, left + number * cell
        shapes.append(f'<g transform="rotate(-60 {x + 14} {top - 10})">{text(x + 14, top - 10, part, size=12)}</g>')
        shapes.append(text(24, y + 16, part, weight=700))
        shapes.append(text(126, y + 16, WHAT[part], fill=GREY, size=12))
        for column, other in enumerate(order[: number + 1]):
            fill = COLORS['d'] if other in graph[part] else INK if other == part else 'white'
            shapes.append(rectangle(left + column * cell + 2, y + 2, cell - 4, cell - 4, fill=fill, line=PALE))
    side = top + len(order) * cell
    return document(left + len(order) * cell + 70, side + 20, shapes, 'Which part of pretrax imports which')
