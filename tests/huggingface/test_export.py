"""An export says what its class of transformers cannot."""

import json
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from pretrax.errors import UserError
from pretrax.huggingface.export import export
from pretrax.huggingface.weights import shapes
from small import mesh_of, transformer


def written(directory, family='llama', dtype='F32', tokenizer=None, say=print, **changes):
    """An export of weights of 1, of which `changes` sets the first number."""
    model = transformer(
        {'family': family, 'n_layers': 1, 'd_model': 16, 'n_heads': 2, 'd_ff': 16, 'max_sequence_length': 16}
    )
    with jax.set_mesh(mesh_of()):
        like = model.abstract()
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes(like).items()}
    for name, value in changes.items():
        arrays[name].flat[0] = value
    weights = types.SimpleNamespace(shapes=shapes(like), pieces=lambda path: [((), arrays[path])])
    export(weights, model.arch, like, directory, dtype=dtype, family=family, tokenizer=tokenizer, say=say)
    return json.loads((directory / 'config.json').read_text())


@pytest.mark.parametrize(
    ('dtype', 'value', 'said'),
    [
        ('F16', 70000.0, r'model.norm.weight has a number of size 70000, but the largest of F16 is 6.55e\+04\n'
        'use --dtype bf16, or f32'),
        ('F16', -65520.0, 'of size 65520'),  # the first number that rounds to infinity
        ('BF16', 3.4e38, r'of size 3.4e\+38, but the largest of BF16 is 3.39e\+38\nuse --dtype f32'),
    ],
)  # fmt: skip
def test_a_number_that_the_dtype_does_not_have_is_refused_and_nothing_is_written(dtype, value, said, tmp_path):
    with pytest.raises(UserError, match=said):
        written(tmp_path / 'out', dtype=dtype, norm=value)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_numbers_are_written_and_what_is_lost_is_said(tmp_path):
    lines = []
    written(tmp_path / 'out', dtype='F16', norm=65519.0, embed=1e-8, unembed=np.nan, say=lines.append)
    found = load_file(tmp_path / 'out' / 'model.safetensors')
    assert found['model.norm.weight'][0] == 65504
    assert '1 numbers are NaN or infinite: 1 in lm_head.weight' in lines
    assert '1 numbers are 0 in the files, since F16 has none as small: 1 in model.embed_tokens.weight' in lines
    lines.clear()
    written(tmp_path / 'exact', norm=3.4e38, embed=1e-45, say=lines.append)
    assert lines == ['the run has no tokenizer.json, so the export has none']


def test_an_export_names_the_ids_that_its_class_would_guess(tmp_path):
    """LlamaConfig has 1 and 2 without them, GPT2Config 50256: tokens of other tokenizers."""
    none = {'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
    begins = types.SimpleNamespace(begin_of_text=(7,), end_of_text=5, content=None)
    ends = types.SimpleNamespace(begin_of_text=(), before_text=None, end_of_text=5, content=None)
    for tokenizer, ids in (
        (None, none),
        (begins, none | {'bos_token_id': 7, 'eos_token_id': 5}),
        (ends, none | {'bos_token_id': 5, 'eos_token_id': 5}),  # as GPT-2: a text follows the end of another one
    ):
        out = tmp_path / str(ids['bos_token_id'])
        config = written(out, 'gpt2', tokenizer=tokenizer)
        assert {name: config[name] for name in ids} == ids
        generation = json.loads((out / 'generation_config.json').read_text())
        assert generation == {name: token for name, token in ids.items() if token is not None}
        assert config['n_ctx'] == config['n_positions'] == 16


@pytest.mark.parametrize(
    ('family', 'rates', 'fields', 'unsaid'),
    [
        # GPTNeoXModel drops the embeddings and both branches by hidden_dropout
        ('gpt-neox', {'dropout': 0.1}, {'attention_dropout': 0.1, 'hidden_dropout': 0.1}, []),
        (
            'gpt-neox', {'attention_dropout': 0.2, 'residual_dropout': 0.1}, {'attention_dropout': 0.2,
            'hidden_dropout': 0.0},
            ['block.dropout = 0.1'],
        ),
        # StableLmDecoderLayer drops what the feed-forward adds, and not what attention adds
        ('stablelm', {'dropout': 0.1}, {'attention_dropout': 0.1}, ['block.dropout = 0.1', 'embedding.dropout = 0.1']),
    ],
)  # fmt: skip
def test_an_export_names_the_dropout_that_its_class_does_not_have(tmp_path, family, rates, fields, unsaid):
    sizes = {'n_layers': 1, 'd_model': 16, 'n_heads': 2, 'd_ff': 16, 'max_sequence_length': 16}
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
