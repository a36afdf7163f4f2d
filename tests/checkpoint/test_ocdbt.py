"""TensorStore reads the database of packed files."""

import pytest
import tensorstore as ts

from pretrax.checkpoint.files import File
from pretrax.checkpoint.ocdbt import database


@pytest.mark.parametrize('count', [1, 20_000])
def test_tensorstore_finds_every_file_wherever_it_is(count, tmp_path):
    """Also offsets of several bytes, and more keys than one byte counts."""
    (tmp_path / 'state' / 'large').mkdir(parents=True)
    (tmp_path / 'state' / 'large' / '0.0').write_bytes(b'large')
    contents = {f'state/array{i}/0': str(i).encode() for i in range(count)}
    (tmp_path / 'state' / 'packed.0.0').write_bytes(b''.join(contents.values()))
    files, offset = {'state/large/0.0': File(size=5, xxh3='')}, 0
    for name, content in contents.items():
        files[name] = File(size=len(content), xxh3='', pack='state/packed.0.0', offset=offset)
        offset += len(content)
    for name, values in database(files).items():
        (tmp_path / name).write_bytes(values.tobytes())
    store = ts.KvStore.open({'driver': 'ocdbt', 'base': f'file://{tmp_path}/state/'}).result()
    assert len(store.list().result()) == count + 1
    assert store['large/0.0'] == b'large'
    for name in list(contents)[:: count // 100 + 1]:
        assert store[name.removeprefix('state/')] == contents[name]
    with pytest.raises(KeyError):
        store['array/0']


def test_there_is_no_database_without_packs():
    assert database({'state/large/0.0': File(size=5, xxh3='')}) == {}
