"""The tokens that end a text come from every file that names one, and survive an import, a warm start and an export."""

import json
import shutil
from pathlib import Path

import pytest

from decoders import decoder_options
from pretrax import config_from_values
from pretrax.cli import main
from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer, end_tokens, load_tokenizer
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options
from pretrax.model.architecture import resolve
from pretrax.run.setup import prepare
from pretrax.weights.trained import open_trained
from pretrax.weights.warm_start import warm_state
from runs import small_values, write_documents

LLAMA = Path(__file__).parents[1] / 'goldens' / 'llama2'
IDS = {'<stop>': 4, '<turn>': 7}
WORDS = {'a': 0, 'b': 1, 'c': 2, 'd': 3, **IDS}


def tokenizer_json(words=WORDS):
    """A closed vocabulary of words, in which no token has one of the usual names of an end of text."""
    special = [{'id': n, 'content': word, 'special': True, 'single_word': False, 'lstrip': False, 'rstrip': False,
                'normalized': False} for word, n in words.items() if word.startswith('<')]  # fmt: skip
    model = {'type': 'WordLevel', 'vocab': words, 'unk_token': 'a'}
    return json.dumps(
        {'version': '1.0', 'added_tokens': special, 'pre_tokenizer': {'type': 'Whitespace'}, 'model': model}
    )


@pytest.mark.parametrize(
    ('files', 'expected'),
    [
        ({}, ()),
        ({'tokenizer_config.json': {'eos_token': '<stop>'}}, (4,)),
        (
            {
                'tokenizer_config.json': {'eos_token': {'content': '<turn>'}},
                'config.json': {'model_type': 'x', 'eos_token_id': 4},
            },
            (7, 4),
        ),
        (
            {'special_tokens_map.json': {'eos_token': '<stop>'}, 'generation_config.json': {'eos_token_id': [7, 4]}},
            (4, 7),
        ),
        (
            {'config.json': {'model_type': 'x', 'eos_token_id': [7, 4]}, 'tokenizer_config.json': {'eos_token': None}},
            (7, 4),
        ),
        ({'config.json': {'eos_token_id': 7}}, ()),  # not that of a model
        ({'config.json': {'model_type': 'x', 'text_config': {'eos_token_id': 4}}}, (4,)),
    ],
)
def test_every_file_counts(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path, IDS.get) == expected


@pytest.mark.parametrize(
    ('file', 'content', 'message'),
    [
        ('tokenizer_config.json', {'eos_token': '<end>'}, "eos_token '<end>' is not a token"),
        ('generation_config.json', {'eos_token_id': 'four'}, 'eos_token_id is "four"\n  expected an id'),
        ('config.json', {'model_type': 'x', 'eos_token_id': [True]}, 'expected an id, or a list of ids'),
        ('tokenizer_config.json', [], 'expected a JSON object'),
    ],
)
def test_a_file_with_another_content_is_refused(tmp_path, file, content, message):
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        end_tokens(tmp_path, IDS.get)


@pytest.mark.parametrize('file', ['generation_config.json', 'config.json'])
def test_the_end_of_documents_is_found_beside_a_tokenizer(tmp_path, file):
    (tmp_path / 'tokenizer.json').write_text(tokenizer_json())
    with pytest.raises(UserError, match='no end-of-text token'):
        load_tokenizer(tmp_path / 'tokenizer.json')
    (tmp_path / file).write_text(json.dumps({'model_type': 'llama', 'eos_token_id': [7, 4]}))
    assert load_tokenizer(tmp_path / 'tokenizer.json').end_of_text == 7
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<stop>'}))
    assert load_tokenizer(tmp_path / 'tokenizer.json').end_of_text == 4
    assert load_tokenizer(tmp_path).end_of_text == 4


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """The weights of a golden with a tokenizer, several ends of a text, chat templates and settings of training."""
    directory = tmp_path_factory.mktemp('source') / 'source'
    directory.mkdir()
    for name in ('config.json', 'model.safetensors'):
        shutil.copyfile(LLAMA / name, directory / name)
    path = directory / 'config.json'
    config = json.loads(path.read_text()) | {'eos_token_id': [4, 9], 'attention_dropout': 0.0, 'bos_token_id': 1}
    path.write_text(json.dumps(config | {'output_router_logits': False}))
    (directory / 'tokenizer.json').write_bytes(bytes_like().encode())
    settings = {'eos_token': '<turn>', 'chat_template': [{'name': 'default', 'template': '{{ messages }}'}]}
    (directory / 'tokenizer_config.json').write_text(json.dumps(settings))
    (directory / 'generation_config.json').write_text(json.dumps({'eos_token_id': 4, 'temperature': 0.6}))
    (directory / 'chat_template.jinja').write_text('{% for m in messages %}{{ m.content }}{% endfor %}')
    (directory / 'additional_chat_templates').mkdir()
    (directory / 'additional_chat_templates' / 'rag.jinja').write_text('{{ documents }}')
    (directory / 'tokenizer.model').write_bytes(b'\x00\x01')
    return directory


def bytes_like():
    """96 words, as many as the golden has rows."""
    return tokenizer_json(WORDS | {f'w{n}': n for n in range(96) if n not in WORDS.values()})


def files_of(directory):
    return {path.relative_to(directory).as_posix() for path in directory.rglob('*') if path.is_file()}


KEPT = {'tokenizer_config.json', 'generation_config.json', 'chat_template.jinja', 'additional_chat_templates/rag.jinja'}


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code


def test_an_import_and_an_export_keep_every_file_and_every_end(source, tmp_path):
    run, out = tmp_path / 'run', tmp_path / 'out'
    command('import', source, '--out', run)
    opened = open_trained(str(run))
    assert opened.run.source.tokenizer.end_of_text == 7  # of tokenizer_config.json
    assert opened.end_tokens == (7, 4, 9)
    assert load_tokenizer(run / 'data' / 'tokenizer.json').end_of_text == 7
    command('export', run, out)
    for name in (*KEPT - {'generation_config.json'}, 'tokenizer.json', 'tokenizer.model'):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    config, generation = (json.loads((out / name).read_text()) for name in ('config.json', 'generation_config.json'))
    assert set(config['eos_token_id']) == {4, 7, 9}
    assert (config['attention_dropout'], config['output_router_logits'], config['bos_token_id']) == (0.0, False, 1)
    assert set(generation['eos_token_id']) == {4, 7}
    assert generation['temperature'] == 0.6


def test_a_run_that_starts_from_it_keeps_them(source, tmp_path):
    """With the same tokenizer all files, and with another one the chat templates and settings of generation."""
    values = small_values(write_documents(tmp_path), tmp_path) | {'model': {}, 'init_from': f'hf:{source}'}
    (tmp_path / 'words.txt').write_text('a b c d ' * 500)
    same = values | {'data': {'text': str(tmp_path / 'words.txt'), 'tokenizer': str(source / 'tokenizer.json')}}
    prepared(same)
    assert files_of(tmp_path / 'run' / 'huggingface') == KEPT | {'config.json', 'tokenizer.json', 'tokenizer.model'}
    other = tmp_path / 'other'
    other.mkdir()
    (other / 'tokenizer.json').write_bytes(bytes_tokenizer().content)
    started = {'path': f'hf:{source}', 'partial': True}
    data = {'text': str(tmp_path / 'words.txt'), 'tokenizer': str(other)}
    prepared(
        values | {'run_dir': str(tmp_path / 'second'), 'data': data, 'init_from': started, 'model': {'vocab_size': 300}}
    )
    assert files_of(tmp_path / 'second' / 'huggingface') == KEPT - {'tokenizer_config.json'} | {'config.json'}


def prepared(values):
    import jax

    run = prepare(config_from_values(values), lambda text: None)
    with jax.set_mesh(run.mesh):
        warm_state(run.config.init_from, run, lambda text: None)


def test_gpt2_that_was_trained_here_is_exported_without_dropout(tmp_path):
    """Its class would have dropout by default."""
    from pretrax.huggingface.export import _kept_fields

    def arch(**options):
        return resolve(decoder_options(family='gpt2', n_layers=1, d_model=8, n_heads=2, **options), 128, 8)

    assert _kept_fields(None, 'gpt2', arch()) == {'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0}
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'gpt2', 'attn_pdrop': 0.1}))
    assert _kept_fields(tmp_path, 'gpt2', arch())['attn_pdrop'] == 0.1
    with_dropout = _kept_fields(tmp_path, 'gpt2', arch(dropout=0.2, embedding_dropout=0.0))
    assert with_dropout == {'attn_pdrop': 0.2, 'embd_pdrop': 0.0, 'resid_pdrop': 0.2}


def test_an_import_says_how_to_train_with_the_dropout_of_config_json():
    config = json.loads((LLAMA.parent / 'gpt2' / 'config.json').read_text()) | {'resid_pdrop': 0.1, 'attn_pdrop': 0.0}
    assert [note for note in read_options(config)[1] if 'pdrop' in note] == [
        'resid_pdrop = 0.1 of config.json is not applied; to train with it, use model.block.dropout=0.1'
    ]
