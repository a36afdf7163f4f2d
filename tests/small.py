"""What the tests of model, train and infer share: meshes of simulated devices, small models, weights and batches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from decoders import decoder_options
from pretrax.model.axes import AXES
from pretrax.model.loss import Batch
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer

VOCAB, LENGTH = 100, 16
LLAMA = {'family': 'llama', 'n_layers': 2, 'd_model': 32, 'n_heads': 4, 'n_kv_heads': 2, 'd_ff': 48}
MIXTURE = LLAMA | {'d_ff': 16, 'n_experts': 4, 'experts_per_token': 2, 'd_shared': 24, 'shared_gate': True}
LATENT = {
    'family': 'llama', 'n_layers': 2, 'd_model': 32, 'n_heads': 4, 'd_ff': 48, 'd_head': 8, 'kv_rank': 12, 'q_rank': 16,
    'd_rope': 4, 'd_nope': 6,
}  # fmt: skip
LLAMA4 = MIXTURE | {
    'family': 'llama4', 'n_layers': 4, 'shared_gate': False, 'expert_every': 2, 'd_ff_dense': 48, 'nope_every': 3,
    'window': 5, 'global_every': 3, 'attention_temperature': 0.5, 'temperature_length': 3,
}  # fmt: skip
GPT2 = {'family': 'gpt2', 'n_layers': 2, 'd_model': 32, 'n_heads': 4}


def mesh_of(r=1, d=1, t=1, e=1, c=1, p=1):
    """As many of the simulated devices as it takes."""
    sizes = r, d, e, c, t, p
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def transformer(options, mesh=None, *, vocab_size=VOCAB, length=LENGTH, dtype=jnp.float32, micro_batches=1):
    """A decoder for a mesh (default: of one device)."""
    sizes = dict(mesh.shape) if mesh is not None else dict.fromkeys(AXES, 1)
    request = ModelRequest(vocab_size, length, None, dtype, 'cpu', sizes, micro_batches)
    return Transformer(request, options=decoder_options(**options))


def count_parameters(options, vocab_size=VOCAB, length=LENGTH):
    """Counted on the arrays themselves, without the rows that pad the vocabulary; nothing is allocated."""
    model = transformer(options, vocab_size=vocab_size, length=length)
    with jax.set_mesh(mesh_of()):
        weights = model.abstract()
    tables = 1 if model.arch.embedding.tied else 2
    padding = tables * (model.arch.padded_vocab_size - model.arch.vocab_size) * model.arch.d_model
    return sum(w.size for w in jax.tree.leaves(weights)) - padding


def random_weights(model, seed=0):
    """Host weights with nothing special about them: norms are not 1, biases are not 0, padding rows are not 0."""
    rng = np.random.default_rng(seed)

    def draw(path, like):
        name = path[-1].name
        about = 1.0 - model.arch.norm.offset if 'norm' in name and not name.endswith('bias') else 0.0
        return (about + 0.2 * rng.standard_normal(like.shape)).astype(np.float32)

    with jax.set_mesh(mesh_of()):
        return jax.tree_util.tree_map_with_path(draw, model.abstract())


def random_batch(rows, seed=0, *, length=LENGTH, vocab_size=VOCAB, n_documents=3):
    """Rows of up to n_documents packed documents, a third of whose targets do not count and the rest by weight."""
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(1, n_documents + 1, (rows, length)), axis=1)
    first = np.array([[row.tolist().index(s) for s in row] for row in segments])
    tokens, targets = rng.integers(0, vocab_size, (2, rows, length))
    mask = (rng.random((rows, length)) * (rng.random((rows, length)) < 2 / 3)).astype(np.float32)
    positions = np.arange(length) - first
    return Batch(*(x.astype(np.int32) for x in (tokens, targets, segments, positions)), mask=mask)


def assert_same(actual, expected, *, rtol, floor=0.0):
    """Each array equals the expected one: the norm of the difference, relative to the norm, with an absolute floor."""
    names = [jax.tree_util.keystr(path, simple=True, separator='.') for path, _ in
             jax.tree_util.tree_leaves_with_path(expected)]  # fmt: skip
    wrong = []
    for name, a, b in zip(names, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, name
        error, allowed = np.linalg.norm(a - b), rtol * np.linalg.norm(b) + floor
        if not error <= allowed:
            wrong.append(f'{name}: |a - b| = {error:.3g}, allowed {allowed:.3g}, |b| = {np.linalg.norm(b):.3g}')
    assert not wrong, '\n'.join(wrong)
