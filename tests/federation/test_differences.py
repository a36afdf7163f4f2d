"""Numbers that one mesh writes and another one reads, and damage on the way."""

import json
import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import xxhash

from host_parts import LAYERS, MESHES, SHAPES, held, joined, numbers_in, random_weights
from pretrax.federation import differences
from pretrax.federation.differences import DamagedPiecesError, add, read, write
from pretrax.federation.encoding import NotFiniteError, encoded_size
from pretrax.federation.fragments import fragments
from pretrax.federation.host_weights import select, to_devices, to_host, zeros_like
from pretrax.model.weights import layers_with
from pretrax.storage import BucketPath
from pretrax.storage.connection import BucketError
from pretrax.storage.shared_path import SharedPath
from small import GPT2, LLAMA4, MIXTURE, mesh_of, transformer
from small import random_weights as random_weights_of

AUTHOR = "the difference of island 'b' in round 7"


@pytest.fixture
def place(tmp_path):
    return SharedPath(tmp_path)


@pytest.fixture
def process(monkeypatch):
    """Makes this process one of several."""
    return lambda number: monkeypatch.setattr(jax, 'process_index', lambda: number)


def written(place, parts, encoding, process, residuals=None):
    found = []
    for number, part in enumerate(parts):
        process(number)
        found.append(write(place, 'rounds/7/b/token', part, encoding, residuals and residuals[number]))
    return [one.piece for one in found], sum(one.size for one in found)


@pytest.mark.parametrize('reader', MESHES, ids=str)
@pytest.mark.parametrize('writer', MESHES, ids=str)
def test_any_mesh_reads_what_any_other_has_written(place, process, monkeypatch, writer, reader):
    monkeypatch.setattr(differences, '_CHUNK', 40)
    monkeypatch.setattr(differences, '_OBJECT', 1000)
    weights, n_writers, n_readers = random_weights(0), 2, 4
    for number, fragment in enumerate(fragments(SHAPES, 2, LAYERS)):
        here = place / str(number)
        parts = [select(part, fragment) for part in held(weights, writer, n_writers)]
        pieces, _ = written(here, parts, 'f32', process)
        objects = [path.stat().st_size for path in here.rglob('*') if path.is_file() and path.name.isdecimal()]
        assert max(objects) <= 1000 + 4 * 40
        targets = held({name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}, reader, n_readers)
        for i, target in enumerate(targets):
            process(i)
            assert read(here, pieces, select(target, fragment), AUTHOR) > 0
        for name, values in joined(targets, SHAPES).items():
            inside = ~np.isnan(values)
            np.testing.assert_array_equal(values[inside], weights[name][inside])
        assert sum((~np.isnan(v)).sum() for v in joined(targets, SHAPES).values()) == numbers_in(fragment, SHAPES)


@pytest.mark.parametrize(
    ('options', 'writer', 'reader'),
    [
        (LLAMA4, {'e': 2, 't': 2, 'd': 2}, {'e': 4, 'd': 2}),  # dense layers and experts in turn
        (MIXTURE, {'p': 2, 't': 2, 'd': 2}, {'r': 2, 'e': 4}),
        (GPT2, {'d': 8}, {'p': 2, 't': 4}),
    ],
)
def test_fragments_of_a_decoder_go_from_mesh_to_mesh(place, process, options, writer, reader):
    def decoder(axes, values):
        mesh = mesh_of(**axes)
        with jax.set_mesh(mesh):
            like = transformer(options, mesh, micro_batches=4).abstract()
        return jax.tree.map(lambda x, one: jax.device_put(x, one.sharding), values, like)

    values = random_weights_of(transformer(options))
    source, target = to_host(decoder(writer, values)), to_host(decoder(reader, jax.tree.map(np.zeros_like, values)))
    shapes, arch = {name: array.shape for name, array in source.items()}, transformer(options).arch
    layers = {name: layers_with(arch, name.removeprefix('layers.')) for name in shapes if name.startswith('layers.')}
    for number, fragment in enumerate(fragments(shapes, 2, layers)):
        pieces, _ = written(place / str(number), [select(source, fragment)], 'f32', process)
        read(place / str(number), pieces, select(target, fragment), AUTHOR)
    back = to_devices(target, decoder(reader, values))
    for actual, expected in zip(jax.tree.leaves(back), jax.tree.leaves(values), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize('encoding', ['f32', 'bf16', 'int8', 'int4'])
def test_differences_are_added_by_weight(place, process, encoding):
    weights = random_weights(0)
    pieces, size = written(place, held(weights, {'d': 8}, 2), encoding, process)
    (totals,) = held({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}, {'p': 2, 't': 4})
    assert add(place, pieces, totals, AUTHOR, np.float32(0.25)) == size
    for name, values in joined([totals], SHAPES).items():
        scale = np.abs(weights[name]).max(initial=0)
        tolerance = {'f32': 1e-7, 'bf16': scale * 2**-8, 'int8': scale / 250, 'int4': scale / 13}[encoding]
        np.testing.assert_allclose(values, 1 + 0.25 * weights[name], rtol=1e-6, atol=tolerance)


def test_the_residual_is_what_the_reader_lacks_on_every_process(place, process):
    weights, sizes = random_weights(0), {'r': 2, 'd': 2, 'e': 2}
    parts = held(weights, sizes, 2)
    residuals = [zeros_like(part) for part in parts]
    pieces, _ = written(place, parts, 'int4', process, residuals)
    (target,) = held(weights, {'t': 4, 'p': 2})
    read(place, pieces, target, AUTHOR)
    decoded = joined([target], SHAPES)
    for residual in (residuals, residuals[::-1]):  # parts that both hold are the same in both
        for name, values in joined(residual, SHAPES).items():
            np.testing.assert_allclose(values + decoded[name], weights[name], atol=1e-9)


def test_replicas_are_written_once(place, process):
    for sizes in ({'r': 8}, {'r': 2, 'd': 4}, {'d': 8}):
        _, size = written(place / str(sizes), held(random_weights(0), sizes, 2), 'f32', process)
        numbers = sum(np.size(values) for values in random_weights(0).values())
        objects = [path for path in (place / str(sizes)).rglob('*') if path.name.isdecimal() and path.is_file()]
        assert sum(path.stat().st_size for path in objects) == encoded_size(numbers, 'f32')
        assert size == sum(path.stat().st_size for path in (place / str(sizes)).rglob('*') if path.is_file())


def test_numbers_that_are_not_finite_are_not_written(place, process):
    weights = random_weights(0)
    weights['layers.norm'][3, 2] = np.nan
    with pytest.raises(NotFiniteError, match=r'layers\.norm: some numbers are not finite'):
        written(place, held(weights, {'d': 8}), 'bf16', process)
    assert not list(place.rglob('index.json'))


@pytest.fixture
def author(place, process):
    """Pieces of two processes in int8, and what reads them on another mesh."""
    pieces, _ = written(place, held(random_weights(0), {'p': 2, 't': 4}, 2), 'int8', process)
    targets = held(random_weights(1), {'d': 8}, 2)
    return place, pieces, targets


def refused(author, process):
    """Why all that read the pieces refuse them together: the first reason."""
    place, pieces, targets = author
    reasons = []
    for number, target in enumerate(targets):
        process(number)
        for use in (read, add):
            try:
                use(place, pieces, target, AUTHOR)
            except DamagedPiecesError as error:
                reasons.append(str(error))
    assert reasons
    assert all(reason.startswith(AUTHOR) for reason in reasons)
    return reasons[0]


def changed_listing(author, change, process_number=0):
    """Pieces whose index was changed by their author, so that all digests are right."""
    place, pieces, targets = author
    path = place / pieces[process_number].object
    listing = json.loads(path.read_bytes())
    del listing['xxh3']
    change(listing)
    ordered = json.dumps(listing, sort_keys=True, separators=(',', ':')).encode()
    content = json.dumps(listing | {'xxh3': xxhash.xxh3_128_hexdigest(ordered)}).encode()
    path.write_bytes(content)
    piece = pieces[process_number].model_copy(update={'size': len(content), 'xxh3': xxhash.xxh3_128_hexdigest(content)})
    return place, [*pieces[:process_number], piece, *pieces[process_number + 1 :]], targets


@pytest.mark.parametrize('at', ['0/0', '1/0', '0/index.json', '1/index.json'])
def test_a_damaged_or_missing_object_is_named_with_its_author(author, process, at):
    path = author[0] / f'rounds/7/b/token/{at}'
    content = path.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], b''):
        path.write_bytes(damaged)
        assert f'{at}: it differs from what was written' in refused(author, process)
    path.unlink()
    assert f'{at} is missing' in refused(author, process)
    path.write_bytes(content)
    assert read(author[0], author[1], author[2][0], AUTHOR) > 0


@pytest.mark.parametrize('key', ['0/0', '0/index.json'])
def test_of_an_object_that_is_too_large_no_more_is_read_than_it_should_have(author, process, key):
    process(0)
    with (author[0] / 'rounds/7/b/token' / key).open('r+b') as file:
        file.write(b'x')
        file.truncate(200 << 20)
    tracemalloc.start()
    try:
        assert key in refused(author, process)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_difference_with_numbers_that_are_not_finite_is_refused(author, process):
    """Its author has computed the digests after the numbers went wrong."""
    path = author[0] / 'rounds/7/b/token/0/0'
    content = bytearray(path.read_bytes())
    content[:2] = np.array([np.nan], ml_dtypes.bfloat16).tobytes()
    path.write_bytes(content)

    def change(listing):
        key = next(iter(listing['objects'][0]))
        name, _, _ = key.rpartition('/')
        first = slice(*listing['arrays'][name][0][:2])
        size = encoded_size((first.stop - first.start) * listing['arrays'][name][1][1], 'int8')
        listing['objects'][0][key] = xxhash.xxh3_128_hexdigest(content[:size])

    assert '0/0: some numbers are not finite' in refused(changed_listing(author, change), process)


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (lambda x: x['objects'][0].popitem(), 'no process has written'),
        (lambda x: x['objects'].clear(), 'no process has written'),
        (lambda x: x['arrays'].pop('embed'), 'embed'),
        (lambda x: x['arrays'].update(embed=[[0, 16], [0, 4]]), 'embed'),
        (lambda x: x['arrays'].update(embed=[[0, 9, 3, 16], [0, 8]]), 'embed is missing, or its grid is not one'),
        (lambda x: x['objects'][0].update({'embed/9.9': '0' * 32}), 'index out of range'),
        (lambda x: x['objects'][0].update({'other/0': '0' * 32}), 'other'),
        (lambda x: x['objects'][0].update({'embed/-1.0': '0' * 32}), '-1'),
        (lambda x: x.update(encoding='int4'), 'its arrays are not those'),
        (lambda x: x.update(encoding='fp4'), 'encoding'),
        (lambda x: x.update(format=2), 'format 2'),
    ],
)
def test_an_index_that_does_not_fit_is_refused(author, process, change, reason):
    assert reason in refused(changed_listing(author, change), process)


def test_the_pieces_of_a_process_that_are_left_out_are_missed(author, process):
    place, pieces, targets = author
    assert 'no process has written' in refused((place, pieces[:1], targets), process)
    assert 'no process has written' in refused((place, [], targets), process)


def test_the_same_mesh_reads_only_what_it_has_written(place, process):
    parts = held(random_weights(0), {'d': 8}, 2)
    written_by = [written(place, parts, 'f32', process)[0]]
    sizes = []
    for number, part in enumerate(parts):
        process(number)
        sizes.append(read(place, written_by[0], {'embed': part['embed']}, AUTHOR))
    index_sizes = [(place / piece.object).stat().st_size for piece in written_by[0]]
    assert sizes == [size + encoded_size(16 * 8 // 2, 'f32') for size in index_sizes]


@pytest.mark.parametrize('fails', ['/0/1$', '/index.json$'])
def test_a_write_that_failed_is_repeated(place, process, monkeypatch, fails):
    """The residual depends on the numbers only, not on how often they were sent."""
    monkeypatch.setattr(differences, '_OBJECT', 200)
    (weights,) = held(random_weights(0), {'d': 8})
    once, again = (zeros_like(weights) for _ in range(2))
    expected = write(place, 'rounds/7/b/one', weights, 'int4', once)
    attempts = []

    def write_bytes(path, content):
        if re.search(fails, str(path)) and not attempts:
            attempts.append(path)
            raise OSError(5, 'Input/output error', str(path))
        return original(path, content)

    original = SharedPath.write_bytes
    monkeypatch.setattr(SharedPath, 'write_bytes', write_bytes)
    with pytest.raises(OSError, match='Input/output error'):
        write(place, 'rounds/7/b/two', weights, 'int4', again)
    written_again = write(place, 'rounds/7/b/two', weights, 'int4', again)
    assert written_again.piece.xxh3 == expected.piece.xxh3
    for name, values in joined([once], SHAPES).items():
        np.testing.assert_array_equal(joined([again], SHAPES)[name], values)


def test_objects_in_a_bucket_are_read_in_parts(bucket, process, monkeypatch):
    monkeypatch.setattr(differences, '_CHUNK', 40)
    place = BucketPath(bucket.url) / 'federation'
    weights = random_weights(0)
    pieces, size = written(place, held(weights, {'d': 8}, 2), 'f32', process)
    targets = held(random_weights(1), {'p': 2, 't': 4}, 2)
    for number, target in enumerate(targets):
        process(number)
        assert read(place, pieces, target, AUTHOR) < size
    for name, values in joined(targets, SHAPES).items():
        np.testing.assert_array_equal(values, weights[name])
    content = bucket.content('federation/rounds/7/b/token/1/0')
    bucket.put('federation/rounds/7/b/token/1/0', content[: len(content) // 2])
    assert '1/0' in refused((place, pieces, targets), process)
    with bucket.down(), pytest.raises(BucketError):
        read(place, pieces, targets[0], AUTHOR)
