"""The shape of the source: which package may import which, and a spine that can be read in one sitting."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / 'src' / 'pretrax'

BELOW_TRAIN = {
    'errors', 'shardlib', 'config', 'data', 'checkpoint', 'observe', 'scale', 'model', 'huggingface', 'infer',
}  # fmt: skip
# What each part of pretrax may import besides itself. Everything may ask pretrax for its version.
MAY_IMPORT = {
    'errors': set(),
    'shardlib': set(),
    'config': {'errors'},
    'data': {'errors'},
    'checkpoint': {'errors'},
    'observe': {'errors'},
    'scale': {'errors'},
    'model': {'errors', 'shardlib'},
    'huggingface': {'errors', 'shardlib', 'model', 'checkpoint'},
    'infer': {'errors', 'shardlib', 'model'},
    'train': BELOW_TRAIN,
    'launch': {'errors', 'config', 'observe'},  # starts `train` as processes: it imports no JAX
    'ahead': {'errors', 'config', 'scale', 'model', 'train'},
    'cli': BELOW_TRAIN - {'shardlib'} | {'train', 'launch', 'ahead'},
}

SPINE = ('cli/train.py', 'train/loop.py', 'train/step.py', 'model/transformer.py')
HEAVY = {'jax', 'jaxlib', 'optax', 'orbax', 'zarr', 'tokenizers', 'numpy'}


def imports(source: str, module: str, is_package: bool, at_start: bool = False) -> Iterator[tuple[str, str | None]]:
    """The (module, name) pairs that a file imports; name is None for `import module`.

    `at_start` leaves out what is imported only inside functions or for type checkers.
    """

    def is_later(node: ast.AST) -> bool:
        typing_only = isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test)
        return typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)

    def visit(node: ast.AST) -> Iterator[tuple[str, str | None]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split('.') if is_package else module.split('.')[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (('.'.join([*base, *filter(None, [node.module])]), alias.name) for alias in node.names)
        elif not (at_start and is_later(node)):
            for child in ast.iter_child_nodes(node):
                yield from visit(child)

    return visit(ast.parse(source))


def modules() -> dict[str, Path]:
    """Every module of pretrax by its dotted name."""
    found = {}
    for path in SOURCE.rglob('*.py'):
        parts = path.relative_to(SOURCE.parent).with_suffix('').parts
        found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
    return found


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports against the table, in words."""
    part = module.split('.')[1]
    wrong = []
    for target, name in imports(source, module, is_package):
        root, *below = [*target.split('.'), *([name] if target == 'pretrax' and name else [])]
        if root != 'pretrax' or below == ['__version__'] or below[:1] == [part]:
            continue
        if not below or below[0] not in MAY_IMPORT[part]:
            wrong.append(f'{module} imports {".".join([root, *below])}')
    return wrong


def test_every_part_imports_only_what_stands_below_it():
    files = {module: path for module, path in modules().items() if module != 'pretrax'}
    assert {module.split('.')[1] for module in files} == set(MAY_IMPORT), 'a new part needs a line in MAY_IMPORT'
    wrong = [
        w for module, path in files.items() for w in wrong_imports(path.read_text(), module, path.stem == '__init__')
    ]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('pretrax.model.attention', 'from ..train.step import make_step'),
        ('pretrax.data.text', 'def f():\n    from pretrax.model import transformer'),
        ('pretrax.shardlib.ops', 'from ..errors import UserError'),
        ('pretrax.scale.flops', 'import pretrax.train.loop'),
        ('pretrax.config.load', 'from pretrax import train'),
        ('pretrax.checkpoint.store', 'import pretrax'),
    ],
)
def test_a_wrong_import_is_seen(module, source):
    assert wrong_imports(source, module)


def test_the_table_has_no_circles():
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()


def test_no_module_is_imported_by_what_it_imports():
    known = modules()
    graph = {}
    for module, path in known.items():
        found = imports(path.read_text(), module, path.stem == '__init__', at_start=True)
        targets = {f'{target}.{name}' if f'{target}.{name}' in known else target for target, name in found}
        graph[module] = targets & set(known)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_shardlib_needs_jax_and_numpy_alone():
    used = set()
    for module, path in modules().items():
        if module.split('.')[1:2] == ['shardlib']:
            used |= {target.split('.')[0] for target, _ in imports(path.read_text(), module, path.stem == '__init__')}
    assert used - sys.stdlib_module_names == {'jax', 'numpy', 'pretrax'}  # pretrax: its own files


def test_the_spine_is_read_in_one_sitting():
    lines = {name: len((SOURCE / name).read_text().splitlines()) for name in SPINE}
    assert sum(lines.values()) < 900, lines


@pytest.mark.parametrize('page', ['README.md', 'docs/architecture.md', 'CONTRIBUTING.md'])
def test_the_reading_order_in_the_docs_is_the_spine(page):
    order = ' -> '.join(f'`{name}`' for name in SPINE) + ' -> `shardlib/`'
    assert order in ' '.join((REPOSITORY / page).read_text().split())


def test_files_are_named_for_what_they_hold():
    nameless = {'utils', 'util', 'helpers', 'misc', 'common'}
    assert not [path for path in SOURCE.rglob('*') if path.stem in nameless]


def test_tests_lie_where_what_they_test_lies():
    parts = set(MAY_IMPORT) - {'errors'}
    beside = {'docs', 'examples', 'benchmarks', 'deviceless', 'goldens', 'parallel', '__pycache__'}
    found = {path.name for path in (REPOSITORY / 'tests').iterdir() if path.is_dir()}
    assert found - beside == parts


@pytest.mark.parametrize(
    'statement', ['import pretrax', 'import pretrax.cli', 'from pretrax import load_config, register']
)
def test_importing_pretrax_costs_no_jax(statement):
    program = f'{statement}\nimport sys\nprint(*(set(sys.modules) & {HEAVY!r}))'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_costs_no_jax():
    program = (
        'import sys\nfrom pretrax.cli import main\n'
        'try:\n    main(["--help"])\n'
        f'except SystemExit:\n    print(*(set(sys.modules) & {HEAVY!r}), file=sys.stderr)'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert 'train' in done.stdout
    assert done.stderr.split() == []
