"""`data.tokens` reads the files of any tool, and all formats give the same rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import foreign_files as write
from data_options import data_options
from pretrax.data.text import open_text
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens.flat_tokens import TokenizerIdentity
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.errors import UserError
from token_arrays import encode_documents

END = 50256


def rows(source, n: int = 6):
    """The first rows as sorted lists."""
    batch = source.batch(0, slice(None), n)
    return sorted(zip(*(values.tolist() for values in batch), strict=True))


@pytest.fixture
def documents() -> list[list[int]]:
    return [[n + 1] * (n % 5) + [END] for n in range(40)]


def test_every_format_gives_the_same_batches(open_source, tmp_path, documents):
    with create(
        tmp_path / 'flat', TokenizerIdentity(sha256=None, vocab_size=50257, end_of_text=END), None, {}
    ) as writer:
        writer.append('train', *encode_documents(documents), n_bytes=None, predicted_bytes=None)
    paths = [
        tmp_path / 'flat',
        write.nanogpt(tmp_path / 'a.bin', documents),
        write.pbin(tmp_path / 'a.pbin', documents),
        write.megatron(tmp_path / 'b', [[doc] for doc in documents]),
        write.seqax(tmp_path / 'a.zarr', {'train': documents}),
    ]
    sources = [open_source(tokens=str(path)) for path in paths]
    assert len({str(rows(source)) for source in sources}) == 1
    assert len({source.fingerprint for source in sources}) == 1
    assert {source.vocab_size for source in sources} == {50257}
    assert all(source.validation is None and source.tokenizer is None for source in sources)
    tokens, targets, segments, positions, mask = (np.array(values) for values in zip(*rows(sources[1]), strict=True))
    assert ((tokens == END) == (np.diff(segments, append=segments[:, -1:] + (tokens == END)[:, -1:]) == 1)).all()
    assert ((positions[:, 1:] == 0) == (tokens[:, :-1] == END)).all()
    assert ((mask == 0) == (tokens == END)).all()
    assert (targets[:, :-1] == tokens[:, 1:]).all()


def test_the_format_and_the_validation_split_are_reported(open_source, tmp_path, documents, said):
    write.nanogpt(tmp_path / 'train.bin', documents)
    assert open_source(tokens=str(tmp_path / 'train.bin')).validation is None
    assert 'validation: none' in said.text
    assert '(nanoGPT .bin)' in said.text
    said.clear()
    write.nanogpt(tmp_path / 'val.bin', documents[:10])
    assert open_source(tokens=str(tmp_path)).validation is not None
    assert f'validation {sum(map(len, documents[:10]))} tokens, 10 documents' in said.text
    other = write.pbin(tmp_path / 'other.pbin', documents[:9])
    source = open_source(tokens=str(tmp_path), validation_tokens=str(other))
    assert 'instead of the validation split' in said.text
    assert source.validation(0, slice(None), 2).tokens.max() <= END


def test_a_given_tokenizer_decodes_the_tokens_and_has_the_end_of_text(open_source, tmp_path):
    tokenizer = train_tokenizer(['some text to train on'], 270)
    (tmp_path / 'tokenizer.json').write_bytes(tokenizer.content)
    text = [[*tokenizer.encode(f'some text {n}'), tokenizer.end_of_text] for n in range(20)]
    path = write.nanogpt(tmp_path / 'a.bin', text)
    source = open_source(tokens=str(path), tokenizer=str(tmp_path / 'tokenizer.json'))
    assert source.tokenizer.decode(text[3][:-1]) == 'some text 3'
    assert source.vocab_size == tokenizer.vocab_size
    assert source.documents_per_row > 1
    write.nanogpt(tmp_path / 'b.bin', [[1, 2, tokenizer.vocab_size]])
    with pytest.raises(UserError, match=f'does not exist in a vocabulary of {tokenizer.vocab_size}'):
        open_source(tokens=str(tmp_path / 'b.bin'), tokenizer=str(tmp_path / 'tokenizer.json'))
    with pytest.raises(UserError, match=r'data\.vocab_size: 300 was given'):
        open_source(tokens=str(path), tokenizer=str(tmp_path / 'tokenizer.json'), vocab_size=300)


def test_opening_again_uses_the_cached_survey(open_source, tmp_path, documents, monkeypatch):
    path = write.pbin(tmp_path / 'a.pbin', documents)
    first = open_source(tokens=str(path))
    monkeypatch.setattr('pretrax.data.tokens.foreign._make', lambda *_: pytest.fail('read again'))
    assert rows(open_source(tokens=str(path))) == rows(first)


def test_flat_tokens_refuse_redundant_options(open_source, novel, tmp_path):
    source = open_source(text=str(novel), vocab_size=300)
    [place] = (tmp_path / 'data').glob('tokens-*')
    (tmp_path / 'tokenizer.json').write_bytes(source.tokenizer.content)
    with pytest.raises(UserError, match='flat-tokens include their tokenizer'):
        open_source(tokens=str(place), tokenizer=str(tmp_path / 'tokenizer.json'))
    with pytest.raises(UserError, match='flat-tokens store document boundaries'):
        open_source(tokens=str(place), end_of_text=0)
    with pytest.raises(UserError, match='did you mean'):
        open_source(tokens=str(tmp_path / 'data'))
    assert open_source(tokens=str(place), validation_tokens=str(place)).validation is not None
    other = train_tokenizer(['another text'], 270)
    identity = TokenizerIdentity(sha256=other.sha256, vocab_size=other.vocab_size, end_of_text=0)
    with create(tmp_path / 'x', identity, other.content, {}) as writer:
        writer.append('train', *encode_documents([[1, 0]]), n_bytes=1, predicted_bytes=0)
    with pytest.raises(UserError, match='made by another tokenizer'):
        open_source(tokens=str(place), validation_tokens=str(tmp_path / 'x'))


@given(st.sampled_from(['a.bin', 'a.pbin', 'a.idx', 'a']), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, name, content):
    folder = tmp_path_factory.mktemp('x')
    (folder / name).write_bytes(content)
    from pretrax.data.batches.source import DataRequest

    try:
        open_text(
            DataRequest(0, 1, folder, lambda _: None),
            options=data_options({'tokens': str(folder / name)}),
        )
    except UserError:
        return
    assert name == 'a.bin'
