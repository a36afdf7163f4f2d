"""Reads the goldens: a case's model in our own choices and weights, and what transformers computed with it."""

import functools
import json
import types
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from pretrax.huggingface.configs import BY_TYPE, read_options
from pretrax.huggingface.names import TABLES
from pretrax.huggingface.weights import HuggingFaceWeights
from pretrax.model.loss import Batch
from pretrax.model.transformer import Transformer
from small import transformer as decoder

LOGITS = 1e-4  # relative, in f32: what counts as equal
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}  # to compile
HERE = Path(__file__).parent


@functools.cache
def config(case):
    return json.loads((HERE / case / 'config.json').read_text())


CASES = sorted(  # of the families that an import knows
    case for case in (path.parent.name for path in HERE.glob('*/golden.safetensors'))
    if config(case)['model_type'] in BY_TYPE
)  # fmt: skip


@functools.cache
def tensors(case):
    """By the names that transformers gives them."""
    return load_file(HERE / case / 'model.safetensors')


@functools.cache
def golden(case):
    return load_file(HERE / case / 'golden.safetensors')


def options(case):
    """The choices and sizes, as an import reads them."""
    return read_options(config(case))[0]


def ours(case, model, named):
    """Arrays under the names of transformers (weights, or their gradients), as our tree of weights."""
    like = model.abstract()
    files = types.SimpleNamespace(
        directory=HERE / case,
        config=config(case),
        tensors={
            name: types.SimpleNamespace(
                shape=x.shape,
                dtype=str(x.dtype),
                why_not='',
                read=lambda index=None, x=x: x if index is None else x[index],
            )
            for name, x in named.items()
        },
    )
    found = HuggingFaceWeights(files, TABLES[BY_TYPE[config(case)['model_type']].names], model.arch, like)
    flat = {}
    for path, shape in found.shapes.items():
        array = np.zeros(shape, np.float32)
        for at, piece in found.pieces(path):
            array[at] = piece
        flat[path] = array
    paths, tree = jax.tree_util.tree_flatten_with_path(like)
    return tree.unflatten([flat[jax.tree_util.keystr(path, simple=True, separator='.')] for path, _ in paths])


def batch(case):
    """Two rows and their targets, and a third of packed documents; the mask counts the first two."""
    tokens, packed = golden(case)['tokens'], golden(case)['packed_tokens']
    rows = np.concatenate([tokens[:, :-1], packed])
    targets = np.concatenate([tokens[:, 1:], np.roll(packed, -1, axis=1)])
    segments = np.concatenate([np.ones_like(tokens[:, 1:]), golden(case)['packed_segments']])
    first = np.array([[row.tolist().index(s) for s in row] for row in segments])
    mask = np.concatenate([np.ones(tokens[:, 1:].shape), np.zeros(packed.shape)])
    positions = np.arange(rows.shape[1]) - first
    return Batch(*(x.astype(np.int32) for x in (rows, targets, segments, positions)), mask=mask.astype(np.float32))


def mask_of_documents(whole):
    """Of the packed row alone: every token that has another of its document after it."""
    mask = np.zeros_like(whole.mask)
    mask[-1, :-1] = whole.segments[-1, 1:] == whole.segments[-1, :-1]
    return mask


def model_of(case, **changes):
    known = options(case) | {'layers': 'scan'} | changes
    return decoder(known, vocab_size=known['vocab_size'], length=batch(case).tokens.shape[1])


def relative(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


def captured_logits(monkeypatch):
    """From now on the terms of a loss have the logits, as the loss gets them, among them."""
    plain = Transformer.token_terms

    def with_logits(logits, *more):
        return plain(logits, *more) | {'logits': logits}

    monkeypatch.setattr(Transformer, 'token_terms', staticmethod(with_logits))
