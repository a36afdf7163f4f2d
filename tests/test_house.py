"""The shape of the source: which package may import which, and a spine that can be read in one sitting."""

import ast
import graphlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config_flow import Sources, follow
from pretrax.model.options.decoder import DecoderOptions

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / 'src' / 'pretrax'

BELOW_RUN = {
    'amounts', 'errors', 'tables', 'option', 'jax_compat', 'storage', 'shardlib', 'config', 'system', 'data',
    'checkpoint', 'observe', 'cost', 'hlo', 'model', 'huggingface', 'infer', 'train', 'evaluate', 'federation',
}  # fmt: skip
# The parts of pretrax that each part may import besides itself. Every part may import the version from pretrax.
MAY_IMPORT = {
    'amounts': set(),
    'tables': set(),
    'option': set(),
    'errors': set(),
    'jax_compat': set(),
    'shardlib': set(),
    'page_kit': set(),  # styles, templates and scripts of pages, and how they are served
    'storage': {'errors', 'system'},
    'config': {'errors', 'storage', 'infer', 'tables'},  # of `infer` the settings of sampling
    'model': {'errors', 'jax_compat', 'shardlib', 'tables'},
    'cost': {'amounts', 'errors', 'model', 'tables'},
    'hlo': {'cost', 'tables'},
    'system': {'errors', 'cost'},
    'data': {'errors', 'system', 'storage', 'tables'},
    'checkpoint': {'errors', 'jax_compat', 'system', 'storage', 'tables'},
    'federation': {'amounts', 'config', 'errors', 'system', 'storage', 'checkpoint', 'train'},
    'observe': {'amounts', 'errors', 'system', 'storage'},
    'huggingface': {'errors', 'shardlib', 'model', 'checkpoint', 'system', 'storage', 'tables'},
    'infer': {'errors', 'option', 'jax_compat', 'shardlib', 'model'},
    'translate': {'errors', 'config', 'model', 'tables'},  # of `model` the tables of presets
    'evaluate': {'errors', 'shardlib', 'model', 'infer', 'data'},  # of `data` the readers of text
    # It shows what runs wrote: reports, comparisons, live pages, programs, traces.
    'view': {
        'amounts',
        'tables',
        'errors',
        'config',
        'system',
        'storage',
        'cost',
        'hlo',
        'data',
        'checkpoint',
        'federation',
        'observe',
        'serve',
        'page_kit',
    },
    'serve': {'errors', 'infer', 'system', 'page_kit', 'tables'},  # it imports no JAX: its engines come from outside
    'train': {'errors', 'shardlib', 'model', 'cost'},  # pure: no files, no terminal, no processes
    'run': BELOW_RUN | {'view'},
    'launch': {
        'amounts',
        'option',
        'tables',
        'errors',
        'config',
        'observe',
        'system',
        'storage',
        'checkpoint',
        'doctor',
    },  # starts runs as processes: it imports no JAX
    # Many runs that answer a question, as processes: it imports no JAX.
    'experiments': {'config', 'errors', 'launch', 'observe', 'run', 'storage', 'system', 'view'},
    'weights': BELOW_RUN | {'run'},  # the only reader of the model of a checkpoint
    'distill': BELOW_RUN | {'run', 'weights'},  # everything about a teacher
    'plan': BELOW_RUN | {'run', 'view'},
    'doctor': BELOW_RUN | {'run'},  # checks machines before a run
    'library': BELOW_RUN - {'shardlib'}
    | {'run', 'weights', 'plan'},  # what `import pretrax` offers, as the commands do it
    '__main__': {'cli'},
    'cli': BELOW_RUN - {'shardlib'}
    | {'run', 'weights', 'distill', 'launch', 'experiments', 'plan', 'doctor', 'serve', 'view', 'translate'},
}
# The rooms of `data`, likewise. `text.py` and `options.py` are its front door.
DATA_MAY_IMPORT = {
    'chat': set(),  # chat templates, for training and for serving
    'corpus': {'chat', 'options'},
    'tokenizers': {'corpus'},
    'tokens': {'corpus', 'tokenizers'},
    'tokenize': {'corpus', 'tokenizers', 'tokens'},
    'batches': {'corpus', 'tokenizers', 'tokens'},
    'options': {'corpus'},
    'stream': {'corpus', 'tokenizers', 'tokens', 'tokenize', 'batches'},
    'text': {'chat', 'corpus', 'tokenizers', 'tokens', 'tokenize', 'batches', 'stream', 'options'},
}
# Imports what a configuration names: components, by their registered 'module:attribute' strings.
REGISTRY = 'pretrax.config.registry'
NAMED_MODULE = re.compile(r'(pretrax(?:\.\w+)+)(?::\w+)?')

# What a reader of the spine has to read, as `reading` counts it, and how many other modules that takes. They only go
# down.
SPINE_LINES, SPINE_MODULES = 921, 37
# The functions from `run/loop.train` on that hold the whole configuration, and how often a reader returns to a module
# that it left.
STAYS, RETURNS = 18, 4
# How many files of the source name an option of the decoder, by its last part: the median of all options.
FILES_PER_OPTION = 9
# All lines of the Python source. Only a new feature raises it, by what it needs; the aim is 70,000.
SOURCE_LINES = 89_171
# Functions with more than 7 parameters; functions of more than 60 lines; calls with more than 6 arguments by position.
# They only go down, to none.
LONG_SIGNATURES, LONG_FUNCTIONS, LONG_CALLS = 20, 12, 27
# Tables in the source whose layout ruff does not touch. They only go down.
LAID_OUT_BY_HAND = 19
SPINE = ('cli/train.py', 'run/loop.py', 'train/step.py', 'model/transformer.py')
# Modules without a test of their own name, by the test that runs them.
TESTED_BY = {
    'plan/test_auto.py': 'run/micro_batch',
    'plan/test_layouts.py': 'plan/candidate',
    'train/test_optimizer.py': 'train/muon',
    'train/test_matrices.py': 'model/nnx_matrices',
    'plan/test_saved.py': 'plan/step system/software',
    'data/chat/test_templates.py': 'data/chat/rendering',
    'checkpoint/test_bucket.py': 'checkpoint/files',
    'checkpoint/test_memory.py': 'checkpoint/memory_pieces',
    'checkpoint/test_restoring.py': 'checkpoint/manifest checkpoint/pieces system/digest',
    'checkpoint/test_store.py': 'checkpoint/chunks checkpoint/directory checkpoint/state_files',
    'cli/checkpoint/test_checkpoint.py': 'checkpoint/streamed weights/averaged',
    'cli/test_eval.py': 'weights/evaluated',
    'evaluate/test_contamination.py': 'cli/data/_lookup cli/data/contamination',
    'federation/test_island.py': (
        'federation/anchors federation/exchange federation/island_state federation/link run/federation'
    ),
    'run/test_coordinate_check.py': 'cli/mup/check',
    'federation/test_replay.py': 'cli/federation/replay',
    'view/federation/test_read.py': 'cli/federation/status view/federation/lines view/federation/tables',
    'cli/test_plot.py': 'cli/_output view/charts/page view/charts/text view/charts/curves view/charts/picture',
    'cli/test_runs.py': 'view/run_list',
    'weights/test_prompt_file.py': 'infer/answers',
    'infer/test_sample.py': 'infer/request',
    'cli/test_generate.py': 'infer/sampling_settings',
    'test_library.py': 'weights/loaded',
    'cli/test_config.py': 'cli/config/diff cli/config/schema cli/config/show cli/train',
    'cli/test_data_tools.py': (
        'cli/data/_token_files cli/data/convert cli/data/index cli/data/inspect cli/data/merge '
        'cli/data/shuffle cli/data/split cli/data/train_tokenizer cli/data/verify'
    ),
    'cli/test_verbs.py': '__main__ option cli/_arguments',
    'config/test_json_schema.py': 'config/one_of',
    'config/test_load.py': 'config/problems config/schema config/source errors',
    'distill/test_files.py': 'distill/parts',
    'distill/test_preparation.py': 'cli/distill/prepare',
    'data/batches/test_token_source.py': 'data/batches/block_cache data/batches/windows',
    'data/corpus/test_files.py': 'data/corpus/parts system/zstd',
    'data/tokenize/test_engines.py': 'data/tokenize/engine_ray data/tokenize/tokenized_shards data/tokenize/worker',
    'data/tokenize/test_prepare.py': 'data/tokenize/sample',
    'data/tokens/test_flat_tokens.py': (
        'data/tokens/flat_tokens_check data/tokens/flat_tokens_writer data/tokens/zarr_shards'
    ),
    'data/tokens/test_foreign.py': (
        'data/tokens/foreign_layout data/tokens/foreign_pickle data/tokens/foreign_zarr data/tokens/token_store'
    ),
    'data/stream/test_stream_source.py': 'data/stream/blocks data/stream/open_stream data/stream/places',
    'data/tokens/test_token_array.py': 'data/tokens/block_files',
    'data/tokens/test_token_tools.py': 'data/tokens/token_copy',
    'deviceless/test_deviceless.py': 'plan/report',
    'doctor/test_diagnosis.py': 'doctor/checks doctor/findings doctor/probe',
    'docs/test_commands.py': (
        'cli/compile_ cli/export cli/import_ cli/launch/local cli/plan data/batches/synthetic weights/imported'
    ),
    'evaluate/test_results.py': 'evaluate/text_tasks',
    'huggingface/test_mxfp4.py': 'huggingface/quantized',
    'huggingface/test_roundtrip.py': (
        'huggingface/configs huggingface/deepseek huggingface/fields huggingface/files huggingface/harmless '
        'huggingface/layers huggingface/model huggingface/text_part huggingface/names '
        'huggingface/tensor_files huggingface/weights'
    ),
    'infer/test_text.py': 'data/tokenizers/decoding',
    'infer/test_engine.py': 'infer/block infer/cache infer/cached infer/forward infer/programs',
    'experiments/test_bench.py': 'cli/bench',
    'experiments/test_search.py': (
        'cli/search experiments/base_file experiments/training experiments/trial_job view/search/report'
    ),
    'launch/test_slurm.py': 'cli/launch/slurm cli/launch/slurm_job',
    'launch/test_ray.py': ('cli/launch/ray launch/ray_cluster experiments/ray_sweep system/ray_connection'),
    'launch/test_ssh.py': 'cli/launch/ssh doctor/host_facts launch/host_checks',
    'launch/test_local.py': 'launch/group launch/supervisor observe/attempts',
    'launch/test_kubernetes.py': 'cli/launch/kubernetes',
    'launch/test_manifests.py': 'launch/options',
    'launch/test_tpu_vm.py': 'cli/launch/tpu_vm',
    'launch/test_node.py': 'launch/crash cli/launch/node',
    'launch/test_record.py': 'cli/launch/logs cli/launch/status cli/launch/stop launch/engine launch/foreground',
    'model/test_attention.py': 'model/long_attention model/scores model/xla_cpu',
    'model/test_eight_bits.py': 'model/numerics',
    'model/test_families.py': 'model/choices model/options/attention model/options/feed_forward tables',
    'model/test_option_names.py': 'model/options/decoder model/options/section',
    'config/test_upgrade.py': 'cli/config/upgrade',
    'model/test_nnx.py': 'model/nnx_options model/nnx_target',
    'model/test_linear_attention.py': 'model/block model/recurrent',
    'model/test_mutations.py': (
        'model/latent_attention model/layer_spec model/layers model/mlp model/moe model/rope '
        'model/rope_scaling model/weights'
    ),
    'model/test_parity.py': 'model/architecture',
    'model/test_pipeline.py': 'model/pipeline_forward',
    'model/test_transformer.py': 'model/axes model/base model/ends model/norm model/plan model/request',
    'observe/trackers/test_kills.py': (
        'observe/trackers/mlflow observe/trackers/tensorboard observe/trackers/trackio observe/trackers/wandb'
    ),
    'observe/trackers/test_trackers.py': 'observe/trackers/base',
    'parallel/test_parallel.py': 'model/exchange',
    'observe/test_samples.py': 'observe/step_lines',
    'run/test_notices.py': 'observe/notices',
    'run/test_noise_scale.py': 'run/logged_program',
    'run/test_program_cache.py': 'jax_compat system/cache run/compiled_step',
    'run/test_rollback.py': 'run/session',
    'run/test_replay.py': 'train/replay',
    'launch/test_start_check.py': 'doctor/start_check system/target',
    'run/test_seen_batch.py': 'cli/data/show',
    'weights/test_warm_start.py': 'weights/trained',
    'hlo/test_program.py': 'hlo/work',
    'cost/test_roofline.py': 'cost/step_facts',
    'storage/test_bucket_path.py': 'storage/connection',
    'serve/test_application.py': 'page_kit/served serve/service',
    'serve/test_generation.py': 'serve/engine_thread serve/limits',
    'shardlib/test_errors.py': 'shardlib/shard_map shardlib/types shardlib/check shardlib/typechecked',
    'shardlib/test_ops.py': 'shardlib/scan',
    'system/test_open_mpi.py': 'system/launchers',
    'storage/test_mirror.py': 'storage/parts storage/index',
    'view/compare/test_comparison.py': 'cli/compare view/compare/arms view/compare/text',
    'cli/test_scaling.py': 'view/scaling/report',
    'view/test_report.py': 'cli/report view/template view/report/charts view/report/encoding view/report/facts',
    'view/record/test_run_record.py': 'view/record/columns view/record/settings view/record/state',
    'view/live/test_server.py': 'cli/watch view/live/feed view/live/runs',
    'translate/test_maxtext.py': 'translate/maxtext_training',
    'translate/test_modalities.py': 'translate/modalities_components',
    'translate/test_tools.py': 'cli/import_config',
    'view/trace/test_run_trace.py': 'cli/trace view/trace/table view/trace/steps',
}
HEAVY = {'jax', 'jaxlib', 'optax', 'orbax', 'zarr', 'tokenizers', 'numpy'}


def imports(source: str) -> Iterator[tuple[str, str | None]]:
    """The (module, name) pairs that a file imports anywhere, in functions too; name is None for `import module`.

    A string that names a module, to import it later or to run it with `python -m`, counts as an import. Imports for
    type checkers do not: nothing is imported when the program runs.
    """

    def visit(node: ast.AST) -> Iterator[tuple[str, str | None]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'relative import in line {node.lineno}: write from pretrax...'
            yield from ((node.module or '', alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and (match := NAMED_MODULE.fullmatch(str(node.value))):
            yield match[1], None
        elif not (isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test)):
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


def wrong_imports(source: str, module: str) -> list[str]:
    """Imports of a module that the tables do not allow."""
    part, room = (*module.split('.')[1:3], '')[:2]
    wrong = []
    for target, name in imports(source):
        root, *below = [*target.split('.'), *([name] if target in ('pretrax', 'pretrax.data') and name else [])]
        if root != 'pretrax' or below == ['__version__']:
            continue
        if below[:1] != [part]:
            allowed = below and below[0] in MAY_IMPORT[part]
        elif part == 'data' and below[1:2] != [room]:
            allowed = below[1:] and below[1] in DATA_MAY_IMPORT[room]
        else:
            allowed = True
        if not allowed:
            wrong.append(f'{module} imports {".".join([root, *below])}')
    return wrong


def test_every_part_imports_only_the_parts_below_it():
    files = {module: path for module, path in modules().items() if module not in ('pretrax', REGISTRY)}
    assert {module.split('.')[1] for module in files} == set(MAY_IMPORT), 'a new part needs a line in MAY_IMPORT'
    wrong = [w for module, path in files.items() for w in wrong_imports(path.read_text(), module)]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('pretrax.model.attention', 'from pretrax.train.step import make_step'),
        ('pretrax.train.step', 'from pretrax.run.setup import Run'),
        ('pretrax.data.tokens.flat_tokens', 'def f():\n    from pretrax.data.batches.source import Source'),
        ('pretrax.data.text', 'def f():\n    from pretrax.model import transformer'),
        ('pretrax.shardlib.ops', 'from pretrax.errors import UserError'),
        ('pretrax.cost.flops', 'import pretrax.run.loop'),
        ('pretrax.config.schema', 'from pretrax import train'),
        ('pretrax.config.show', "COMPONENT = 'pretrax.train.optimizer:adamw'"),
        ('pretrax.checkpoint.store', 'import pretrax'),
    ],
)
def test_a_wrong_import_is_seen(module, source):
    assert wrong_imports(source, module)


def test_a_run_without_a_teacher_does_not_meet_one():
    """The registry names the room of the teacher; the spine does not mention one, whatever it is called."""
    rooms = '("pretrax.distill", "pretrax.weights")'
    program = 'import sys\nimport pretrax.run.loop\n'
    program += f'print(*(name for name in sys.modules if name.startswith({rooms})))'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    for name in SPINE:
        assert not re.search('teach|distill', (SOURCE / name).read_text(), re.IGNORECASE), name


def test_the_configuration_of_a_run_goes_one_way():
    flow = follow(('pretrax.run.loop', 'train'), Sources())
    assert len(flow.stays) <= STAYS, flow.stays
    assert flow.returns <= RETURNS, flow.stays


def test_the_flow_follows_parameters_attributes_methods_and_callbacks(tmp_path):
    (tmp_path / 'house').mkdir()
    (tmp_path / 'house' / 'config.py').write_text('class Config:\n    steps: int\n')
    (tmp_path / 'house' / 'rooms.py').write_text(
        'from house.config import Config\n'
        'class Run:\n    config: Config\n    def steps(self):\n        return self.config.steps\n'
        'def prepare(config: Config) -> Run:\n    return Run(config)\n'
        'def narrow(steps: int):\n    return steps\n'
        'def unreached(config: Config):\n    pass\n'
    )
    (tmp_path / 'house' / 'loop.py').write_text(
        'from house.config import Config\nfrom house.rooms import narrow, prepare\n'
        'def train(config: Config):\n    run = prepare(config)\n    again(config, run.steps)\n'
        '    narrow(config.steps)\n'
        'def again(whole: Config, call):\n    call()\n'
    )
    flow = follow(('house.loop', 'train'), Sources(tmp_path, 'house'), ('house.config', 'Config'))
    assert [name for _, name in flow.stays] == ['train', 'prepare', 'again', 'Run.steps']
    assert (flow.modules, flow.returns) == ({'house.loop', 'house.rooms'}, 2)


def test_the_tables_have_no_circles():
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()


def test_no_module_imports_itself_through_others():
    known = modules()
    graph = {}
    for module, path in known.items():
        targets = {
            f'{target}.{name}' if f'{target}.{name}' in known else target for target, name in imports(path.read_text())
        }
        graph[module] = targets & set(known) - {'pretrax'} if module != REGISTRY else set()
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_shardlib_needs_jax_and_numpy_alone():
    used = set()
    for module, path in modules().items():
        if module.split('.')[1:2] == ['shardlib']:
            used |= {target.split('.')[0] for target, _ in imports(path.read_text())}
    assert used - sys.stdlib_module_names == {'jax', 'numpy', 'pretrax'}  # pretrax: its own files


def test_one_file_imports_private_names_of_jax():
    private = {
        module
        for module, path in modules().items()
        for target, _ in imports(path.read_text())
        if target.startswith('jax') and '._' in target
    }
    assert private == {'pretrax.jax_compat'}


def wrapped(lines: list[str]) -> int:
    """Lines as a reader sees them at 100 columns, so that packing a line gains nothing. Blank lines do not count."""
    return sum(-(-len(line) // 100) for line in lines if line.strip())


def definition(module: str, name: str) -> tuple[str, int]:
    """Where a name is defined, following re-exports, and the lines of its signature and docstring."""
    known = modules()
    if f'{module}.{name}' in known:  # a module imported as a whole: its docstring
        module, name = f'{module}.{name}', ''
    lines = known[module].read_text().splitlines()
    tree = ast.parse('\n'.join(lines))
    if not name:
        first = tree.body[0]
        return module, wrapped(lines[first.lineno - 1 : first.end_lineno])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and name in {a.asname or a.name for a in node.names}:
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            return definition(node.module, original)
    for node in tree.body:
        if getattr(node, 'name', None) == name:
            has_docstring = ast.get_docstring(node) is not None  # type: ignore[arg-type]
            end = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1  # type: ignore[attr-defined]
            return module, wrapped(lines[node.lineno - 1 : end])
        targets = (
            node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', getattr(node, 'name', None))]
        )
        if any(getattr(target, 'id', None) == name for target in targets):
            return module, wrapped(lines[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f'{module} does not define {name}')


def reading(spine: tuple[str, ...]) -> tuple[dict[str, int], set[str]]:
    """What a reader of these files has to read, and the other modules to open for it.

    To read: every line of the files, and the signature and docstring of everything that they import from other modules
    of pretrax. shardlib is left out: it is read once, from its page.
    """
    lines, opened = {}, set()
    for name in spine:
        text = (SOURCE / name).read_text()
        lines[name] = wrapped(text.splitlines())
        for module, imported in sorted(set(imports(text))):
            if (
                module.split('.')[0] != 'pretrax'
                or module.startswith('pretrax.shardlib')
                or imported in (None, '__version__')
            ):
                continue
            where, count = definition(module, imported)
            if f'{where.removeprefix("pretrax.").replace(".", "/")}.py' not in spine:
                lines[f'{where}.{imported}'] = count
                opened.add(where)
    return lines, opened


def test_an_option_of_the_decoder_is_named_in_few_files():
    """An option is declared once; what else names it is the code that computes it, families and other tools' tables."""
    words = [set(re.findall(r'\w+', path.read_text())) for path in SOURCE.rglob('*.py')]
    names = {key.rpartition('.')[2] for key in DecoderOptions.declarations()}
    assert statistics.median(sum(name in file for file in words) for name in names) <= FILES_PER_OPTION


def test_the_source_does_not_grow():
    assert sum(path.read_bytes().count(b'\n') for path in SOURCE.rglob('*.py')) <= SOURCE_LINES


def test_the_spine_is_read_in_one_sitting():
    lines, opened = reading(SPINE)
    assert sum(lines.values()) <= SPINE_LINES, lines
    assert len(opened) <= SPINE_MODULES, sorted(opened)


def test_the_measure_of_the_spine_counts_packed_lines_and_imported_definitions():
    assert wrapped(['x' * 100, '', 'x' * 101]) == 3
    assert definition('pretrax.config', 'resolve_mesh')[0] == 'pretrax.config.mesh'
    lines, opened = reading(('train/step.py',))
    assert 'pretrax.model.loss' in opened
    assert lines['pretrax.model.loss.Batch'] >= 2


@pytest.mark.parametrize('page', ['README.md', 'docs/architecture.md', 'CONTRIBUTING.md'])
def test_the_reading_order_in_the_docs_is_the_spine(page):
    order = ' -> '.join(f'`{name}`' for name in SPINE) + ' -> `shardlib/`'
    assert order in ' '.join((REPOSITORY / page).read_text().split())


def test_files_are_named_for_what_they_hold():
    nameless = {'utils', 'util', 'helpers', 'misc', 'common'}
    assert not [path for path in SOURCE.rglob('*') if path.stem in nameless]


def test_tests_lie_where_what_they_test_lies():
    parts = set(MAY_IMPORT) - {'amounts', 'errors', 'jax_compat', 'library', 'option', 'tables', '__main__'}
    beside = {'repository', 'docs', 'examples', 'benchmarks', 'deviceless', 'goldens', 'parallel', '__pycache__'}
    found = {path.name for path in (REPOSITORY / 'tests').iterdir() if path.is_dir()}
    assert found - beside == parts


def test_every_module_has_a_test_that_is_found_by_name():
    tests = REPOSITORY / 'tests'
    listed = [name for names in TESTED_BY.values() for name in names.split()]
    names = {
        str(path.relative_to(SOURCE).with_suffix('')): path for path in modules().values() if path.stem != '__init__'
    }
    own = {name for name in names if (tests / name).with_name(f'test_{Path(name).stem.strip("_")}.py').exists()}
    assert not [test for test in TESTED_BY if not (tests / test).exists()]
    assert len(listed) == len(set(listed))
    assert names.keys() - own - set(listed) == set(), 'write a test of this name, or add the module to TESTED_BY'
    assert set(listed) - names.keys() == set(), 'these modules do not exist'


@pytest.mark.parametrize(
    'statement', ['import pretrax', 'import pretrax.cli', 'from pretrax import load_config, register']
)
def test_importing_pretrax_costs_no_jax(statement):
    program = f'{statement}\nimport sys\nprint(*(set(sys.modules) & {HEAVY!r}))'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_server_imports_no_jax():
    names = [module for module in modules() if module.startswith('pretrax.serve')]
    program = (
        f'import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\nprint("jax" in sys.modules)'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ['False']


def test_help_costs_no_jax():
    program = (
        'import sys\nfrom pretrax.cli import main\n'
        'try:\n    main(["--help"])\n'
        f'except SystemExit:\n    print(*(set(sys.modules) & {HEAVY!r}), file=sys.stderr)'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert 'train' in done.stdout
    assert done.stderr.split() == []


def test_verbs_and_launchers_take_few_parameters():
    """What a verb is asked travels as one value: `cli/_options.py`."""
    long = []
    for path in (path for room in ('cli', 'launch') for path in (SOURCE / room).rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                if len(names - {'self', 'cls'}) > 7:
                    long.append(f'{path.relative_to(SOURCE)}: {node.name} has {len(names)} parameters')
    assert not long, '\n'.join(long)


def long_parts(source: str) -> tuple[list[str], list[str], list[str]]:
    """Functions with many parameters, long functions, and calls with many arguments whose names the line does not say.

    Arguments that are strings of the source, such as patterns, say themselves what they are.
    """
    signatures, functions, calls = [], [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len({*names} - {'self', 'cls'}) > 7:
                signatures.append(node.name)
            if node.end_lineno and node.end_lineno - node.lineno + 1 > 60:
                functions.append(node.name)
        elif isinstance(node, ast.Call) and sum(not isinstance(a, ast.Starred | ast.Constant) for a in node.args) > 6:
            calls.append(ast.unparse(node.func))
    return signatures, functions, calls


def test_functions_and_calls_become_shorter():
    parts = [long_parts(path.read_text()) for path in SOURCE.rglob('*.py')]
    for found, most in zip(zip(*parts, strict=True), (LONG_SIGNATURES, LONG_FUNCTIONS, LONG_CALLS), strict=True):
        assert len(names := [name for each in found for name in each]) <= most, names


def test_few_tables_are_laid_out_by_hand():
    assert sum(path.read_text().count('# fmt: skip') for path in SOURCE.rglob('*.py')) <= LAID_OUT_BY_HAND


def test_a_long_signature_function_and_call_is_seen():
    names = ', '.join('abcdefgh')
    lines = '\n    pass' * 60
    assert long_parts(f'def f({names}):{lines}\nf({names})') == (['f'], ['f'], ['f'])
    assert long_parts("def f(*names):\n    f('a', 'b', 'c', 'd', 'e', 'f', 'g')") == ([], [], [])
