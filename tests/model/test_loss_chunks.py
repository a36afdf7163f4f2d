"""A loss in parts is the loss of the whole, however the mesh shares out the sequence;
and the logits are never whole.
"""

import math
import re

import jax
import pytest

import reference
from pretrax.errors import UserError
from pretrax.model.loss import chunks_of, in_chunks, means
from pretrax.train.step import make_gradients
from small import GPT2, LLAMA, assert_same, mesh_of, random_batch, random_weights, transformer

ROWS, CHUNKS = 8, 4


@pytest.mark.parametrize(
    ('options', 'mesh', 'micro_batches'),
    [
        pytest.param(GPT2, {}, 1, marks=pytest.mark.slow),
        pytest.param(LLAMA, {'d': 4, 't': 2}, 1, marks=pytest.mark.slow),
        (LLAMA, {'r': 2, 'c': 2, 't': 2}, 1),
        pytest.param(LLAMA, {'p': 2, 't': 2}, 2, marks=pytest.mark.slow),
    ],
    ids=['one device', 'd t', 'c t', 'p t'],
)
def test_gradients_are_those_of_the_reference(options, mesh, micro_batches):
    options = options | {'z_loss': 0.02, 'loss_chunks': CHUNKS}
    sizes, batch = mesh_of(**mesh), random_batch(ROWS)
    model = transformer(options, sizes, micro_batches=micro_batches)
    weights = random_weights(model)
    expected, terms = reference.gradient_of(model.arch)(weights, batch)
    if mesh.get('c'):
        order = model.column_order
        batch = batch if order is None else jax.tree.map(lambda x: x[:, order], batch)
    with jax.set_mesh(sizes):
        gradient, found, _ = jax.jit(make_gradients(model, 1))(weights, batch)
    assert_same(means(found), terms, rtol=1e-5)
    assert_same(gradient, expected, rtol=2e-5, floor=1e-6)  # the gradient of a bias of keys is none


def test_no_array_of_the_program_is_as_large_as_all_logits():
    rows, length, vocab = 4, 256, 2048

    def largest_with_the_vocabulary(chunks):
        model = transformer(LLAMA | {'loss_chunks': chunks}, vocab_size=vocab, length=length)
        with jax.set_mesh(mesh_of()):
            batch = random_batch(rows, length=length, vocab_size=vocab)
            text = jax.jit(make_gradients(model, 1)).lower(model.abstract(), batch).compile().as_text()
        sizes = [[int(n) for n in dims.split(',')] for dims in re.findall(r'= f32\[([\d,]+)\]', text)]
        return max((dims for dims in sizes if vocab in dims), key=math.prod)

    whole, part = largest_with_the_vocabulary(1), largest_with_the_vocabulary(8)
    assert sorted(whole) == [rows, length, vocab] or sorted(whole) == [rows * length, vocab]
    assert max(part) == vocab
    assert rows * length not in part
    assert length not in part


def test_chunks_that_do_not_divide_a_sequence_are_refused():
    with pytest.raises(UserError, match=r'loss_chunks = 3 does not divide the 8 tokens[^$]*use model.loss_chunks=2'):
        transformer(LLAMA | {'loss_chunks': 3}, mesh_of(t=2))


def test_one_chunk_adds_no_loop():
    called = []
    assert in_chunks(lambda x, batch: called.append((x, batch)) or {}, 'x', 'batch', 1) == {}
    assert called == [('x', 'batch')]


def test_chunks_divide_the_sequence():
    assert [chunks_of(16, n) for n in (1, 3, 8, 9, 99)] == [1, 4, 8, 16, 16]
    assert chunks_of(7, 2) == 7
