"""Documents begin with what the tokenizer adds, in tokens and streams, and the tokens record it."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from data_options import data_options
from pretrax.data.batches.source import DataRequest
from pretrax.data.text import open_text, tokenize_text
from pretrax.data.tokens.flat_tokens import open_split, splits
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.token_files import open_token_files
from pretrax.data.tokens.token_summary import missing_from, tokenized_differently
from pretrax.errors import UserError

TEXTS = ['ab ba', ' ', 'b' * 40, 'abba é'] * 30
WORDS = {'<s>': 0, '</s>': 1} | {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet(), 2)}


@pytest.fixture
def place(tmp_path):
    """A directory with text, and with a byte-level tokenizer that writes <s> text </s>."""
    backend = Library(models.BPE(vocab=WORDS, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(['<s>', '</s>'])
    backend.post_processor = processors.TemplateProcessing(
        single='<s> $A </s>', pair='<s> $A $B </s>', special_tokens=[('<s>', 0), ('</s>', 1)]
    )
    backend.save(str(tmp_path / 'tokenizer.json'))
    rows = ({'text': text, 'prompt': 'a', 'answer': text} for text in TEXTS)
    (tmp_path / 'text.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return tmp_path


def options(place, **more):
    return data_options({'text': str(place / 'text.jsonl'), 'tokenizer': str(place / 'tokenizer.json')} | more)


def library(place):
    return Library.from_file(str(place / 'tokenizer.json'))


def test_a_document_is_what_the_library_makes_of_it(place):
    said = []
    directory = tokenize_text(options(place, validation=0.3), place / 'data', said.append)
    expected = sorted(library(place).encode(text).ids for text in TEXTS)
    found = []
    for name in splits(directory):
        split = open_split(directory, name)
        documents = [split.document(n).tolist() for n in range(split.n_documents)]
        found += documents
        counts = split.manifest.counts
        # Each byte of the text is predicted, the first one after <s>.
        assert counts.bytes == counts.predicted_bytes == counts.targets - counts.documents
        assert tokenized_differently(split, open_token_files(directory, print).tokenizer, 99, 999)[1] == []
    assert sorted(found) == expected
    verify(directory)
    assert any('<s> (id 0) begins documents, as tokenizer.json says' in line for line in said)
    files = open_token_files(directory, said.append)
    assert files.identity.begin_of_text == files.tokenizer.begin_of_text == (0,)
    assert missing_from(files.splits.values(), files.tokenizer, [('x', TEXTS[0]), ('y', 'bab')]) == (2, ['y'])
    without = tokenize_text(options(place, validation=0.3, begin_of_text=False), place / 'data', said.append)
    assert without != directory
    assert tokenize_text(options(place, validation=0.3, begin_of_text='<s>'), place / 'data', said.append) == directory
    first = open_split(without, 'train')
    assert all(first.document(n)[0] != 0 for n in range(first.n_documents))
    files = open_token_files(without, said.append)
    assert files.tokenizer.begin_of_text == ()
    assert 'nothing begins a document of' in said[-1] or 'nothing begins a document of' in ''.join(said)


def test_tokens_that_an_older_pretrax_wrote_begin_with_nothing_and_that_is_said(place):
    directory = tokenize_text(options(place, validation=0, begin_of_text=False), place / 'data', print)
    file = directory / 'train' / 'zarr.json'
    group = json.loads(file.read_text())
    del group['attributes']['tokenizer']['begin_of_text']
    file.write_text(json.dumps(group))
    said = []
    assert open_token_files(directory, said.append).tokenizer.begin_of_text == ()
    assert any('nothing begins a document' in line and '<s> (id 0)' in line for line in said)


def test_a_document_that_does_not_begin_as_recorded_is_damage(place):
    directory = tokenize_text(options(place, validation=0, begin_of_text=False), place / 'data', print)
    file = directory / 'train' / 'zarr.json'
    group = json.loads(file.read_text())
    group['attributes']['tokenizer']['begin_of_text'] = [0]
    file.write_text(json.dumps(group))
    with pytest.raises(UserError, match='does not begin with the token 0'):
        verify(directory)


def test_answers_count_and_the_begin_does_not(place):
    directory = tokenize_text(
        options(place, field=None, prompt_field='prompt', answer_field='answer', validation=0), place / 'data', print
    )
    split = open_split(directory, 'train')
    [mask] = split.read_mask([(0, split.n_tokens)])
    start, stop = split.read_starts(0, 2).tolist()
    assert split.document(0).tolist() == library(place).encode('a' + TEXTS[0]).ids
    assert mask[start:stop].tolist() == [False, False] + [True] * (len(TEXTS[0]) + 1)
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert split.manifest.counts.predicted_bytes == n_bytes
    verify(directory)


def test_a_stream_has_the_same_documents(place):
    request = DataRequest(seed=0, sequence_length=16, directory=place / 'data', say=print)
    source = open_text(request, options=options(place, streaming=True, shuffle_buffer=1, validation_documents=0))
    batch = source.batch(0, slice(0, 8), 8)
    source.close()
    expected = np.concatenate([library(place).encode(text).ids for text in TEXTS])
    assert batch.tokens.reshape(-1).tolist() == expected[: batch.tokens.size].tolist()
    assert source.tokenizer.begin_of_text == (0,)
