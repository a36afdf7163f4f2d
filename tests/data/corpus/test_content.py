"""Small files that expand to far more than memory:
each is read in pieces, or refused in two lines, under a memory limit.
"""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tests.small_memory import output_of

pytestmark = pytest.mark.slow

READ = """
import itertools, json, resource, sys
import pyarrow.parquet, zstandard
from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import RowCounts, Selection
from pretrax.errors import UserError

used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
said = {}
for path in sys.argv[1:]:
    counts = RowCounts()
    try:
        said[path] = [len(one.text) for one in itertools.islice(Corpus(find_files(path)).documents(counts), 3)]
    except UserError as error:
        said[path] = str(error)
print(json.dumps(said))
"""


def zstd(head: bytes, block: bytes, n: int) -> bytes:
    """One frame with a block n times."""
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    return stream.compress(head) + b''.join(stream.compress(block) for _ in range(n)) + stream.flush()


@pytest.fixture(scope='module')
def outcome(tmp_path_factory):
    """What reading each of the files gives, in a process that may use 600 MiB."""
    root = tmp_path_factory.mktemp('small')
    document = b'{"text": "found"}\n'
    megabyte = 1 << 20
    files = {
        'ends.jsonl.zst': zstd(document * 3, b'\n' * 64 * megabyte, 10),
        'ends.jsonl.gz': gzip.compress(document * 3) + gzip.compress(b'\n' * 64 * megabyte) * 10,
        'line.jsonl.zst': zstd(b'', b' ' * 64 * megabyte, 10),
        'values.jsonl.zst': zstd(b'{"text": [', b'[],' * 4 * megabyte, 8),
        'text.txt.gz': gzip.compress(bytes(64 * megabyte)) * 10,
        'text.py.zst': zstd(b'', b'\n' * 64 * megabyte, 10),
        'quote.csv.zst': zstd(b'text\n"', b'x' * megabyte + b'\n', 80),
        'fields.csv.zst': zstd(b'text', b',' * megabyte, 80),
        'names.csv': b'text' + b',a' * megabyte,
        'long.jsonl.zst': zstd(b'{"text": "', b'x, ' * megabyte, 10) + zstd(b'"}\n', b'', 0),
        'deep.jsonl': b'{"text": ' + b'[' * megabyte,
        'digits.jsonl': b'{"text": ' + b'1' * megabyte + b'}',
        'members.txt.gz': gzip.compress(b'') * 20_000 + gzip.compress(b'abc'),
    }
    for name, content in files.items():
        (root / name).write_bytes(content)
        assert len(content) < 3 * megabyte, name
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000), ['x' * 20 * megabyte])
    pq.write_table(pa.table({'text': values}), root / 'repeated.parquet', compression='zstd')
    paths = [str(root / name) for name in (*files, 'repeated.parquet')]
    output = output_of(READ, *paths, ARROW_DEFAULT_MEMORY_POOL='system')
    return {path.rpartition('/')[2]: said for path, said in json.loads(output).items()}


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('ends.jsonl.zst', [5, 5, 5]),
        ('ends.jsonl.gz', [5, 5, 5]),
        ('line.jsonl.zst', 'does not fit in memory'),
        ('values.jsonl.zst', 'bytes of JSON outside of its strings'),
        ('text.txt.gz', 'does not fit in memory'),
        ('text.py.zst', 'does not fit in memory'),
        ('quote.csv.zst', 'quote.csv.zst:2: a row of more than 64 MiB: a quote is never closed?'),
        ('fields.csv.zst', 'a line is longer than 64 MiB'),
        ('names.csv', "the header names 'a' twice"),
        ('long.jsonl.zst', [30 << 20]),
        ('deep.jsonl', 'cannot be parsed as JSON'),
        ('digits.jsonl', 'cannot be parsed as JSON'),
        ('members.txt.gz', [3]),
        ('repeated.parquet', [20 << 20] * 3),
    ],
)
def test_a_small_file_is_read_in_pieces_or_refused(outcome, name, expected):
    if isinstance(expected, list):
        assert outcome[name] == expected
    else:
        assert expected in outcome[name]
        assert outcome[name].count('\n') == 1 or name in ('deep.jsonl', 'digits.jsonl')
        assert name in outcome[name]
