"""Files of other tools: every token and document is read, and damaged or hostile files are refused."""

import io
import json
import os
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.small_memory import output_of

from data import foreign_files as write
from pretrax.data.tokens import foreign
from pretrax.data.tokens.foreign import ForeignTokens, find_layouts, open_layouts
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError

END = 50256
DOCUMENTS = st.lists(
    st.lists(st.integers(1, 250), min_size=1, max_size=12).map(lambda ids: [*ids, 0]), min_size=2, max_size=30
)
SOME = [[5, 6, 0], [7, 0], [8, 9, 10, 0], [0], [250, 0]] * 3


def opened(
    path: Path, end_of_text: int | None = None, vocab_size: int | None = None, said=None, directory=None, dtype=None
):
    return open_layouts(
        find_layouts(path, end_of_text, dtype), directory, (said if said is not None else []).append, vocab_size
    )


def documents(tokens: TokenStore) -> list[list[int]]:
    """The documents by their starts; checks that the start bits agree."""
    starts = tokens.read_starts(0, tokens.n_documents + 1).tolist()
    assert (starts[0], starts[-1]) == (0, tokens.n_tokens)
    [encoded] = tokens.read([(0, tokens.n_tokens)])
    assert encoded.dtype == np.uint32
    assert np.flatnonzero(encoded & 1).tolist() == starts[:-1]
    parts = tokens.read(list(zip(starts[:-1], starts[1:], strict=True)))
    assert np.array_equal(np.concatenate(parts), encoded)
    assert all(mask.all() and len(mask) == stop for mask, stop in zip(tokens.read_mask([(0, 3)]), [3], strict=True))
    return [(part >> 1).tolist() for part in parts]


def refusal(path: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        tokens = opened(path, **options)['train']
        tokens.read([(0, tokens.n_tokens)])
    assert len(str(caught.value).splitlines()) <= 10
    return str(caught.value)


FORMATS = {
    'nanogpt': lambda path, docs: write.nanogpt(path / 'a.bin', docs),
    'pbin1': lambda path, docs: write.pbin(path / 'a.pbin', docs, 1),
    'pbin2': lambda path, docs: write.pbin(path / 'a.pbin', docs, 2),
    'pbin4': lambda path, docs: write.pbin(path / 'a.pbin', docs, 4, base=12),
    'megatron2': lambda path, docs: write.megatron(path / 'a', [[doc] for doc in docs]),
    'megatron4': lambda path, docs: write.megatron(path / 'a', [[doc[:1], doc[1:]] for doc in docs], 'int32'),
    'megatron8': lambda path, docs: write.megatron(path / 'a', [[doc] for doc in docs], 'int64'),
    'seqax': lambda path, docs: write.seqax(path / 'a.zarr', {'train': docs}),
}


@pytest.mark.parametrize('name', FORMATS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(docs=DOCUMENTS, block=st.integers(1, 20))
def test_every_document_is_read_exactly(tmp_path_factory, monkeypatch, name, docs, block):
    monkeypatch.setattr(foreign, '_AT_ONCE', block)
    path = FORMATS[name](tmp_path_factory.mktemp('x'), docs)
    tokens = opened(path, end_of_text=0 if name == 'nanogpt' else None)['train']
    assert documents(tokens) == docs
    assert tokens.end_of_text == (0 if name == 'nanogpt' or len(docs) >= 8 else None)
    assert tokens.vocab_size == max(map(max, docs)) + 1


def test_the_same_tokens_have_the_same_fingerprint_in_any_format(tmp_path):
    stores = []
    for name, make in FORMATS.items():
        (tmp_path / name).mkdir()
        path = make(tmp_path / name, SOME)
        stores.append(opened(path, end_of_text=0 if name == 'nanogpt' else None)['train'])
    assert len({store.fingerprint for store in stores}) == 1
    (tmp_path / 'b').mkdir()
    other = opened(write.pbin(tmp_path / 'b' / 'b.pbin', [[5, 6, 0, 7, 0], *SOME[2:]]))['train']
    assert other.fingerprint != stores[0].fingerprint, 'the same ids in other documents'


def test_train_bin_and_val_bin_are_train_and_validation(tmp_path):
    write.nanogpt(tmp_path / 'train.bin', [[1, 2, END], [3, END]])
    write.nanogpt(tmp_path / 'val.bin', [[4, END]])
    for path in (tmp_path, tmp_path / 'train.bin'):
        said = []
        pair = opened(path, said=said)
        assert documents(pair['train']) == [[1, 2, END], [3, END]]
        assert documents(pair['validation']) == [[4, END]]
        assert {store.vocab_size for store in pair.values()} == {50257}
        assert 'nanoGPT .bin' in ' '.join(said)
    assert set(opened(tmp_path / 'val.bin')) == {'train'}


def test_without_the_end_of_text_of_gpt2_a_file_is_one_document(tmp_path):
    path = write.nanogpt(tmp_path / 'a.bin', [[1, 2, 60], [3, 60], [4]])
    said = []
    tokens = opened(path, said=said)['train']
    assert documents(tokens) == [[1, 2, 60, 3, 60, 4]]
    assert (tokens.end_of_text, tokens.vocab_size) == (None, 61)
    assert 'it has no token 50256, so it is read as one document' in ' '.join(said)
    assert documents(opened(path, end_of_text=60)['train']) == [[1, 2, 60], [3, 60], [4]]
    large = write.nanogpt(tmp_path / 'b.bin', [[1, END, 2], [60000]])
    tokens = opened(large, said=said)['train']
    assert (documents(tokens), tokens.vocab_size) == ([[1, END, 2, 60000]], 60001)
    assert 'the largest id is 60,000, outside the vocabulary of GPT-2' in said[-2]


def test_seqax_directories_may_have_two_splits(tmp_path):
    path = write.seqax(tmp_path / 'a.zarr', {'validation': [[9, 9]], 'train': [[1, 2], [3, 4, 5], [6, 7, 8], [2]]})
    pair = opened(path)
    assert documents(pair['train']) == [[1, 2], [3, 4, 5], [6, 7, 8], [2]]
    assert documents(pair['validation']) == [[9, 9]]
    assert {store.vocab_size for store in pair.values()} == {10}
    assert documents(opened(path / 'validation')['train']) == [[9, 9]]


def test_documents_without_tokens_are_skipped_and_reported(tmp_path):
    said = []
    prefix = write.megatron(tmp_path / 'a', [[[1, 0]], [], [[]], [[2], [3, 0]]])
    assert documents(opened(prefix, said=said)['train']) == [[1, 0], [2, 3, 0]]
    assert 'documents: skipped 2 without tokens' in ' '.join(said)
    said.clear()
    path = write.seqax(tmp_path / 'a.zarr', {'train': [[1, 2], [], [3]]})
    assert documents(opened(path, said=said)['train']) == [[1, 2], [3]]
    assert 'documents: skipped 1 without tokens' in ' '.join(said)


def test_megatron_files_have_three_names(tmp_path):
    write.megatron(tmp_path / 'my.data', [[[1, 2]], [[3]]])
    for name in ('my.data', 'my.data.bin', 'my.data.idx'):
        assert documents(opened(tmp_path / name)['train']) == [[1, 2], [3]]


@pytest.mark.parametrize('protocol', [2, 3, 4, 5])
def test_an_index_may_have_any_pickle_protocol_and_size(tmp_path, protocol):
    docs = [[n % 250 + 1, 0] * (1 + n % 3 * 40) for n in range(3000)]  # several frames, and numbers of 1, 2 and 4 bytes
    assert documents(opened(write.pbin(tmp_path / 'a.pbin', docs, 4, protocol))['train']) == docs


def test_an_index_may_have_8_byte_numbers():
    from pretrax.data.tokens.foreign_pickle import read_pairs

    pairs = [(2**31, 5), (2**40, 2**31 - 1), (2**62, 0)]
    assert read_pairs(io.BytesIO(pickle.dumps(pairs)), 'a', 10**6).tolist() == [list(pair) for pair in pairs]


@pytest.mark.parametrize('base', [0, 12])
def test_the_wrong_index_of_modalities_merge_tool_is_corrected(tmp_path, base):
    parts = [SOME[:4], SOME[4:9], SOME[9:]]
    files = [write.pbin(tmp_path / f'{n}.pbin', part, 2, base=base) for n, part in enumerate(parts)]
    said = []
    joined = write.join_pbins(tmp_path / 'joined.pbin', files)
    assert documents(opened(joined, said=said)['train']) == SOME
    assert 'places the documents from number 4 on 12 bytes too early' in ' '.join(said)
    twice = write.join_pbins(tmp_path / 'twice.pbin', [joined, files[0]])
    assert documents(opened(twice)['train']) == SOME + SOME[:4]


def test_a_survey_is_cached_until_the_file_changes(tmp_path, monkeypatch):
    path = write.pbin(tmp_path / 'a.pbin', SOME)
    first = opened(path, directory=tmp_path / 'kept')['train']
    monkeypatch.setattr(foreign, '_make', lambda *_: pytest.fail('read again'))
    again = opened(path, directory=tmp_path / 'kept')['train']
    assert documents(again) == documents(first) == SOME
    assert (again.fingerprint, again.end_of_text) == (first.fingerprint, 0)
    monkeypatch.undo()
    write.pbin(path, SOME[1:])
    assert documents(opened(path, directory=tmp_path / 'kept')['train']) == SOME[1:]


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    path = write.pbin(tmp_path / 'a.pbin', SOME)
    assert 'token 250 does not exist in a vocabulary of 250' in refusal(path, vocab_size=250)
    assert opened(path, vocab_size=300)['train'].vocab_size == 300
    with pytest.raises(UserError, match='stores document boundaries'):
        find_layouts(path, end_of_text=0)


def test_paths_without_token_files_are_refused(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"text": "a"}\n')
    assert 'use data.text instead of data.tokens' in refusal(tmp_path / 'a.jsonl')
    assert 'not a token file that pretrax can read' in refusal(tmp_path)
    assert 'did you mean' in refusal(tmp_path / 'a.json')
    (tmp_path / 'a.idx').write_bytes(pickle.dumps([(0, 5)]))
    assert 'starts with b' in refusal(tmp_path / 'a.idx')


@pytest.mark.parametrize('name', FORMATS)
def test_a_file_truncated_anywhere_is_refused(tmp_path, name):
    path = FORMATS[name](tmp_path, SOME)
    files = [file for file in sorted(tmp_path.rglob('*')) if file.is_file() and file.name not in ('.zgroup', '.zattrs')]
    options = {'end_of_text': 0} if name == 'nanogpt' else {}
    for file in files:
        whole = file.read_bytes()
        for size in {0, 1, len(whole) // 2 - 1 + len(whole) // 2 % 2, len(whole) - 1} - {len(whole)}:
            if file.parent.name == 'a.zarr' or (file.name == '.zattrs'):
                continue
            file.write_bytes(whole[:size])
            if name == 'nanogpt' and size % 2 == 0 and size:
                continue
            assert str(tmp_path) in refusal(path, **options), (file, size)
        file.write_bytes(whole)


def test_a_file_truncated_or_changed_during_reading_is_refused(tmp_path):
    path = write.nanogpt(tmp_path / 'a.bin', [[1, 2, END]] * 40000)
    tokens = opened(path)['train']
    os.truncate(path, 100)
    with pytest.raises(UserError, match='it ends at token 50 of 120,000'):
        tokens.read([(0, 120000)])
    path.write_bytes(b'\xff' * 240000)
    with pytest.raises(UserError, match='the file was changed after it was opened'):
        tokens.read([(0, 120000)])


def test_other_kinds_of_bin_are_refused(tmp_path):
    path = tmp_path / 'a.bin'
    np.arange(1, 1000, dtype=np.uint32).tofile(path)
    assert 'every second 2-byte number is 0' in refusal(path)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 100
    path.write_bytes(header.tobytes() + np.ones(100, np.uint16).tobytes())
    assert 'header of llm.c' in refusal(path)
    with path.open('wb') as stream:
        np.save(stream, np.ones(100, np.uint16))
    assert 'a .npy file' in refusal(path)


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (lambda raw: struct.pack('<Q', 0) + raw[8:], 'did not finish'),
        (lambda raw: raw[:8] + struct.pack('<I', 3) + raw[12:], 'ids of 3 bytes'),
        (lambda raw: raw[:8][::-1] + raw[8:12][::-1] + raw[12:], 'big-endian'),
        (lambda raw: struct.pack('<Q', 2**63) + raw[8:], 'the header gives'),
        (lambda raw: struct.pack('<Q', int.from_bytes(raw[:8], 'little') - 2) + raw[8:], 'index'),
        (lambda raw: raw + b'more', '4 bytes follow it'),
        (lambda raw: raw[:12] + raw[12:].replace(pickle.dumps([(0, 6)])[-8:], b''), 'Modalities'),
    ],
)
def test_a_damaged_pbin_is_refused(tmp_path, change, expected):
    path = write.pbin(tmp_path / 'a.pbin', SOME)
    if expected == 'Modalities':
        path.rename(tmp_path / 'a.dat')
        assert expected in refusal(tmp_path / 'a.dat')
        return
    path.write_bytes(change(path.read_bytes()))
    assert expected in refusal(path)


def with_index(path: Path, index) -> Path:
    """A .pbin of SOME with another index."""
    ids = np.array([token for document in SOME for token in document], '<u2').tobytes()
    raw = index if isinstance(index, bytes) else pickle.dumps(index)
    path.write_bytes(struct.pack('<QI', len(ids), 2) + ids + raw)
    return path


class Calls:
    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize(
    'index',
    [
        Calls(os.system, ('touch marker',)),
        [(0, 6), Calls(os.system, ('touch marker',))],
        [Calls(eval, ('open("marker", "w").close()',))],
        [(0, Calls(eval, ('1',)))],
        {'a': 1},
        [[(0, 6)]],
        [(0, 6, 1)],
        [0, 6],
        [(0, '6')],
        [(0, 6.0)],
        [(0, -6)],
        [(0, 2**200)],
        [(0, True)],
        [],
        b'',
        b'not a pickle',
        b'\x80\x04',
        b'\x80\x04]' * 100_000 + b'.',
        b'\x80\x04](' + b'(' * 100_000 + b'e.',
        b'\x80\x04](' + b'K\x00K\x06\x86' * 3 + b'.',
        b'\x80\x04](' + b'K\x00' * 1000 + b'e.',
        b'\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff](\x8a\xff' + b'\x01' * 30 + b'K\x06\x86e.',
        b'\x80\x04](B\xff\xff\xff\x7fK\x06\x86e.',
        b'\x80\x04](\x8e\xff\xff\xff\xff\xff\xff\xff\x7fK\x06\x86e.',
        b'\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.',
        b"cos\nsystem\n(S'true'\ntR.",
        pickle.dumps([(0, 6)]) + pickle.dumps([(0, 6)]),
        pickle.dumps([(0, 6)] * 3),
        pickle.dumps([(6, 4), (0, 6)]),
    ],
    ids=range(29),
)
def test_a_hostile_index_does_nothing(tmp_path, monkeypatch, index):
    monkeypatch.chdir(tmp_path)
    raw = index if isinstance(index, bytes) else pickle.dumps(index, 4)
    assert 'index' in refusal(with_index(tmp_path / 'a.pbin', raw))
    assert not (tmp_path / 'marker').exists()
    if b'marker' in raw:
        pickle.loads(raw)
        assert (tmp_path / 'marker').exists(), 'the file is not hostile, so the test proves nothing'


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=80), at=st.integers(0, 200), whole=st.booleans())
def test_random_bytes_in_an_index_are_read_or_refused(tmp_path, raw, at, whole):
    good = pickle.dumps([(0, 6), (6, 4)])
    mixed = raw if whole else good[: at % len(good)] + raw + good[at % len(good) + len(raw) :]
    from pretrax.data.tokens.foreign_pickle import read_pairs

    try:
        pairs = read_pairs(io.BytesIO(mixed), 'a', 10**6)
    except UserError:
        return
    assert pairs.tolist() == [list(pair) for pair in pickle.loads(mixed)]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FORMATS)), data=st.data())
def test_a_randomly_damaged_file_is_read_or_refused(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp('x')
    path = FORMATS[name](folder, SOME)
    file = data.draw(st.sampled_from(sorted(file for file in folder.rglob('*') if file.is_file())))
    raw = bytearray(file.read_bytes())
    for at in data.draw(st.lists(st.integers(0, min(len(raw), 60) - 1), min_size=1, max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    try:
        tokens = opened(path)['train']
    except UserError:
        return
    assert sum(map(len, documents(tokens))) == tokens.n_tokens


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (lambda idx: idx[:9] + struct.pack('<Q', 2) + idx[17:], 'version 2'),
        (lambda idx: idx[:17] + b'\x06' + idx[18:], '<f8'),
        (lambda idx: idx[:17] + b'\x63' + idx[18:], 'unknown'),
        (lambda idx: idx[:18] + struct.pack('<Q', 2**60) + idx[26:], 'truncated or damaged'),
        (lambda idx: idx[:34] + struct.pack('<i', 4) + idx[38:], 'are not consecutive'),
        (lambda idx: idx[:34] + struct.pack('<i', -1) + idx[38:], 'are not consecutive'),
        (lambda idx: idx[:-8] + struct.pack('<q', 3), 'the document ends do not increase'),
        (lambda idx: idx + b'\x01' * 15, 'as not text'),
        (lambda idx: idx + b'\x01', 'truncated or damaged'),
    ],
)
def test_a_damaged_megatron_index_is_refused(tmp_path, change, expected):
    prefix = write.megatron(tmp_path / 'a', [[doc] for doc in SOME])
    idx = tmp_path / 'a.idx'
    idx.write_bytes(change(idx.read_bytes()))
    assert expected in refusal(prefix)


def test_megatron_modes_ids_and_sizes_are_checked(tmp_path):
    assert documents(opened(write.megatron(tmp_path / 'a', [[doc] for doc in SOME], modes=bytes(15)))['train']) == SOME
    assert 'token 1 is -4, which is not a valid id' in refusal(write.megatron(tmp_path / 'b', [[[1, -4]]], 'int32'))
    assert 'which is not a valid id' in refusal(write.megatron(tmp_path / 'c', [[[2**31 - 1]]], 'int64'))
    write.megatron(tmp_path / 'd', [[[1, 2]]])
    (tmp_path / 'd.bin').write_bytes(b'1234567890')
    assert 'it describes 2 tokens, but d.bin has 5' in refusal(tmp_path / 'd')


def test_a_damaged_seqax_dataset_is_refused(tmp_path):
    def fresh(name):
        return write.seqax(tmp_path / name, {'train': [[1, 2, 3, 4, 5], [6, 7, 8, 9], [1, 2]]})

    path = fresh('a')
    (path / 'train' / 'encoded_tokens' / '1').unlink()
    assert 'encoded_tokens' in refusal(path)
    path = fresh('b')
    (path / 'train' / '.zattrs').write_text('{"max_token_id": 5}')
    assert 'max_token_id is 5, but token 9 occurs' in refusal(path)
    (path / 'train' / '.zattrs').write_text('{}')
    assert 'max_token_id is None' in refusal(path)
    path = fresh('c')
    for name in ('0', '1'):
        chunk = path / 'train' / 'encoded_tokens' / name
        if chunk.exists():
            chunk.write_bytes((fresh(f'd{name}') / 'train' / 'encoded_tokens' / '0').read_bytes())
    assert 'differ from seq_starts' in refusal(path)
    path = fresh('e')
    meta = path / 'train' / 'seq_starts' / '.zarray'
    meta.write_text(meta.read_text().replace('"delta"', '"fixedscaleoffset"'))
    assert 'expected none, or the delta' in refusal(path)


def test_foreign_tokens_are_a_token_store(tmp_path):
    store: TokenStore = opened(write.pbin(tmp_path / 'a.pbin', SOME))['train']
    assert isinstance(store, ForeignTokens)
    assert store.bytes_per_target is None
    assert not store.has_mask


@pytest.mark.parametrize('vocab_size', [300, 5_000, 128_000, 262_144])
def test_ids_of_4_bytes_are_recognized_and_read_if_asked_for(tmp_path, vocab_size):
    ids = np.random.default_rng(0).integers(1, vocab_size, 40_200)
    path = tmp_path / 'train.bin'
    ids.astype(np.uint32).tofile(path)
    assert 'expected dtype=uint32' in refusal(path)
    tokens = opened(path, dtype='uint32', end_of_text=0)['train']
    assert np.array_equal(tokens.read([(0, tokens.n_tokens)])[0] >> 1, ids)
    if vocab_size < 1 << 16:
        ids.astype(np.uint16).tofile(path)
        assert 'as uint32, it has the id' in refusal(path, dtype='uint32')
        assert opened(path)['train'].n_tokens == opened(path, dtype='uint16')['train'].n_tokens == len(ids)
    ids.astype(np.int64).tofile(path)
    assert 'its ids have 8 bytes' in refusal(path)


def test_a_wide_file_whose_first_ids_are_special_is_recognized(tmp_path):
    ids = np.full(100_000, 1 << 20)  # upper halves of 16: no conclusion
    ids[60_000:] = np.random.default_rng(0).integers(0, 100_000, 40_000)
    ids[:60_000] = np.random.default_rng(0).integers(0, 100, 60_000)
    ids.astype(np.uint32).tofile(tmp_path / 'a.bin')
    assert 'expected dtype=uint32' in refusal(tmp_path / 'a.bin')


def test_dtype_is_refused_where_the_format_has_it(tmp_path):
    path = write.pbin(tmp_path / 'a.pbin', SOME)
    assert 'remove dtype=uint32' in refusal(path, dtype='uint32')
    (tmp_path / 'b.bin').write_bytes(bytes(6))
    assert 'expected a multiple of 4 for uint32 ids' in refusal(tmp_path / 'b.bin', dtype='uint32')


OPEN = """
import json, resource, sys
from pathlib import Path
from pretrax.data.tokens.token_files import open_token_files
from pretrax.errors import UserError

used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (250 << 20),) * 2)
said = {}
for path in sys.argv[1:]:
    try:
        open_token_files(Path(path), lambda line: None)
    except UserError as error:
        said[path] = str(error)
print(json.dumps(said))
"""


def claiming_zarr(path: Path, tokens: tuple[int, int], starts: tuple[int, int]) -> None:
    """Tokens of seqax that claim (values, values per chunk), and whose chunk files have a few bytes."""
    for name, dtype, (n, chunk) in (('encoded_tokens', '<u4', tokens), ('seq_starts', '<u8', starts)):
        (path / name).mkdir(parents=True)
        metadata = {'zarr_format': 2, 'shape': [n], 'chunks': [chunk], 'dtype': dtype, 'order': 'C', 'fill_value': 0}
        (path / name / '.zarray').write_text(json.dumps(metadata | {'compressor': None, 'filters': None}))
        (path / name / '0').write_bytes(bytes(100))
    (path / '.zattrs').write_text('{"max_token_id": 300}')
    (path / '.zgroup').write_text('{"zarr_format": 2}')


def sparse(path: Path, head: bytes, size: int, tail: bytes = b'') -> None:
    path.write_bytes(head)
    os.truncate(path, size)
    with path.open('r+b') as stream:
        stream.seek(-len(tail), 2)
        stream.write(tail)


@pytest.mark.slow
def test_claims_of_more_than_memory_are_refused_in_two_lines(tmp_path):
    """The files are sparse, so their size is as large as they say; the process may use 250 MiB."""
    n = 1 << 24
    header = struct.pack('<9sQBQQ', b'MMIDIDX\0\0', 1, 8, n, n)
    sparse(tmp_path / 'zeros.idx', header, len(header) + 20 * n)
    sparse(tmp_path / 'zeros.bin', b'', 2 * n)
    sparse(tmp_path / 'marked.idx', header, len(header) + 20 * n, struct.pack('<q', n))
    sparse(tmp_path / 'marked.bin', b'', 2 * n)
    header = struct.pack('<9sQBQQ', b'MMIDIDX\0\0', 1, 8, 2**63, 2**62)
    sparse(tmp_path / 'overflow.idx', header, 1000)
    sparse(tmp_path / 'overflow.bin', b'', 2000)
    sparse(tmp_path / 'zeros.pbin', struct.pack('<QI', 4 * n, 4), 24 * n)
    index = pickle.dumps([(4 * number, 4) for number in range(1000)])[:-3]
    sparse(tmp_path / 'begun.pbin', struct.pack('<QI', 4000, 4) + bytes(4000) + index, 24 * n)
    claiming_zarr(tmp_path / 'chunk', (2**40, 2**40), (2**40, 2**40))
    claiming_zarr(tmp_path / 'values', (2**40, 2**20), (2**40, 2**20))
    claiming_zarr(tmp_path / 'starts', (2**10, 2**10), (2**40, 2**40))
    expected = {
        'zeros.bin': 'the document ends do not increase from 0 to 16,777,216',
        'marked.bin': 'do not increase|describes 0 tokens',
        'overflow.bin': '9,223,372,036,854,775,808 sequences',
        'zeros.pbin': 'it does not start like a pickle',
        'begun.pbin': 'the index is not a pickled list',
        'chunk': 'chunks of 4,398,046,511,104 bytes',
        'values': 'cannot be read: .*Not enough data',
        'starts': 'chunks of 8,796,093,022,208 bytes',
    }
    output = output_of(OPEN, *(str(tmp_path / name) for name in expected))
    said = {Path(path).name: text for path, text in json.loads(output).items()}
    assert said.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, said[name]), said[name]
        assert said[name].count('\n') == 1
