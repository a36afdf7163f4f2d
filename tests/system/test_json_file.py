"""Depth and size of JSON that somebody else wrote are bounded, whatever reads it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from pretrax.cli import main
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.errors import UserError
from pretrax.system import json_file
from pretrax.system.json_file import parse_json, read_json, read_settings

DEEP = {'lists': '[' * 100_000, 'objects': '{"a":' * 100_000, 'closed': '[' * 5000 + ']' * 5000}


@pytest.mark.parametrize('text', DEEP.values(), ids=DEEP)
def test_deep_json_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match='nested deeper than 100 levels'):
        parse_json(text)
    (tmp_path / 'x.json').write_text(f'{{"a": {text}}}' if text.endswith(']') else text)
    for read in (read_json, read_settings):
        with pytest.raises(UserError, match=r'x\.json: not readable as JSON: nested deeper'):
            read(tmp_path / 'x.json')


def test_what_is_as_deep_as_allowed_is_read():
    for depth, fits in ((100, True), (101, True), (102, False)):
        text = '[' * depth + ']' * depth
        if fits:
            assert parse_json(text) == json.loads(text)
        else:
            with pytest.raises(ValueError, match='deeper'):
                parse_json(text)
    assert parse_json(b'{"a": [1, {"b": null}], "c": "[[[["}') == {'a': [1, {'b': None}], 'c': '[[[['}


def test_files_that_are_missing_large_or_no_objects(tmp_path, monkeypatch):
    path = tmp_path / 'x.json'
    assert read_settings(path) == {}
    with pytest.raises(UserError, match='No such file'):
        read_json(path)
    for content, said in (
        ('[1]', 'expected a JSON object, not list'),
        ('{', 'not readable'),
        ('1' * 5000, 'not readable'),
        ('\xff', 'expected|readable'),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=said):
            read_json(path)
    monkeypatch.setattr(json_file, 'LARGEST', 1 << 20)
    path.write_text(json.dumps({'a': 'x' * (2 << 20)}))
    with pytest.raises(UserError, match='larger than 1 MiB'):
        read_json(path)


@pytest.mark.parametrize(
    'file',
    [
        'config.json',
        'tokenizer_config.json',
        'generation_config.json',
        'special_tokens_map.json',
        'tokenizer.json',
        'model.safetensors.index.json',
    ],
)
@pytest.mark.parametrize('text', DEEP.values(), ids=DEEP)
def test_no_file_of_a_checkpoint_ends_an_import_in_a_traceback(file, text, tmp_path, capsys):
    config = {
        'model_type': 'llama',
        'hidden_size': 8,
        'intermediate_size': 8,
        'num_hidden_layers': 1,
        'num_attention_heads': 1,
        'vocab_size': 8,
    }
    (tmp_path / 'config.json').write_text(json.dumps(config))
    tokenizer = {
        'version': '1.0',
        'model': {'type': 'WordLevel', 'vocab': {'a': 0}, 'unk_token': 'a'},
        'added_tokens': [],
    }
    (tmp_path / 'tokenizer.json').write_text(json.dumps(tokenizer))
    names = {'model.embed_tokens.weight': (8, 8), 'lm_head.weight': (8, 8), 'model.norm.weight': (8,)}
    layer = {
        'input_layernorm': (8,),
        'post_attention_layernorm': (8,),
        **{f'self_attn.{n}_proj': (8, 8) for n in 'qkvo'},
        **{f'mlp.{n}_proj': (8, 8) for n in ('gate', 'up', 'down')},
    }
    names |= {f'model.layers.0.{name}.weight': shape for name, shape in layer.items()}
    save_file({name: np.ones(shape, np.float32) for name, shape in names.items()}, tmp_path / 'model.safetensors')
    (tmp_path / file).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(['import', str(tmp_path), '--out', str(tmp_path / 'run')])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert file in said
    assert len(said.splitlines()) <= 10
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('text', DEEP.values(), ids=DEEP)
def test_a_deep_tokenizer_is_refused(text):
    with pytest.raises(UserError, match='deeper'):
        Tokenizer(text.encode(), 'tokenizer.json')
