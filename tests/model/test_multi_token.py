"""Multi-token prediction equals the paper's formulas in plain JAX, document by document,
and transformers on a real layout.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reference
from decoders import decoder_options
from pretrax.cost.flops import flops_per_token
from pretrax.errors import UserError
from pretrax.huggingface.export import export
from pretrax.huggingface.model import open_model
from pretrax.model import multi_token
from pretrax.model.architecture import resolve
from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch, means
from pretrax.model.weights import Weights, abstract_weights
from pretrax.shardlib import f32, num, psum, typed_shard_map
from pretrax.train.step import make_gradients
from small import LATENT, LLAMA, MIXTURE, assert_same, mesh_of, random_batch, random_weights, transformer

GOLDENS = Path(__file__).parents[1] / 'goldens'
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
MODULES = {'mtp_layers': 2, 'mtp_loss': 0.7}
OPTIONS = {
    'dense': LLAMA | MODULES | {'tied': True, 'z_loss': 0.01},
    'experts': MIXTURE | MODULES | {'dense_layers': 1, 'n_layers': 3, 'balance_loss': 0.2, 'router_z_loss': 0.1},
    'batch': MIXTURE | MODULES | {'balance_loss': 0.2, 'balance_over': 'batch'},
    'latent': LATENT | MODULES,
}


def gradients(options, mesh=None, rows=4, accumulation=1):
    mesh = mesh or {}
    model = transformer(options | {'layers': 'scan'}, mesh_of(**mesh))
    batch, order = random_batch(rows), model.column_order
    if order is not None:
        batch = jax.tree.map(lambda x: x[:, order], batch)
    with jax.set_mesh(mesh_of(**mesh)):
        weights = random_weights(model)
        placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
        compute = jax.jit(make_gradients(model, accumulation), compiler_options=QUICK)
        gradient, terms, tables = jax.device_get(compute(placed, batch))
        return model, weights, (gradient, means(terms), tables)


@pytest.mark.nightly
@pytest.mark.parametrize('name', OPTIONS)
def test_the_loss_and_its_gradient_equal_the_reference(name):
    model, weights, (gradient, terms, tables) = gradients(OPTIONS[name])
    expected, wanted = reference.gradient_of(model.arch)(weights, random_batch(4))
    assert terms.keys() == wanted.keys()
    assert {'mtp_loss/1', 'mtp_loss/2'} < terms.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(terms[key], value, rtol=2e-5, err_msg=key)
    assert_same(gradient, expected, rtol=2e-4, floor=1e-6)
    metrics = model.summarize({key: jnp.asarray(table) for key, table in tables.items()})
    for k in (1, 2):  # without the weight of each
        np.testing.assert_allclose(metrics[f'mtp_nll/{k}'], wanted[f'mtp_loss/{k}'] / 0.35, rtol=2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('name', 'mesh', 'more'),
    [
        ('dense', {'d': 2, 't': 2}, {'loss_chunks': 2}), ('dense', {'c': 4}, {'context': 'ring'}), ('dense', {'c': 2,
        't': 2}, {}),
        ('dense', {}, {'save': 'none'}), ('experts', {'e': 2, 'r': 2}, {}), ('experts', {'t': 2}, {'layers': 'unroll',
        'save': 'attention'}),
        ('latent', {'t': 2, 'd': 2}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_any_mesh_gives_the_gradient_of_one_device(name, mesh, more):
    options = OPTIONS[name] | {'n_kv_heads': 4} | more
    _, _, (expected, wanted, _) = gradients(OPTIONS[name] | {'n_kv_heads': 4})
    _, _, (gradient, terms, _) = gradients(options, mesh)
    for key, value in wanted.items():
        np.testing.assert_allclose(terms[key], value, rtol=2e-5, err_msg=key)
    assert_same(gradient, expected, rtol=2e-4, floor=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['dense', 'batch'])
def test_micro_batches_give_the_gradient_of_the_whole_batch(name):
    _, _, (expected, wanted, tables) = gradients(OPTIONS[name])
    _, _, (gradient, terms, parts) = gradients(OPTIONS[name], accumulation=2)
    for key, value in (wanted | tables).items():
        np.testing.assert_allclose((terms | parts)[key], value, rtol=2e-5, err_msg=key)
    assert_same(gradient, expected, rtol=2e-4, floor=1e-6)


@pytest.fixture
def released(tmp_path):
    """A checkpoint of GLM-4.5 with a module behind its layers, as released: tables are repeated.
    And what transformers computes.
    """
    golden, case = load_file(GOLDENS / 'multi_token.safetensors'), GOLDENS / 'glm4-moe'
    expected = {name: golden.pop(name) for name in ('tokens', 'logits')}
    tensors = load_file(case / 'model.safetensors') | golden
    config = json.loads((case / 'config.json').read_text()) | {'num_nextn_predict_layers': 1}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    repeated = {
        'model.layers.2.embed_tokens.weight': tensors['model.embed_tokens.weight'],
        'model.layers.2.shared_head.head.weight': tensors['lm_head.weight'],
    }
    save_file(tensors | repeated, tmp_path / 'model.safetensors')
    return tmp_path, tensors, expected


def read(directory, asked):
    """The decoder with the modules that the files have, and its weights."""
    found = open_model(str(directory)).with_modules(asked)
    model = transformer(found.options, vocab_size=found.arch.vocab_size, length=20)
    with jax.set_mesh(mesh_of()):
        like = model.abstract()
    source = found.weights(like)
    weights = {path: np.zeros(shape, np.float32) for path, shape in source.shapes.items()}
    for path, array in weights.items():
        for at, piece in source.pieces(path):
            array[at] = piece
    paths, tree = jax.tree_util.tree_flatten_with_path(like)
    flat = [weights[jax.tree_util.keystr(path, simple=True, separator='.')] for path, _ in paths]
    return found, model, source, tree.unflatten(flat)


def test_a_released_module_computes_what_transformers_computes(released, monkeypatch):
    """tests/goldens/make_multi_token.py: its logits, and the loss of the tokens after the next."""
    directory, _, expected = released
    found, model, _, weights = read(directory, asked=3)
    assert found.arch.multi_token.n_layers == 1
    assert not found.notes
    tokens, plain = expected['tokens'], multi_token.loss_terms
    monkeypatch.setattr(multi_token, 'loss_terms', lambda logits, *more: plain(logits, *more) | {'logits': logits})
    monkeypatch.setattr(multi_token, 'in_chunks', lambda of, x, batch, chunks: keep(of(x, batch)))
    kept = []

    def keep(terms):
        kept.append(terms.pop('logits'))
        return terms

    rows, length = tokens[:, 1:].shape
    ones = np.ones((rows, length), np.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones, np.arange(length) * ones, ones.astype(np.float32))

    @typed_shard_map
    def run(weights: Weights, batch: Batch) -> tuple[dict[str, tuple[f32[''], f32['']]], num['B/r/d/e L/c V/t']]:
        kept.clear()
        terms = model.loss(weights, batch)
        return {'mtp_loss/1': psum(TOKENS, terms['mtp_loss/1'])}, kept[0]

    with jax.set_mesh(mesh_of()):
        terms, logits = jax.jit(run, compiler_options=QUICK)(weights, batch)
    wanted = expected['logits'][:, :-1]  # the last token has none behind it
    logits = np.asarray(logits)[:, :-1, : wanted.shape[-1]]
    assert np.abs(logits - wanted).max() < 1e-4 * np.abs(wanted).max()
    of_target = jnp.take_along_axis(jax.nn.log_softmax(wanted), tokens[:, 2:, None], axis=-1)
    total, count = terms['mtp_loss/1']
    np.testing.assert_allclose(total / count, -0.3 * of_target.mean(), rtol=1e-5)


def test_modules_are_exported_under_the_released_names(released):
    directory, tensors, _ = released
    _, model, source, weights = read(directory, asked=1)
    files = export(source, model.arch, weights, directory / 'out', dtype='F32', say=lambda _: None)
    assert 'model.safetensors' in files
    written = load_file(directory / 'out' / 'model.safetensors')
    assert written.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(written[name], x, err_msg=name)
    assert json.loads((directory / 'out' / 'config.json').read_text())['num_nextn_predict_layers'] == 1


def test_files_without_modules_have_none(released):
    directory, tensors, _ = released
    save_file({n: x for n, x in tensors.items() if 'layers.2.' not in n}, directory / 'model.safetensors')
    assert open_model(str(directory)).with_modules(1).arch.multi_token.n_layers == 0


def test_a_pipeline_and_a_weight_without_modules_are_refused():
    with pytest.raises(UserError, match='does not run in pipeline stages'):
        transformer(OPTIONS['dense'], mesh_of(p=2))
    with pytest.raises(
        ValueError, match=r'model\.multi_token\.loss = 0\.1 weights multi-token prediction, but there is none'
    ):
        transformer(LLAMA | {'mtp_loss': 0.1})


def test_flops_and_parameters_of_a_module_are_those_of_a_layer_two_projections_and_the_unembedding():
    """Of DeepSeek-V3's 685B parameters in files, 14B are of the module;
    2 * 0.93B of these repeat the tables (its README).
    """
    plain, more = (resolve(decoder_options(preset='deepseek-v3', mtp_layers=n), 129280, 4096) for n in (0, 1))
    assert more.n_matmul_params - plain.n_matmul_params == (
        (plain.n_matmul_params - resolve(decoder_options(preset='deepseek-v3', n_layers=60), 129280,
        4096).n_matmul_params)
        + 2 * 7168**2 + 129280 * 7168
    )  # fmt: skip
    with jax.set_mesh(mesh_of()):
        counts = [sum(w.size for w in jax.tree.leaves(abstract_weights(arch))) for arch in (plain, more)]
    assert counts[1] - counts[0] + 2 * 129280 * 7168 == pytest.approx(14e9, rel=0.05)
    longer = [flops_per_token(arch, 4096).causal for arch in (plain, more)]
    keys = 12 * 128 * (192 + 128) / 2 * 2048
    assert longer[1] - longer[0] == 6 * (more.n_matmul_params - plain.n_matmul_params) + keys


def test_without_modules_nothing_is_computed():
    """No weight, no term, and a program of the loss without a scope of modules."""
    for modules in (0, 1):
        model, batch = transformer(LLAMA | {'mtp_layers': modules}), random_batch(2)
        with jax.set_mesh(mesh_of()):
            weights = model.abstract()
            assert len(jax.tree.leaves(weights.multi_token)) == (len(jax.tree.leaves(weights.layers)) + 5) * modules
            text = jax.jit(make_gradients(model, 1)).lower(weights, batch).as_text(debug_info=True)
        assert ('(multi_token)' in text) == bool(modules)
