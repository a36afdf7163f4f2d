"""What a tokenizer.json adds to a text is read, used and written as the library `tokenizers` does it."""

import json

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from pretrax.data.tokenizers.text_bounds import added_tokens
from pretrax.data.tokenizers.tokenizer import Tokenizer, tokens_before
from pretrax.data.tokenizers.tokenizer_files import load_tokenizer
from pretrax.errors import UserError
from pretrax.infer.answers import begun, encode_prompt, start_of_text

WORDS = {'a': 0, 'b': 1, '<s>': 2, '</s>': 3, '<t>': 4}
SPECIAL = [('<s>', 2), ('</s>', 3), ('<t>', 4)]
BYTES = processors.ByteLevel(trim_offsets=False)


def template(single):
    return processors.TemplateProcessing(single=single, pair=f'{single} $B', special_tokens=SPECIAL)


PROCESSORS = {
    'none': None,
    'begin': template('<s> $A'),
    'both': template('<s> $A </s>'),
    'end': template('$A </s>'),
    'two': template('<t> <s> $A'),
    'begin is end': template('</s> $A </s>'),
    'bytes': BYTES,
    'sequence': processors.Sequence([BYTES, template('<s> $A </s>')]),
    'BERT': processors.BertProcessing(('</s>', 3), ('<s>', 2)),
    'RoBERTa': processors.RobertaProcessing(('</s>', 3), ('<s>', 2)),
}


def library(processor):
    backend = Library(models.WordLevel(WORDS, unk_token='a'))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([name for name, _ in SPECIAL])
    if processor is not None:
        backend.post_processor = processor
    return backend


@pytest.mark.parametrize('name', PROCESSORS)
@pytest.mark.parametrize('choice', [None, False, '<t>'])
def test_the_library_adds_what_a_document_begins_with(name, choice):
    backend = library(PROCESSORS[name])
    ids = backend.encode('a b').ids
    before, after = ids[: ids.index(0)], ids[ids.index(1) + 1 :]
    tokenizer = Tokenizer(backend.to_str().encode(), name)
    assert tokenizer.adds == (tuple(before), tuple(after))
    tokenizer.begin_with(choice)
    begin = before if choice is None else [4] if choice else []
    assert encode_prompt(tokenizer, 'a b') == [*begin, 0, 1]
    exported = tokenizer.exported()
    assert Library.from_buffer(exported).encode('a b').ids == [*begin, 0, 1, *after]
    assert begin != before or exported == tokenizer.content
    again = Tokenizer(exported, name)
    assert list(again.begin_of_text) == begin


def test_an_empty_text_is_what_comes_before_one():
    tokenizer = Tokenizer(library(None).to_str().encode(), 'none')
    assert encode_prompt(tokenizer, '') == start_of_text(tokenizer) == [3]
    tokenizer.before_text = 2
    assert encode_prompt(tokenizer, '') == [2]
    assert encode_prompt(tokenizer, 'a') == [0]
    tokenizer.begin_with(True)
    assert encode_prompt(tokenizer, 'a') == [2, 0]
    assert begun(tokenizer, [2, 0]) == [2, 0]  # as a template may have written it
    assert tokenizer.text_ids([2, 0, 1, 3]) == [0, 1]


@pytest.mark.parametrize(
    ('choice', 'message'), [(True, 'names no token that begins a text'), ('<x>', "'<x>' is not a token of")]
)
def test_a_begin_that_does_not_exist_is_refused(choice, message):
    with pytest.raises(UserError, match=message):
        Tokenizer(library(None).to_str().encode(), 'none').begin_with(choice)


def test_files_beside_the_tokenizer_name_the_begin_but_do_not_add_it(tmp_path):
    """transformers 5.24 ignores add_bos_token beside a tokenizer.json: seen for 7 classes and 5 post-processors."""
    (tmp_path / 'tokenizer.json').write_text(library(None).to_str())
    settings = {'bos_token': {'content': '<s>'}, 'eos_token': '</s>', 'add_bos_token': True}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    named = load_tokenizer(tmp_path)
    assert (named.begin_of_text, start_of_text(named)) == ((), [2])
    assert load_tokenizer(tmp_path, begin_of_text=True).begin_of_text == (2,)
    (tmp_path / 'tokenizer.json').write_text(library(PROCESSORS['begin']).to_str())
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings | {'add_bos_token': False}))
    assert load_tokenizer(tmp_path).begin_of_text == (2,)
    assert load_tokenizer(tmp_path, begin_of_text=False).begin_of_text == ()


def test_a_post_processor_that_is_none_is_refused():
    with pytest.raises(ValueError, match='PostProcessor'):
        added_tokens({'post_processor': {'type': 'Unknown'}})
    settings = json.loads(library(None).to_str()) | {'post_processor': {'type': 'TemplateProcessing', 'single': 3}}
    with pytest.raises(UserError, match='not a tokenizer'):
        Tokenizer(json.dumps(settings).encode(), 'mine')


@pytest.mark.parametrize(
    'content', [b'[' * 2000 + b']' * 2000, b'[]', b'{', b'{"post_processor": {"type": "Unknown"}}']
)
def test_what_begins_texts_is_read_from_a_checked_file(content):
    with pytest.raises(UserError, match=r'theirs: not a tokenizer\.json'):
        tokens_before(content, 'theirs')
