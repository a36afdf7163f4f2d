"""Each family computes what `transformers` computes, and no choice of it could be another (tests/goldens)."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from goldens.golden import (
    CASES,
    LOGITS,
    QUICK,
    batch,
    captured_logits,
    config,
    golden,
    mask_of_documents,
    model_of,
    options,
    ours,
    relative,
    tensors,
)  # fmt: skip
from pretrax.huggingface.configs import write_config
from pretrax.huggingface.names import TABLES
from pretrax.huggingface.weights import tensors_of
from pretrax.infer.generate import generate
from pretrax.model import attention, long_attention
from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch
from pretrax.model.weights import Weights
from pretrax.shardlib import f32, num, psum, typed_shard_map
from small import mesh_of

PAGE = Path(__file__).parents[2] / 'docs' / 'models.md'
GRADIENTS = 1e-3  # relative, in f32
FAST = ('gpt2', 'llama3')
SLOW = ('gemma3', 'qwen3', 'gpt-oss', 'deepseek-v3', 'qwen3-next', 'mamba2')  # the others are nightly
COLUMNS = ('logits', 'loss', 'gradients', 'packed documents', 'generation', 'export')


@pytest.fixture(autouse=True)
def several_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(attention, 'BLOCK', 20)
    monkeypatch.setattr(long_attention, 'MOST', 20)


def computes(model, monkeypatch):
    """weights, batch -> the mean of -log p, the loss on how routers balance experts (0: there are none), the logits."""
    captured_logits(monkeypatch)

    @typed_shard_map
    def run(weights: Weights, batch: Batch) -> tuple[f32[''], f32[''], num['B/r/d/e L/c V/t']]:
        terms = model.loss(weights, batch)
        total, count = psum(TOKENS, terms['nll'])
        balance, among = psum(TOKENS, terms.get('balance_loss', (0 * terms['nll'][1], terms['nll'][1])))
        return total / count, balance / among, terms['logits']

    return run


@functools.cache
def measured(case):
    """How far each column is from the golden, over what is allowed: below one is equal."""
    patch = pytest.MonkeyPatch()
    with patch.context() as monkeypatch, jax.set_mesh(mesh_of()):
        model, expected, rows = model_of(case), golden(case), batch(case)
        weights = ours(case, model, tensors(case))
        run = computes(model, monkeypatch)

        def loss(weights, rows):
            nll, balance, logits = run(weights, rows)
            return nll + balance, (nll, logits)

        call = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
        (value, (_, logits)), gradient = jax.device_get(call(weights, rows))
        (_, (packed, _)), _ = call(weights, dataclasses.replace(rows, mask=mask_of_documents(rows)))
        same_text, same_files = written(case, model, weights), exported(case, model, weights)
        theirs = ours(case, model, {n.removeprefix('grad.'): x for n, x in expected.items() if n.startswith('grad.')})
    logits = logits[..., : config(case)['vocab_size']]
    length = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(theirs)))
    # Of a tensor: the norm of the difference. A key's bias in gpt2 has no gradient but rounding, hence the floor.
    worst = max(
        np.linalg.norm(a - b) / (GRADIENTS * np.linalg.norm(b) + 1e-6 * length)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(theirs), strict=True)
    )
    return {
        'logits': relative(logits[:-1], expected['logits']) / LOGITS,
        'loss': relative(value, expected['loss']) / LOGITS,
        'gradients': worst,
        'packed documents': max(
            relative(logits[-1:], expected['packed_logits']), relative(packed, expected['packed_loss'])
        ) / LOGITS,
        'generation': 0.0 if same_text else np.inf,
        'export': 0.0 if same_files else np.inf,
    }  # fmt: skip


def written(case, model, weights):
    """Whether the greedy continuations are those of `generate` in transformers, both prompts in one call."""
    expected = golden(case)
    placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
    prompts, continuations = (
        [expected[f'{name}.{i}'].tolist() for i in range(2)] for name in ('prompt', 'continuation')
    )
    return generate(model, placed, prompts, tokens=len(continuations[0]), temperature=0) == continuations


def exported(case, model, weights):
    """Whether our weights under the names of transformers are the tensors that they came from, to the bit."""
    written_config, table = write_config(model.arch, options(case)['family'])
    names, convert = tensors_of(TABLES[table.names], model.arch, model.abstract())
    out = {name: np.full(shape, np.nan, np.float32) for name, shape in names.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        path = jax.tree_util.keystr(path, simple=True, separator='.')
        stacked = path.startswith('layers.')
        pieces = (((i,), leaf[i]) for i in range(len(leaf))) if stacked else [((), leaf)]
        for at, piece in pieces:
            for name, where, values in convert(path, at, piece):
                out[name][where] = values
    same = all(np.array_equal(out[name], x) for name, x in tensors(case).items())
    return same and set(out) == set(tensors(case)) and written_config['model_type'] == config(case)['model_type']


def marks_of(case):
    return () if case in FAST else pytest.mark.slow if case in SLOW else pytest.mark.nightly


@pytest.mark.parametrize('case', [pytest.param(case, marks=marks_of(case)) for case in CASES])
def test_each_family_equals_transformers(case):
    found = measured(case)
    assert set(found) == set(COLUMNS)
    assert all(value <= 1 for value in found.values()), found


def matrix():
    """The table in docs/models.md."""
    head = ['| family | ' + ' | '.join(COLUMNS) + ' |', '|---|' + '---|' * len(COLUMNS)]
    for case in CASES:
        cells = ['equal' if measured(case)[column] <= 1 else 'DIFFERENT' for column in COLUMNS]
        head.append(f'| {case} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(head)


@pytest.mark.nightly
def test_the_matrix_in_the_docs_matches_the_measurements():
    table = matrix()
    print(f'\n{table}')
    assert table in PAGE.read_text(), f'put this into docs/models.md:\n{table}'
