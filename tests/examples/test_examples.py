"""The examples run through the real command line and do what they say, and their plugins stay short."""

import ast
import io
import json
import os
import shutil
import tokenize
from pathlib import Path

import numpy as np
import pytest

import preloaded
from pretrax.data.batches.source import DataRequest, Source

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / 'examples'
PLUGINS = sorted(EXAMPLES.glob('my_*.py'))
LONGEST = 20

FEW = ('steps=4', 'schedule.warmup=1', 'log.every=1', 'eval.batches=1', 'sample.tokens=4')
SMALL = ('model.n_layers=1', 'model.d_model=64')
MESH = ('mesh.d=2', 'mesh.t=2')
SMALL_TEXT = ('data.text=text.py', 'data.vocab_size=300', 'batch.tokens=1024', 'batch.sequence_length=64')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A directory with the examples, the configurations they extend, and a text."""
    directory = tmp_path_factory.mktemp('place')
    shutil.copytree(EXAMPLES, directory / 'examples', ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copytree(REPOSITORY / 'configs', directory / 'configs')
    (directory / 'text.py').write_text(Path(ast.__file__).read_text() * 2)
    return directory


def run(place, *command):
    environment = os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'}  # as a user's: no 8 devices
    done = preloaded.run(command, cwd=place, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(place, name):
    lines = (place / 'runs' / name / 'metrics.jsonl').read_text().splitlines()
    return [metrics['loss'] for metrics in map(json.loads, lines) if 'loss' in metrics]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('configuration', 'component', 'changes'),
    [
        ('optimizer', 'signum', (*SMALL_TEXT, *SMALL)),
        ('model', 'bigram', (*SMALL_TEXT, *MESH)),
        ('data', 'sums', ('batch.tokens=1024', *SMALL)),
        ('min_gru', 'min-gru', (*SMALL_TEXT, *MESH, 'model.n_layers=2')),
    ],
)
def test_a_component_of_the_users_own_trains(place, configuration, component, changes):
    run(
        place,
        'pretrax',
        'train',
        f'examples/{configuration}.yaml',
        'name=own',
        f'run_dir=runs/{component}',
        *FEW,
        *changes,
    )
    found = losses(place, component)
    assert len(found) == 4
    assert found[-1] < found[0]
    assert f'name: {component}' in (place / 'runs' / component / 'config.yaml').read_text()


@pytest.mark.slow
def test_attention_over_an_own_axis_equals_one_device_and_sends_what_its_page_says(place):
    lines = [line.split() for line in run(place, 'python', 'examples/ring_attention.py').splitlines()]
    assert [line[0] for line in lines] == ['plain', 'gathered', 'ring']
    assert max(float(line[3].rstrip(';')) for line in lines) < 1e-4
    page = (REPOSITORY / 'docs' / 'tutorials' / 'new-axis.md').read_text()
    assert all(' '.join(line).split('; ')[1] in page for line in lines)


def test_the_data_source_is_a_function_of_seed_step_and_row(tmp_path):
    namespace = {}
    exec(
        compile((EXAMPLES / 'my_data.py').read_text().replace("@register('data', 'sums')", ''), 'my_data', 'exec'),
        namespace,
    )
    source = namespace['Sums'](DataRequest(seed=1, sequence_length=40, directory=tmp_path, say=print), largest=9)
    assert isinstance(source, Source)
    whole = source.batch(3, slice(0, 6), 6)
    for got, expected in zip(source.batch(3, slice(2, 5), 6), whole, strict=True):
        np.testing.assert_array_equal(got, expected[2:5])
    assert not np.array_equal(source.batch(4, slice(0, 6), 6).tokens, whole.tokens)
    # What ends a sum is predicted; what begins the next one cannot be.
    ends = whole.targets == source.end_of_text
    assert ends.any()
    assert (whole.mask[ends] == 1).all()
    after = whole.tokens == source.end_of_text
    assert (whole.mask[after] == 0).all()
    assert (whole.mask[~after] == 1).all()
    for line in source.decode(whole.tokens[0].tolist()).split('\n')[:-1]:
        question, _, answer = line.partition('=')
        assert eval(question) == int(answer)


@pytest.mark.slow
def test_training_as_a_library_prints_the_results_and_a_second_time_those_of_the_finished_run(place):
    shown = [run(place, 'python', 'examples/library_use.py', *FEW, *SMALL, *SMALL_TEXT) for _ in range(2)]
    results = [text[text.index('run: ') :].splitlines() for text in shown]
    assert results[0][0] == 'run: runs/library, done at step 4 of 4'
    assert results[0] == results[1]
    assert any(line.startswith('def ') for line in results[0])
    assert len(losses(place, 'library')) == 4


def test_a_loop_of_the_users_own_trains(place):
    (place / 'src').mkdir()
    (place / 'src' / 'text.py').write_text((place / 'text.py').read_text())
    steps = [line.split() for line in run(place, 'python', 'examples/own_loop.py').splitlines()]
    steps = [(int(words[0]), float(words[1])) for words in steps if len(words) == 2 and words[0].isdigit()]
    assert [number for number, _ in steps] == list(range(1, 21))
    assert steps[-1][1] < steps[0][1]


@pytest.mark.parametrize('path', PLUGINS, ids=lambda path: path.name)
def test_a_plugin_is_short(path):
    assert lines_of_code(path.read_text()) <= LONGEST


def lines_of_code(source):
    """Lines that hold anything but comments and docstrings."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in quiet]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)
