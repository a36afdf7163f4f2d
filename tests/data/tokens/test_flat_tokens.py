"""flat-tokens: documents are read as written, zarr reads the same, and damaged or unfinished files are refused."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrax.data.tokenizers.tokenizer_files import character_tokenizer
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens import flat_tokens, flat_tokens_writer
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split, splits
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.data.tokens.token_files import open_token_files
from pretrax.errors import UserError
from token_arrays import encode_documents

TOKENIZER = character_tokenizer([chr(0x4E00 + n) for n in range(1000)], 'characters')
IDENTITY = TokenizerIdentity(sha256=TOKENIZER.sha256, vocab_size=1000, end_of_text=0)
DOCUMENTS = st.lists(st.lists(st.integers(1, 999), max_size=20).map(lambda ids: [*ids, 0]), min_size=1, max_size=30)


def write(directory: Path, documents: Iterable[list[int]]) -> Path:
    with create(directory, IDENTITY, TOKENIZER.content, {'text': 'test'}) as writer:
        for batch in itertools.batched(documents, 3):
            writer.append('train', *encode_documents(batch), n_bytes=10, predicted_bytes=7)
    return directory


@pytest.fixture
def small_files(monkeypatch):
    """Files of two chunks of four values, so a few tokens need several files."""
    monkeypatch.setattr(flat_tokens_writer, '_CHUNK', 4)
    for name in flat_tokens.SHARD_LENGTH:
        monkeypatch.setitem(flat_tokens.SHARD_LENGTH, name, 8)


@settings(max_examples=30)
@given(DOCUMENTS)
def test_every_document_is_read_as_written(tmp_path_factory, documents):
    directory = write(tmp_path_factory.mktemp('tokens') / 'here', documents)
    split = open_split(directory, 'train')
    assert split.n_documents == len(documents)
    assert split.n_tokens == sum(map(len, documents))
    assert [split.document(index).tolist() for index in range(split.n_documents)] == documents
    counts = verify(directory)['train']
    assert (counts.documents, counts.tokens) == (split.n_documents, split.n_tokens)


def test_the_tokenizer_and_the_bytes_of_text_may_be_unknown(tmp_path):
    identity = TokenizerIdentity(sha256=None, vocab_size=10, end_of_text=None)
    with create(tmp_path / 'here', identity, None, {}) as writer:
        writer.append('train', *encode_documents([[1, 2]]), n_bytes=3, predicted_bytes=1)
        writer.append('train', *encode_documents([[3], [4, 5]]), n_bytes=None, predicted_bytes=None)
    counts = verify(tmp_path / 'here')['train']
    assert (counts.documents, counts.tokens, counts.bytes, counts.predicted_bytes) == (3, 5, None, None)
    assert not (tmp_path / 'here' / 'tokenizer.json').exists()
    assert flat_tokens.read_tokenizer_json(tmp_path / 'here', identity) is None


@pytest.mark.usefixtures('small_files')
def test_a_split_may_have_several_files(tmp_path):
    documents = [[n % 900 + 1] * (n % 7) + [0] for n in range(40)]
    split = open_split(write(tmp_path / 'here', documents), 'train')
    assert len(list((split.path / 'encoded_tokens' / 'c').iterdir())) == -(-split.n_tokens // 8)
    assert [split.document(index).tolist() for index in range(40)] == documents
    verify(tmp_path / 'here')


@pytest.mark.usefixtures('small_files')
def test_tensorstore_reads_what_is_written_and_is_read(tmp_path):
    import tensorstore as ts

    directory = write(tmp_path / 'here', [[n + 1] * 5 + [0] for n in range(9)])
    split = open_split(directory, 'train')
    [ours] = split.read([(0, split.n_tokens)])
    place = directory / 'train' / 'encoded_tokens'
    theirs = ts.open({'driver': 'zarr3', 'kvstore': {'driver': 'file', 'path': f'{place}/'}}).result()
    assert np.array_equal(theirs.read().result(), ours)
    spec = theirs.spec(minimal_spec=False).to_json() | {'kvstore': {'driver': 'file', 'path': f'{tmp_path / "copy"}/'}}
    ts.open(spec, create=True).result()[...].write(ours).result()
    shutil.rmtree(place)
    shutil.copytree(tmp_path / 'copy', place)
    assert np.array_equal(open_split(directory, 'train').read([(3, 50)])[0], ours[3:50])
    verify(directory)


def test_zarr_reads_the_specified_format(tmp_path):
    import zarr

    directory = write(tmp_path / 'here', [[7, 8, 0], [9, 0], [0]])
    group = zarr.open_group(directory, mode='r')
    assert group.attrs['splits'] == ['train']
    train = zarr.open_group(directory / 'train', mode='r')
    encoded, starts = train['encoded_tokens'], train['seq_starts']
    assert isinstance(encoded, zarr.Array)
    assert isinstance(starts, zarr.Array)
    assert encoded.dtype == np.uint32
    assert starts.dtype == np.uint64
    assert np.asarray(encoded[:]).tolist() == [15, 16, 0, 19, 0, 1]
    assert np.asarray(starts[:]).tolist() == [0, 3, 5, 6]
    assert encoded.metadata.to_dict()['codecs'][0]['configuration']['codecs'][-1]['name'] == 'crc32c'
    assert train.attrs['counts'] == {'documents': 3, 'tokens': 6, 'bytes': 10, 'predicted_bytes': 7, 'targets': 3}
    assert train.attrs['max_token_id'] == 9


@settings(max_examples=30)
@given(DOCUMENTS, st.data())
def test_a_loss_mask_is_read_as_written_and_stored_only_if_given(tmp_path_factory, documents, data):
    masks = [
        data.draw(st.none() | st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)), label='mask')
        for ids in documents
    ]
    directory = tmp_path_factory.mktemp('masked') / 'here'
    with create(directory, IDENTITY, TOKENIZER.content, {}) as writer:
        for ids, mask in zip(documents, masks, strict=True):
            writer.append(
                'train', *encode_documents([ids], None if mask is None else [mask]), n_bytes=1, predicted_bytes=1
            )
    split = open_split(directory, 'train')
    expected = [mask or [True] * len(ids) for ids, mask in zip(documents, masks, strict=True)]
    assert split.has_mask == any(mask is not None for mask in masks) == (split.path / 'loss_mask').exists()
    assert split.read_mask([(0, split.n_tokens)])[0].tolist() == list(itertools.chain(*expected))
    assert split.manifest.counts.targets == sum(sum(mask[1:]) for mask in expected)
    assert verify(directory)['train'] == split.manifest.counts


@pytest.mark.usefixtures('small_files')
def test_a_damaged_loss_mask_is_refused(tmp_path):
    import zarr

    directory = tmp_path / 'here'
    with create(directory, IDENTITY, TOKENIZER.content, {}) as writer:
        writer.append('train', *encode_documents([[5, 6, 0], [7, 0]]), n_bytes=1, predicted_bytes=1)
        writer.append(
            'train', *encode_documents([[8] * 9 + [0]], [[False] * 4 + [True] * 6]), n_bytes=1, predicted_bytes=1
        )
    without = write(tmp_path / 'other', [[5, 6, 0], [7, 0], [8] * 9 + [0]])
    assert open_split(directory, 'train').fingerprint != open_split(without, 'train').fingerprint
    zarr.open_array(directory / 'train' / 'loss_mask', mode='r+')[6] = 1
    with pytest.raises(UserError, match=r'loss_mask: damaged token file: its sha256 differs'):
        verify(directory)
    for change in (lambda file: file.write_bytes(file.read_bytes()[:-2]), Path.unlink):
        file = directory / 'train' / 'loss_mask' / 'c' / '1'
        change(file)
        with pytest.raises(UserError, match=str(file)):
            open_split(directory, 'train').read_mask([(0, 15)])


@pytest.fixture
def damaged(tmp_path, request):
    """damaged(name, change) changes the bytes of a file in a new directory, and returns both paths."""
    request.getfixturevalue('small_files')
    documents = [[n + 1] * 5 + [0] for n in range(8)]

    def damage(name: str, change) -> tuple[Path, Path]:
        directory = write(tmp_path / 'here', documents)
        file = directory / name
        content = change(file.read_bytes())
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        return directory, file

    return damage


def read_all(directory: Path) -> None:
    split = open_split(directory, 'train')
    split.read([(0, split.n_tokens)])
    split.read_starts(0, split.n_documents + 1)
    flat_tokens.read_tokenizer_json(directory, split.manifest.tokenizer)


CHANGES = {
    'missing': lambda _: None,
    'empty': lambda _: b'',
    'cut': lambda raw: raw[: len(raw) // 2],
    'cut by two': lambda raw: raw[:-2],
}
FILES = [
    'zarr.json', 'tokenizer.json', 'train/zarr.json', 'train/encoded_tokens/zarr.json', 'train/seq_starts/zarr.json',
    'train/encoded_tokens/c/0', 'train/encoded_tokens/c/3', 'train/encoded_tokens/c/5', 'train/seq_starts/c/1',
]  # fmt: skip


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('change', CHANGES)
def test_the_error_names_the_damaged_file(damaged, name, change):
    directory, file = damaged(name, CHANGES[change])
    for reader in (read_all, verify):
        with pytest.raises(UserError) as caught:
            reader(directory)
        assert str(file) in str(caught.value) or (name == 'zarr.json' and change == 'missing')
        assert len(str(caught.value).splitlines()) <= 10


@pytest.mark.parametrize('change', ['missing', 'empty'])
def test_opening_finds_a_missing_or_empty_file(damaged, change):
    directory, file = damaged('train/encoded_tokens/c/3', CHANGES[change])
    with pytest.raises(UserError, match=f'{file}: damaged token file: {change}'):
        open_split(directory, 'train')


def test_the_error_names_a_file_that_disappears(damaged):
    directory, file = damaged('train/encoded_tokens/c/3', bytes)
    split = open_split(directory, 'train')
    file.unlink()
    split.read([(0, 24)])
    with pytest.raises(UserError, match=f'{file}: damaged token file: missing'):
        split.read([(0, 24), (22, 26)])


def test_opening_finds_wrong_offsets(tmp_path):
    import zarr

    directory = write(tmp_path / 'here', [[7, 8, 0], [9, 0]])
    array = zarr.open_array(directory / 'train' / 'seq_starts', mode='r+')
    array[:] = np.array([0, 3, 4], np.uint64)
    with pytest.raises(UserError, match='it runs from 0 to 4, not 0 to 5'):
        open_split(directory, 'train')


def test_any_flipped_bit_is_found(damaged):
    directory, file = damaged('train/encoded_tokens/c/2', bytes)
    whole = file.read_bytes()
    for byte in range(len(whole)):
        file.write_bytes(whole[:byte] + bytes([whole[byte] ^ (1 << byte % 8)]) + whole[byte + 1 :])
        with pytest.raises(UserError, match=str(file)):
            read_all(directory)


def test_verify_finds_changed_values_with_valid_checksums(tmp_path):
    import zarr

    directory = write(tmp_path / 'here', [[7, 8, 0], [9, 0]])
    for name, values, reason in (
        ('encoded_tokens', [15, 18, 0, 19, 0], 'sha256'),
        ('encoded_tokens', [15, 17, 0, 18, 0], 'differs from the starts'),
        ('encoded_tokens', [15, 16, 2, 19, 0], 'end-of-text'),
    ):
        array = zarr.open_array(directory / 'train' / name, mode='r+')
        kept = np.asarray(array[:])
        array[:] = np.array(values, np.uint32)
        read_all(directory)
        with pytest.raises(UserError, match=reason):
            verify(directory)
        array[:] = kept
        verify(directory)


@pytest.mark.parametrize(
    ('file', 'path', 'value', 'expected'),
    [
        ('zarr.json', ['format'], 'other', "format 'other' version 2"),
        ('zarr.json', ['version'], 1, "format 'flat-tokens' version 1"),
        ('zarr.json', ['splits'], None, 'expected a list of splits'),
        ('train/zarr.json', ['version'], 3, "attribute 'version'"),
        ('train/zarr.json', ['counts', 'tokens'], 6, '5 values, expected 6 by the attributes'),
        ('train/zarr.json', ['counts', 'documents'], 1, '3 values, expected 2 by the attributes'),
        ('train/zarr.json', ['counts'], None, "attribute 'counts'"),
        ('train/zarr.json', ['tokenizer', 'vocab_size'], 9, 'token 9 does not exist in a vocabulary of 9'),
        ('train/zarr.json', ['tokenizer', 'sha256'], '0' * 64, 'not the tokenizer that made these tokens'),
    ],
)
def test_wrong_attributes_are_refused(tmp_path, file, path, value, expected):
    directory = write(tmp_path / 'here', [[7, 8, 0], [9, 0]])
    group = json.loads((directory / file).read_text())
    *parents, last = path
    place = group['attributes']
    for name in parents:
        place = place[name]
    place[last] = value
    (directory / file).write_text(json.dumps(group))
    with pytest.raises(UserError, match=expected):
        read_all(directory)


@pytest.mark.parametrize('name', ['encoded_tokens', 'seq_starts'])
def test_chunks_larger_than_memory_are_refused_before_they_are_read(tmp_path, name):
    """Metadata may claim any size."""
    directory = write(tmp_path / 'here', [[7, 8, 0], [9, 0]])
    file = directory / 'train' / name / 'zarr.json'
    array = json.loads(file.read_text())
    array['shape'] = array['chunk_grid']['configuration']['chunk_shape'] = [2**40]
    array['codecs'][0]['configuration']['chunk_shape'] = [2**40]
    file.write_text(json.dumps(array))
    with pytest.raises(
        UserError, match=r'zarr\.json: chunks of [48],\d+,\d+,\d+,\d+ bytes\n  expected at most 1,024 MiB'
    ):
        open_split(directory, 'train')


def test_the_error_for_another_directory_suggests_the_nearest(tmp_path):
    directory = write(tmp_path / 'data' / 'tokens-1', [[1, 0]])
    with pytest.raises(UserError, match=f'did you mean {directory}'):
        splits(tmp_path / 'data')
    with pytest.raises(UserError, match=f'did you mean {directory}'):
        splits(tmp_path / 'data' / 'token-1')
    with pytest.raises(UserError, match="no split 'validation'\n  it has train"):
        open_split(directory, 'validation')


def test_a_directory_appears_atomically(tmp_path):
    with create(tmp_path / 'here', IDENTITY, TOKENIZER.content, {}) as writer:
        writer.append('train', *encode_documents([[1, 0]]), n_bytes=1, predicted_bytes=0)
        [partial] = tmp_path.iterdir()
        node = partial.stat().st_ino
    assert (tmp_path / 'here').stat().st_ino == node, 'renamed, not copied'


def test_an_error_during_writing_leaves_no_files(tmp_path):
    def unfinished():
        yield from [[1, 0]] * 3
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(tmp_path / 'here', unfinished())
    assert list(tmp_path.iterdir()) == []


PROGRAM = textwrap.dedent("""
    import resource, sys
    from pathlib import Path
    import numpy as np
    from pretrax.data.tokens.flat_tokens import TokenizerIdentity
    from pretrax.data.tokens.flat_tokens_writer import SHARD_LENGTH, create

    SHARD_LENGTH['encoded_tokens'] = 1 << 16  # several files of few tokens
    directory, limit = Path(sys.argv[1]), int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    identity = TokenizerIdentity(sha256='', vocab_size=2**31, end_of_text=0)
    with create(directory, identity, b'{}', {}) as writer:
        for n in range(20):
            encoded = 2 * ((n * 10**4 + np.arange(10**4)) * 7919 % 2**31).astype(np.uint32)
            encoded[0] += 1
            writer.append('train', encoded, None, n_bytes=1, predicted_bytes=1)
        print('written', flush=True)
        sys.stdin.read()
""")


def test_the_next_writer_removes_the_files_of_a_killed_one(tmp_path):
    place = tmp_path / 'here'
    with subprocess.Popen(
        [sys.executable, '-c', PROGRAM, str(place), '0'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == 'written\n'
        [partial] = tmp_path.iterdir()
        assert any(path.is_file() for path in (partial / 'train' / 'encoded_tokens' / 'c').iterdir())
        other = write(tmp_path / 'other', [[1, 0]])
        assert partial.exists(), 'the writer is running'
        process.send_signal(signal.SIGKILL)
    assert not place.exists()
    with pytest.raises(UserError, match='not a flat-tokens directory'):
        splits(partial)
    write(place, [[1, 0]])
    assert sorted(tmp_path.iterdir()) == sorted([place, other])


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path):
    result = subprocess.run(
        [sys.executable, '-c', PROGRAM, str(tmp_path / 'here'), str(10**5)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f'UserError: {tmp_path / "here"}: cannot write the tokens' in result.stderr
    assert list(tmp_path.iterdir()) == []


def _keys(values, path=()):
    """The path of every key of a JSON object."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _keys(value, (*path, key))


ODD = [None, '', 'x\0', '../..', -1, 2**70, 1.5, True, [], [None], {}, {'x': None}, [[[[]]]]]


def test_a_damaged_key_of_any_manifest_is_refused_or_harmless(tmp_path):
    """Of one key after the other: removes it, or gives it a value of each other kind."""
    directory = write(tmp_path / 'here', [[n + 1, 0] for n in range(9)])
    top = json.loads((directory / 'zarr.json').read_bytes())
    top['attributes']['documents'] = {'read': 10, 'kept': 9, 'cut': 0, 'left_out': {'empty': 1}}
    (directory / 'zarr.json').write_text(json.dumps(top))
    verify(directory)
    refused = 0
    for name in ('zarr.json', 'train/zarr.json', 'train/encoded_tokens/zarr.json'):
        whole = (directory / name).read_text()
        for path in _keys(json.loads(whole)):
            for odd in ['removed', *ODD]:
                values = json.loads(whole)
                *before, last = path
                inner = values
                for key in before:
                    inner = inner[key]
                if odd == 'removed':
                    del inner[last]
                else:
                    inner[last] = odd
                (directory / name).write_text(json.dumps(values))
                try:
                    read_all(directory)
                    verify(directory)
                except UserError:
                    refused += 1
        (directory / name).write_text('[' * 100_000)
        with pytest.raises(UserError, match=name):
            read_all(directory)
        (directory / name).write_text(whole)
    assert refused > 500


@pytest.mark.parametrize(
    ('key', 'value'),
    [(['counts', 'bytes'], 99), (['counts', 'predicted_bytes'], 99), (['tokenizer', 'vocab_size'], 301)],
)
def test_verify_compares_the_counts_with_the_text_of_the_tokens(tmp_path, key, value):
    tokenizer = train_tokenizer(['one text and another'], 300)
    identity = TokenizerIdentity(sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=0)
    ids = [[*tokenizer.encode(text), 0] for text in ('one text', 'änother')]
    with create(tmp_path / 'here', identity, tokenizer.content, {}) as writer:
        writer.append(
            'train',
            *encode_documents(ids),
            n_bytes=16,
            predicted_bytes=16 - sum(int(tokenizer.byte_lengths[d[0]]) for d in ids),
        )
    verify(tmp_path / 'here')
    file = tmp_path / 'here' / 'train' / 'zarr.json'
    group = json.loads(file.read_bytes())
    group['attributes'][key[0]][key[1]] = value
    file.write_text(json.dumps(group))
    with pytest.raises(UserError, match=rf'{file}: {key[0]}\.{key[1]} is {value}, but'):
        verify(tmp_path / 'here')


def silent(_: str) -> None:
    pass


@pytest.fixture
def as_nobody():
    """Runs the test as a user who does not own its files; root may read everything."""
    if os.geteuid():
        pytest.skip('needs root to become somebody else')
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    os.seteuid(65534)
    try:
        yield place
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


@pytest.mark.parametrize(
    'name',
    ['', 'zarr.json', 'tokenizer.json', 'train', 'train/zarr.json', 'train/encoded_tokens/zarr.json',
     'train/encoded_tokens/c/0', 'train/seq_starts/c'],
)  # fmt: skip
def test_a_file_that_may_not_be_read_is_not_called_damaged(as_nobody, name):
    directory = write(as_nobody / 'here', [[1, 0]] * 9)
    (directory / name).chmod(0)
    try:
        for reader in (read_all, verify, lambda path: [*open_token_files(path, silent).splits['train'].read([(0, 9)])]):
            with pytest.raises(UserError, match='cannot be read: Permission denied') as caught:
                reader(directory)
            assert 'damaged' not in str(caught.value)
            assert 'tokenize the text' not in str(caught.value)
    finally:
        (directory / name).chmod(0o700)


def test_what_a_newer_version_may_have_written_is_not_called_damaged(tmp_path):
    directory = write(tmp_path / 'here', [[1, 0]] * 9)
    file = directory / 'train' / 'encoded_tokens' / 'zarr.json'
    file.write_text(file.read_text().replace('"zstd"', '"newer"'))
    with pytest.raises(
        UserError, match=r"(?s)cannot be read: .*\['bytes', 'newer', 'crc32c'\].*may be whole: keep them"
    ):
        open_split(directory, 'train')
