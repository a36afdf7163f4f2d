"""What islands read in the bucket is what an island has written, or an error that names the object."""

import json
import tracemalloc

import pytest

from pretrax.federation.objects import (
    Closing,
    Contribution,
    Member,
    ObjectError,
    Piece,
    State,
    Table,
    Taken,
    closing_path,
    contribution_path,
    read_closing,
    read_contribution,
)
from pretrax.storage.connection import BucketError
from pretrax.storage.shared_path import SharedPath, locate_shared

DIGEST = 'a' * 32
PIECE = Piece(object='rounds/3/a.1/5f/0/embedding.0', size=10, xxh3=DIGEST)


def contribution(**changes):
    fields = {
        'round': 3, 'name': 'a.1', 'attempt': '5f', 'base': 2, 'step': 30, 'first_batch': 20, 'last_batch': 30,
        'tokens': 100, 'anchor': DIGEST, 'encoding': 'bf16', 'pieces': {'0': [PIECE]},
    }  # fmt: skip
    return Contribution(**(fields | changes))


MEMBER = Member(share=0, xxh3=DIGEST, learned=DIGEST, tokens=5, step=30)
OBJECTS = [
    Table(founder='a', terms={'federation.islands': 2, 'rate': 0.1, 'model': 'x', 'none': None}, islands={'a': 0}),
    State(round=7, state='training', took=Taken(round=6, norm=0.5, val_loss=float('inf'))),
    contribution(norm=float('nan'), loss=2.5, time=1.5, took=Taken(round=2, norm=0.5, seconds=3.0, bytes=4)),
    Closing(round=3, by='a', members={'a': MEMBER}, rejected={'b': 'NaN'}, left_out=['c'], tokens=5, step=30),
]


@pytest.fixture
def place(tmp_path):
    return SharedPath(tmp_path)


@pytest.mark.parametrize('written', OBJECTS, ids=lambda written: type(written).__name__)
def test_an_object_is_read_as_it_was_written_and_a_changed_byte_is_found(place, written):
    path = place / 'object'
    path.create(written.content())
    assert type(written).read(path) == written
    content = bytearray(written.content())
    errors, harmed = set(), 0
    for i, byte in enumerate(content):
        content[i] = byte ^ 1
        try:
            harmed += type(written).parse(bytes(content), path) != written
        except ObjectError as error:
            errors.add(str(error))
        content[i] = byte
    assert harmed == 0
    assert len(errors) > 10
    assert all(text.startswith(f'{path}: ') and len(text) <= 400 for text in errors)
    assert type(written).read(place / 'none') is None


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        (b'', 'Expecting value'),
        (b'\xff{}', 'decode'),
        (b'[' * 100_000, 'nested deeper'),
        (b'[]', 'it is not a JSON object'),
        (b'{}', 'Field required'),
        (b'{"format": 2}', 'it has format 2; update pretrax, which reads format 1 here'),
        (b'{"a": 1}' + b' ' * (1 << 20), 'it is larger than 1024 KiB'),
        (b' ' * (1 << 20), 'Expecting value'),
        (b'{"format": 1, "round": 0, "state": "training"}', 'round: Input should be greater'),
        (b'{"format": 1, "round": 1, "state": "training"}', 'its digest does not match'),
        (b'{"format": 1, "round": 1, "state": "training", "more": 1}', 'more: Extra inputs'),
    ],
)
def test_a_foreign_object_is_named_with_the_reason(place, content, reason):
    path = place / 'islands' / 'b' / 'state.json'
    path.create(content)
    with pytest.raises(ObjectError, match=reason) as caught:
        State.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ('key', 'read'),
    [
        ('rounds/3/closed.json', lambda place: read_closing(place, 3)),
        ('rounds/3/a.json', lambda place: read_contribution(place, 3, 'a')),
        ('islands/a/state.json', lambda place: State.read(place / 'islands/a/state.json')),
        ('federation.json', lambda place: Table.read(place / 'federation.json')),
    ],
)
def test_an_object_that_is_too_large_is_not_read(place, key, read):
    path = place / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('wb') as file:
        file.truncate(200 << 20)  # without blocks
    tracemalloc.start()
    try:
        with pytest.raises(ObjectError, match='it is larger than') as caught:
            read(place)
        assert not path.create(b'x')
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_of_an_object_in_a_bucket_that_is_too_large_one_byte_is_read(bucket):
    place = locate_shared(f'{bucket.url}/federation')
    bucket.put('federation/federation.json', b'{' * (1 << 21))
    whole = contribution().content()
    bucket.put('federation/rounds/3/a.1.json', whole)
    bucket.fault(method='GET', match='federation.json', times=float('inf'), cut_after=1)
    for _ in range(2):
        with pytest.raises(ObjectError, match='it is larger than 1024 KiB'):
            Table.read(place / 'federation.json')
    bucket.faults.clear()
    assert not (place / 'federation.json').create(b'x')
    assert (place / 'rounds/3/a.1.json').create(whole)
    assert read_contribution(place, 3, 'a.1')[0] == contribution()
    assert read_contribution(place, 4, 'a.1') is None
    with bucket.down(), pytest.raises(BucketError):
        read_contribution(place, 3, 'a.1')


@pytest.mark.parametrize(
    'changes',
    [
        {'name': 'closed'},
        {'name': 'CLOSED'},
        {'name': 'a.json'},
        {'name': 'a/b'},
        {'name': '..'},
        {'name': 'a' * 101},
        {'base': 1},
        {'first_batch': 31},
        {'tokens': 0},
        {'pieces': {'0': [PIECE.model_copy(update={'object': 'rounds/3/b/5f/0/embedding.0'})]}},
        {'pieces': {'0': [PIECE.model_copy(update={'object': 'rounds/3/a.1/../b/5f/0/embedding.0'})]}},
        {'pieces': {'x': [PIECE]}},
        {'seconds': float('nan')},
    ],
)
def test_what_no_island_writes_is_refused(changes):
    fields = json.loads(contribution().content()) | json.loads(json.dumps(changes, default=lambda p: p.model_dump()))
    fields.pop('xxh3')
    with pytest.raises(ValueError, match='Contribution'):
        Contribution.model_validate(fields)


def test_what_was_learned_depends_on_the_numbers_and_not_on_the_attempt():
    same = contribution(
        attempt='6a', seconds=9.0, pieces={'0': [PIECE.model_copy(update={'object': 'rounds/3/a.1/6a/0/x'})]}
    )
    assert same.learned() == contribution().learned()
    for other in (contribution(last_batch=31), contribution(anchor='b' * 32), contribution(pieces={})):
        assert other.learned() != contribution().learned()


def test_no_island_has_the_key_of_another_object(place):
    assert closing_path(place, 3) != contribution_path(place, 3, 'a.1')
    assert str(contribution_path(place, 3, 'a.1')) == f'{place}/rounds/3/a.1.json'
