"""An export says what its class of transformers cannot."""

import json
import types

import jax
import numpy as np
import pytest

from pretrax.huggingface.export import export
from pretrax.huggingface.weights import shapes
from small import mesh_of, transformer


@pytest.mark.parametrize(
    ('family', 'rates', 'fields', 'unsaid'),
    [
        # GPTNeoXModel drops the embeddings and both branches by hidden_dropout
        ('gpt-neox', {'dropout': 0.1}, {'attention_dropout': 0.1, 'hidden_dropout': 0.1}, []),
        (
            'gpt-neox', {'attention_dropout': 0.2, 'residual_dropout': 0.1}, {'attention_dropout': 0.2, 'hidden_dropout': 0.0},
            ['residual_dropout = 0.1'],
        ),
        # StableLmDecoderLayer drops what the feed-forward adds, and not what attention adds
        ('stablelm', {'dropout': 0.1}, {'attention_dropout': 0.1}, ['residual_dropout = 0.1', 'embedding_dropout = 0.1']),
    ],
)  # fmt: skip
def test_an_export_names_the_dropout_that_its_class_does_not_have(tmp_path, family, rates, fields, unsaid):
    sizes = {'n_layers': 1, 'd_model': 16, 'n_heads': 2, 'd_ff': 16, 'max_sequence_length': 8}
    model, said = transformer({'family': family, **sizes, **rates}), []
    with jax.set_mesh(mesh_of()):
        like = model.abstract()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes(like).items()}
    weights = types.SimpleNamespace(shapes=shapes(like), pieces=lambda path: [((), zeros[path])])
    export(weights, model.arch, like, tmp_path / 'out', dtype='F32', family=family, say=said.append)
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert {name: value for name, value in config.items() if 'dropout' in name} == fields
    assert [line.split(' is not')[0] for line in said if 'dropout' in line] == [f'model.{one}' for one in unsaid]


def test_a_class_without_multi_token_prediction_gets_the_rest(tmp_path):
    sizes = {'n_layers': 1, 'd_model': 16, 'n_heads': 2, 'd_ff': 16}
    said, files = {0: [], 1: []}, {}
    for modules, lines in said.items():
        model = transformer({**sizes, 'mtp_layers': modules})
        with jax.set_mesh(mesh_of()):
            like = model.abstract()
        weights = types.SimpleNamespace(
            shapes=shapes(like),
            pieces=lambda path, like=like: [((), np.full(shapes(like)[path], len(path), np.float32))],
        )
        out = tmp_path / str(modules)
        export(weights, model.arch, like, out, dtype='F32', family='llama', say=lines.append)
        files[modules] = (out / 'model.safetensors').read_bytes()
    assert said[1] == ['multi-token prediction is left out: LlamaForCausalLM has no tensors for it', *said[0]]
    assert files[1] == files[0]
