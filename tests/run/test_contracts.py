"""Wrong components of a user: each is refused before training, in at most ten lines that name a line of the user's
file.
"""

import pytest

from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.errors import UserError
from runs import Quiet, write_yaml

MODEL = """
import jax, numpy as np
from jax import numpy as jnp, random, tree
from pretrax import register, shardlib
from pretrax.model.base import Model
from pretrax.model.loss import loss_terms

@register('model', 'mine-KEY')
class Bigram(Model):
    @shardlib.pytree_dataclass
    class Weights:
        embed: shardlib.f32['V/t M/d']
        unembed: shardlib.f32['V/t M/d']

    def __init__(self, request):
        self.sizes = {'V': request.vocab_size, 'M': 16}

    def init(self, key):
        like = shardlib.make_abstract(self.Weights, self.sizes)
        weights = tree.map(lambda w: 0.1 * random.normal(key, w.shape), like)
        return weights

    def logits(self, weights, tokens):
        w = tree.map(lambda w: shardlib.all_gather('V/t M/d -> V/t M', w), weights)
        x = shardlib.take('V/t M, B/r/d/e L/c -> B/r/d/e L/c M', w.embed, tokens)
        x = shardlib.psum('t', x)
        return shardlib.einsum('B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t', x, w.unembed)

    def loss(self, weights, batch):
        terms = loss_terms(self.logits(weights, batch.tokens), batch, self.sizes['V'], z_loss=0.0)
        return terms
"""
DATA = """
import numpy as np
from pretrax import register
from pretrax.data.batches.source import HostBatch, Source, pack_rows

class Tokenizer:
    end_of_text = 10

    def encode(self, text):
        ids = list(text.encode())
        return ids

    def decode(self, ids):
        text = bytes(ids).decode()
        return text

@register('data', 'mine-KEY')
class Mine(Source):
    vocab_size = 128
    tokenizer = Tokenizer()
    draw = np.random.default_rng()
    kept = np.zeros(1000, np.int32)

    def __init__(self, request):
        self.length = request.sequence_length

    def batch(self, step, rows, batch_rows):
        numbers = range(step * batch_rows + rows.start, step * batch_rows + rows.stop)
        tokens = np.array([self.row(number) for number in numbers])
        batch = pack_rows(tokens, starts=np.zeros(tokens.shape, bool))
        return batch

    def row(self, number):
        return np.random.default_rng(number).integers(0, 128, self.length + 1)
"""
OPTIMIZER = """
import jax
import jax.numpy as jnp
import optax
from pretrax import register

@register('optimizer', 'mine-KEY')
def mine():
    def init(weights):
        return jax.tree.map(jnp.zeros_like, weights)

    def update(gradient, state, weights=None):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradient)
        updates = state
        return updates, state

    optimizer = optax.GradientTransformation(init, update)
    return optimizer
"""
SCHEDULE = """
import jax.numpy as jnp
from pretrax import register

@register('schedule', 'mine-KEY')
def mine(steps):
    def rate(step):
        multiplier = 1 - 0.5 * step / steps
        return multiplier

    return rate
"""
RIGHT = {'model': MODEL, 'data': DATA, 'optimizer': OPTIMIZER, 'schedule': SCHEDULE}

# A line of a component, what takes its place, the begin of the line that the message names, and a part of the message.
_MODEL = [
    ('class Bigram(Model)', 'class Bigram', '@register', 'not a model of pretrax'),
    ('def init', 'def start', '@register', 'Bigram has no init'),
    ('def loss', 'def lost', '@register', 'Bigram has no loss'),
    ('class Weights', 'class Arrays', '@register', 'Bigram has no Weights'),
    ('@shardlib.pytree_dataclass', '', '@register', 'has Weights = the class Weights'),
    ("'M': 16}", "'M': 16 // 0}", 'self.sizes', 'raised ZeroDivisionError'),
    ('def __init__(self, request)', 'def __init__(self)', '@register', 'raised TypeError'),
    ('return weights', 'return None', 'def init', 'found: NoneType'),
    ('return weights', 'return vars(weights)', 'def init', 'found: dict'),
    ('random.normal(key, w.shape)', 'random.normal(key, w.shape[:1])', 'def init', 'has 2 dimensions, the value has 1'),
    ('random.normal(key, w.shape)', 'random.normal(key, w.shape, jnp.bfloat16)', 'def init', 'float32'),
    ('return weights', 'return self.Weights(weights.embed, weights.unembed[:, :8])', 'def init', 'M is 16 by'),
    ('tree.map(lambda w: 0.1 * ', 'tree.map(lambda w: key.nothing * ', 'weights = tree', 'raised AttributeError'),
    ('return terms', "return 'nll', terms", 'def loss', "loss returned a tuple of ('nll', a dict"),
    ('return terms', "return terms['nll'][0]", 'def loss', 'loss returned float32[]'),
    ('return terms', 'return None', 'def loss', 'loss returned None'),
    ('return terms', "return {'nll': terms['nll'][0]}", 'def loss', "loss returned 'nll': float32[]"),
    ('return terms', "return {'nll': (batch.mask, batch.mask)}", 'def loss', "loss returned 'nll': a tuple of"),
    ('return terms', "return terms | {'more': terms['nll']}", 'def loss', "terms ['more', 'nll'], but denominators"),
    ("x = shardlib.psum('t', x)", 'pass', 'return shardlib.einsum', "a partial sum needs psum('t', x)"),
    ('batch.tokens)', 'batch.token)', 'terms = loss_terms', 'raised AttributeError'),
    ("x = shardlib.psum('t', x)", "x = jnp.cumsum(shardlib.psum('t', x)[:, ::-1], 1)[:, ::-1]", 'def loss', 'causal'),
    ('return terms', "return {'nll': (terms['nll'][0] / 0, terms['nll'][1])}", 'def loss', 'a finite loss'),
    ('random.normal(key, w.shape)', 'np.random.randn(*w.shape).astype(np.float32)', 'def init', 'called twice'),
    ("'V': request.vocab_size", "'V': 64", 'def logits', '64 columns over mesh.t'),
]
_DATA = [
    ('class Mine(Source)', 'class Mine', '@register', 'expected a data source'),
    ('vocab_size = 128', '', '@register', 'has no vocab_size'),
    ('vocab_size = 128', "vocab_size = '128'", '@register', "vocab_size is '128'"),
    ('def batch', 'def batches', '@register', "abstract method 'batch'"),
    ('vocab_size = 128', 'vocab_size = 100', 'def batch', 'ids from 0 to vocab_size - 1 = 99'),
    ('return batch\n', 'return batch._replace(tokens=batch.tokens - 5)\n', 'def batch', 'tokens of a batch has -'),
    ('return batch\n', 'return batch._replace(targets=batch.targets + 500)\n', 'def batch', 'targets of a batch has 6'),
    ('return batch\n', 'return batch._replace(tokens=batch.tokens + 0.5)\n', 'def batch', '.astype(np.int32)'),
    ('return batch\n', 'return batch._replace(mask=batch.mask > 0)\n', 'def batch', '.astype(np.float32)'),
    ('return batch\n', 'return batch._replace(mask=batch.mask - 2)\n', 'def batch', 'mask of a batch has -'),
    ('return batch\n', 'return batch._replace(mask=batch.mask * 0)\n', 'def batch', 'is 0 everywhere'),
    (
        'return batch\n',
        'self.kept[: batch.tokens.size] = batch.tokens.ravel()\n        return batch._replace(tokens='
        'self.kept[: batch.tokens.size].reshape(batch.tokens.shape))\n',
        'def batch',
        'changes an earlier one',
    ),
    ('return batch\n', 'return None\n', 'def batch', 'a batch is None'),
    ('return batch\n', 'return batch._asdict()\n', 'def batch', 'a batch is a dict with the keys'),
    ('return batch\n', 'return batch[:3]\n', 'def batch', 'such as pack_rows returns'),
    ('self.length + 1)', 'self.length)', 'def batch', 'int32[4, 16]: [rows'),
    ('rows.start, step', '0, step', 'def batch', 'rows'),
    ('np.random.default_rng(number)', 'self.draw', 'def batch', 'batch 0, read twice, is not the same'),
    ('for number in numbers', 'for number in range(len(numbers))', 'def batch', 'depend on which rows are read with'),
    ('return np.random.default_rng(number)', 'return np.random.default_rng(-1 - number)', 'return np', 'ValueError'),
    ('return ids', 'return text', 'def encode', "encode returned 'The 3 cats"),
    ('return ids', 'return [999]', 'def encode', 'encode returned a list of (999)'),
    ('return text', 'return ids', 'def decode', 'decode returned a list'),
    ('text = bytes(ids).decode()', 'text = chr(ids)', 'text = chr', 'raised TypeError'),
    ('end_of_text = 10', '', '@register', 'has no end_of_text'),
    ('def decode', 'def decoded', '@register', 'has no decode'),
]
_OPTIMIZER = [
    ('return optimizer', 'return None', '@register', 'it returned None'),
    ('return optimizer', 'return init, update', '@register', 'it returned a tuple of (a function, a function)'),
    ('return optimizer', 'return update', '@register', 'it returned a function'),
    ('return optimizer', 'return optax.adam(1e-3)', '@register', 'points against the gradient'),
    ('return updates, state', 'return updates', 'def update', 'update returned an object of Weights'),
    ('updates = state', 'updates = jax.tree.map(lambda g: -g, gradient)', 'def update', 'against the gradient'),
    ('updates = state', 'updates = jax.tree.map(jnp.mean, gradient)', 'def update', 'of update is float32[]'),
    ('updates = state', 'updates = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradient)', 'def update', 'bfloat16'),
    ('updates = state', 'updates = jax.tree.leaves(state)', 'def update', 'as in the gradient'),
    ('return updates, state', 'return updates, None', 'def update', 'of update is None'),
    (
        'updates = state',
        'updates = jax.tree.map(lambda g: g / 0 - g / 0, gradient)',
        'def update',
        'first update is nan',
    ),
    ('state = jax.tree.map(lambda m, g: 0.9', 'state = jax.tree.map(lambda m, g: m.x', 'state = jax', 'AttributeError'),
    ('return jax.tree.map(jnp.zeros_like, weights)', 'return weights.none', 'return weights.none', 'AttributeError'),
]
_SCHEDULE = [
    ('return rate', 'return 0.5', '@register', 'it returned 0.5'),
    ('return multiplier', 'return None', 'def rate', 'the schedule returned None'),
    ('return multiplier', 'return multiplier, step', 'def rate', 'the schedule returned a tuple'),
    ('return multiplier', 'return jnp.ones(2)', 'def rate', 'the schedule returned float32[2]'),
    ('return multiplier', 'return multiplier - 0.8', 'def rate', 'for step 3'),
    ('return multiplier', 'return 3e-4 * multiplier', 'def rate', 'returned 0.0003 at most'),
    ('return multiplier', 'return 0.0', 'def rate', 'returned 0 at most'),
    ('return multiplier', 'return step / (steps - 1 - step)', 'def rate', 'returned inf for step 5'),
    ('return multiplier', 'return 1.0 if step < 2 else 0.5', 'return 1.0', 'raised TracerBoolConversionError'),
]
TABLE = {'model': _MODEL, 'data': _DATA, 'optimizer': _OPTIMIZER, 'schedule': _SCHEDULE}
CASES = [(kind, *case) for kind, cases in TABLE.items() for case in cases]


def run_with(directory, plugins):
    """The values of a run with a plugin of each of some kinds, whose names are as the directory, so not taken."""
    key = f'{directory.name}'.replace('_', '-')
    for kind, text in plugins.items():
        (directory / f'{kind}.py').write_text(text.replace('KEY', key))
    values = {
        'name': 'contracts',
        'run_dir': str(directory / 'run'),
        'steps': 6,
        'model': {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 4}},
        'data': {'name': 'synthetic', 'vocab_size': 128},
        'batch': {'tokens': 64, 'sequence_length': 16},
        'mesh': {'d': 2, 't': 4},
        'log': {'report': False},
        'eval': {'every': 0},
        'sample': {'every': 0},
        'plugins': [str(directory / f'{kind}.py') for kind in plugins],
    }
    values |= {kind: {'name': f'mine-{key}'} for kind in plugins}
    values['optimizer'] = values.get('optimizer', {}) | {'learning_rate': 0.01}
    return values


@pytest.mark.parametrize(('kind', 'old', 'new', 'line', 'message'), CASES, ids=range(len(CASES)))
def test_a_wrong_component_is_refused_with_its_line(tmp_path, capsys, kind, old, new, line, message):
    assert RIGHT[kind].count(old) == 1
    wrong = RIGHT[kind].replace(old, new)
    used = {'model': MODEL} if kind != 'model' else {}  # compiles faster than a decoder
    values = run_with(tmp_path, used | {kind: wrong})
    with pytest.raises(SystemExit) as ended:
        main(['train', write_yaml(values, tmp_path / 'run.yaml'), '--dry-run'])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert len(said.splitlines()) <= 10, said
    number = 1 + next(i for i, text in enumerate(wrong.splitlines()) if text.strip().startswith(line))
    assert said.startswith(f'{tmp_path / kind}.py:{number}: '), said
    assert message in said


def test_right_components_train_and_resume(tmp_path):
    values = run_with(tmp_path, RIGHT)
    pretrain(config_from_values(values | {'steps': 2}), progress=Quiet(), allow_changes=True)
    assert int(pretrain(config_from_values(values), progress=Quiet(), allow_changes=True).state.step) == 6


def test_components_of_pretrax_are_not_checked(tmp_path, monkeypatch):
    """`_traced` and `_check_rows` are not called, so the checks cost nothing."""
    for check in ('_traced', '_check_rows', '_check_causality', '_check_direction'):
        monkeypatch.setattr(f'pretrax.run.contracts.{check}', None)
    values = run_with(tmp_path, {})
    assert int(pretrain(config_from_values(values), progress=Quiet()).state.step) == 6


def test_a_module_of_flax_that_sees_later_tokens_is_refused(tmp_path, monkeypatch):
    (tmp_path / 'later_tokens.py').write_text(LATER_TOKENS)
    monkeypatch.syspath_prepend(tmp_path)
    values = run_with(tmp_path, {}) | {'model': {'name': 'nnx', 'target': 'later_tokens:Later'}}
    with pytest.raises(UserError, match=f'^{tmp_path}/later_tokens.py:5: model nnx: the loss of the first 9 tokens'):
        pretrain(config_from_values(values), progress=Quiet())
    causal = LATER_TOKENS.replace('Later', 'Causal').replace('x[:, ::-1], axis=1)[:, ::-1]', 'x, axis=1)')
    (tmp_path / 'earlier_tokens.py').write_text(causal)
    values['model'] = {'name': 'nnx', 'target': 'earlier_tokens:Causal'}
    assert int(pretrain(config_from_values(values), progress=Quiet()).state.step) == 6


LATER_TOKENS = """
import jax.numpy as jnp
from flax import nnx

class Later(nnx.Module):
    def __init__(self, vocab_size, rngs):
        self.embed, self.head = nnx.Embed(vocab_size, 8, rngs=rngs), nnx.Linear(8, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(jnp.cumsum(x[:, ::-1], axis=1)[:, ::-1])
"""


def test_a_run_keeps_the_traceback_of_a_component(tmp_path, capsys):
    values = run_with(tmp_path, {'model': MODEL.replace('batch.tokens)', 'batch.token)')})
    with pytest.raises(SystemExit) as ended:
        main(['train', write_yaml(values, tmp_path / 'run.yaml')])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f'the traceback is in {tmp_path}/run/traceback.txt'
    assert 'AttributeError' in (tmp_path / 'run' / 'traceback.txt').read_text()


def test_each_batch_of_a_source_is_checked_while_a_run_trains(tmp_path, capsys):
    late = DATA.replace(
        '        return batch\n', '        return batch._replace(tokens=batch.tokens + 200 * (step == 3))\n'
    )
    values = run_with(tmp_path, {'model': MODEL, 'data': late})
    with pytest.raises(SystemExit) as ended:
        main(['train', write_yaml(values, tmp_path / 'run.yaml')])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert 'ids from 0 to vocab_size - 1 = 127' in said
    assert f'{tmp_path}/data.py:' in said


PART = """
from pretrax import register

@register('KIND', 'mine-KEY')
def mine(first, second, third, layer=None):
    return RESULT
"""


@pytest.mark.parametrize(
    ('kind', 'result', 'line', 'message'),
    [
        ('mixer', 'first[:, ::-1]', 4, 'changes with the tokens after them'),
        ('feed_forward', 'first[..., :8]', 4, 'raised'),
        ('mixer', 'second.nothing', 6, 'raised AttributeError'),
        ('loss', 'first.nothing', 6, 'raised AttributeError'),
        ('mixer', 'None', 4, 'the mixer returned NoneType'),
        ('mixer', "first.astype('float16')", 4, 'the mixer returned float16[2, 4, 16] on each device; expected '),
        ('feed_forward', '(first, first)', 4, 'the feed_forward returned tuple'),
        ('loss', '0.0', 4, 'the loss returned float on each device; expected a number for each token: f32[2, 16]'),
        ('loss', 'second.mask.mean()', 4, 'the loss returned float32[] on each device'),
    ],
)
def test_a_wrong_part_of_the_decoder_is_refused_with_its_line(tmp_path, capsys, kind, result, line, message):
    values = run_with(tmp_path, {'model': PART.replace('KIND', kind).replace('RESULT', result)})
    values['model'] |= {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 4}}
    with pytest.raises(SystemExit) as ended:
        main(['train', write_yaml(values, tmp_path / 'run.yaml'), '--dry-run'])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert said.startswith(f'{tmp_path}/model.py:{line}: '), said
    assert message in said
    assert len(said.splitlines()) <= 10
