"""A gzip file is decompressed up to a bound, and damage is a ValueError."""

import gzip
import tracemalloc

import pytest

from pretrax.system import gzip_file
from pretrax.system.gzip_file import gunzip


def test_members_are_joined_and_what_is_too_long_is_refused_before_it_is_in_memory(monkeypatch):
    assert gunzip(gzip.compress(b'one') + gzip.compress(b' two')) == b'one two'
    bomb = gzip.compress(bytes(64 << 20))
    monkeypatch.setattr(gzip_file, 'MOST', 1 << 20)
    assert gunzip(gzip.compress(bytes(1 << 20))) == bytes(1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match='more than 1,048,576 bytes when decompressed'):
            gunzip(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    'damaged',
    [b'text', gzip.compress(b'x' * 999, mtime=0)[:-9], gzip.compress(b'x', mtime=0)[:12] + b'\xff' * 20],
    ids=['text', 'cut', 'overwritten'],
)
def test_damage_is_a_value_error(damaged):
    with pytest.raises(ValueError, match='not readable as gzip'):
        gunzip(damaged)
