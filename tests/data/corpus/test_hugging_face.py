"""Local datasets, read with the real library `datasets`: downloading and streaming give the same documents."""

import json
import os
import pickle
import socket
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_options import data_options
from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.hugging_face import find_dataset
from pretrax.data.corpus.selection import RowCounts, Selection
from pretrax.data.options import HuggingFaceOptions
from pretrax.data.text import open_text
from pretrax.errors import UserError

pytestmark = pytest.mark.filterwarnings('default')  # the library has warnings of its own


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    datasets.disable_progress_bars()


def texts_of(name, n):
    return [f'{name} {row}' if row % 4 else '' for row in range(n)]


@pytest.fixture(params=['jsonl', 'parquet'])
def directory(request, tmp_path):
    """A dataset with two splits; the first has three files."""
    root = tmp_path / 'set'
    root.mkdir()
    for name, n in (('train-0', 7), ('train-1', 5), ('train-2', 9), ('test-0', 3)):
        rows = [{'text': text, 'n': n} for n, text in enumerate(texts_of(name, n))]
        if request.param == 'jsonl':
            (root / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), root / f'{name}.parquet', row_group_size=2)
    return root


TRAIN = [*texts_of('train-0', 7), *texts_of('train-1', 5), *texts_of('train-2', 9)]


def corpus(directory, **options):
    found = find_dataset(f'hf:{directory}', HuggingFaceOptions.model_validate(options))
    return Corpus([found], Selection())


@pytest.mark.parametrize('streaming', [False, True])
def test_a_file_with_several_names_is_read_once(directory, tmp_path, streaming):
    expected = [document.text for document in corpus(directory, streaming=streaming).documents()]
    suffix = next(directory.iterdir()).suffix
    (directory / f'train-1-link{suffix}').symlink_to(f'train-1{suffix}')
    os.link(directory / f'train-0{suffix}', directory / f'train-9{suffix}')
    (tmp_path / 'far').mkdir()
    (directory / 'linked').symlink_to('../far')
    after = corpus(directory, streaming=streaming)
    assert [document.text for document in after.documents()] == expected
    assert f'does not follow links to folders, such as {directory}/linked' in after.files[0].description


@pytest.mark.parametrize('streaming', [False, True])
def test_rows_are_read_exactly_and_in_order_in_any_shards(directory, streaming):
    whole = corpus(directory, streaming=streaming)
    counts = RowCounts()
    expected = [text for text in TRAIN if text]
    assert [document.text for document in whole.documents(counts)] == expected
    assert (counts.read, counts.left_out) == (len(TRAIN), {'empty': TRAIN.count('')})
    places = [document.origin for document in whole.documents()]
    assert places[0] == (f'hf:{directory}[0]:2' if streaming else f'hf:{directory}:2')
    for n in (2, 3, 30):
        parts = pickle.loads(pickle.dumps(shards(whole, n)))
        assert len(parts) == min(n, 3 if streaming else n, len(TRAIN)) or not streaming
        assert len(parts) > 1
        assert [d.text for part in parts for d in part.documents()] == expected
        assert [d.origin for part in parts for d in part.documents()] == places
    assert [d.text for d in whole.documents(start=9)] == [text for text in TRAIN[9:] if text]


def test_splits_slices_and_mistakes(directory, tmp_path):
    assert [d.text for d in corpus(directory, split='test').documents()] == [t for t in texts_of('test-0', 3) if t]
    assert [d.text for d in corpus(directory, split='train[2:4]').documents()] == [t for t in TRAIN[2:4] if t]
    for options, expected in (
        ({'split': 'trian'}, 'Unknown split "trian"'),
        ({'configuration': 'en'}, "'en' not found"),
        ({'revision': 'main'}, 'is a directory and has no revisions'),
    ):
        with pytest.raises(UserError, match=expected):
            corpus(directory, **options)
    with pytest.raises(UserError, match='hf:no/such'):
        find_dataset('hf:no/such', HuggingFaceOptions.model_validate({}))


def test_the_fingerprint_depends_on_files_split_and_configuration_but_not_on_streaming(directory):
    first = corpus(directory).fingerprint()
    assert corpus(directory).fingerprint() == first == corpus(directory, streaming=True).fingerprint()
    assert corpus(directory, split='test').fingerprint() != first
    path = min(directory.iterdir())
    os.utime(path, ns=(1, 1))
    assert corpus(directory).fingerprint() != first


def test_a_dataset_that_changes_is_refused(directory):
    whole = corpus(directory, streaming=True)
    path = min(directory.iterdir())
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match='the dataset has changed since this run started'):
        list(whole.documents())


@pytest.mark.parametrize('directory', ['jsonl'], indirect=True)
def test_a_configuration_trains_on_a_dataset(directory, tmp_path, said):
    from pretrax.data.batches.source import DataRequest

    request = DataRequest(0, 8, tmp_path / 'data', said.append)
    options = data_options(
        {
            'text': f'hf:{directory}',
            'vocab_size': 300,
            'validation': 0,
            'workers': 1,
            'hugging_face': {'streaming': True},
        }
    )
    source = open_text(request, options=options)
    assert source.batch(0, slice(0, 2), 2).tokens.shape == (2, 8)
    assert f'text: hf:{directory}, split train, streaming, 3 files' in said.text
    assert f'documents: {len(TRAIN)} read = {len([t for t in TRAIN if t])} kept + {TRAIN.count("")} empty' in said.text


@pytest.mark.parametrize('directory', ['jsonl'], indirect=True)
def test_a_missing_field_is_reported_with_the_existing_fields(directory):
    whole = Corpus([find_dataset(f'hf:{directory}', HuggingFaceOptions.model_validate({}))], Selection(field='content'))
    with pytest.raises(UserError, match=r":1: no field 'content'\n  fields found: 'text', 'n'"):
        list(whole.documents())


@pytest.mark.parametrize('streaming', [False, True])
def test_a_directory_of_save_to_disk_is_read(tmp_path, streaming):
    import datasets

    rows = datasets.Dataset.from_list([{'text': text, 'n': n} for n, text in enumerate(TRAIN)])
    rows.save_to_disk(tmp_path / 'one', num_shards=3)
    expected = [text for text in TRAIN if text]
    both = datasets.DatasetDict({'train': rows, 'test': rows.select(range(4))})
    both.save_to_disk(tmp_path / 'both')
    for name in ('one', 'both'):
        whole = corpus(tmp_path / name, streaming=streaming)
        for n in (1, 3, 10):
            found = [document.text for shard in shards(whole, n) for document in shard.documents()]
            assert found == expected
    found = corpus(tmp_path / 'both', streaming=streaming, split='test')
    assert [document.text for document in found.documents()] == [text for text in TRAIN[:4] if text]
    found = corpus(tmp_path / 'one', streaming=streaming, split='train[5:12]')
    assert [document.text for document in found.documents()] == [text for text in TRAIN[5:12] if text]
    with pytest.raises(UserError, match='Unknown split "dev"'):
        corpus(tmp_path / 'both', split='dev')
    with pytest.raises(UserError, match='was written by save_to_disk and has none'):
        corpus(tmp_path / 'one', configuration='en')


def test_a_directory_of_save_to_disk_that_changes_is_refused(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{'text': text} for text in TRAIN])
    rows.save_to_disk(tmp_path / 'one')
    whole = corpus(tmp_path / 'one')
    rows.select(range(5)).save_to_disk(tmp_path / 'one')
    with pytest.raises(UserError, match='the dataset has changed since this run started'):
        list(whole.documents())


def test_a_dataset_of_the_hub_without_a_network_is_two_lines(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')

    def unknown_host(host, port):
        assert host == 'huggingface.co'
        raise socket.gaierror(-2, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', unknown_host)
    monkeypatch.setattr(urllib.request, 'getproxies', dict)
    monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', 'https://huggingface.co')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path))
    with pytest.raises(UserError) as refused:
        find_dataset('hf:some/texts', HuggingFaceOptions())
    first, second = str(refused.value).splitlines()
    assert 'hf:some/texts' in first
    assert 'no network to huggingface.co' in first
    assert 'hf:DIRECTORY' in second
