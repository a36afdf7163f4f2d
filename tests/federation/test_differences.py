"""Numbers that one mesh writes and another one reads, and damage on the way."""

import jax
import numpy as np
import pytest

from host_parts import LAYERS, MESHES, SHAPES, held, joined, random_weights
from pretrax.federation import differences
from pretrax.federation.differences import add, check, read, write
from pretrax.federation.encoding import NotFiniteError, encoded_size
from pretrax.federation.fragments import fragments, numbers_in
from pretrax.federation.host_weights import select, zeros_like
from pretrax.storage.shared_path import SharedPath

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
        targets = held({name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}, reader, n_readers)
        for i, target in enumerate(targets):
            process(i)
            assert check(here, pieces, select(target, fragment), AUTHOR) > 0
            read(here, pieces, select(target, fragment), AUTHOR)
        for name, values in joined(targets, SHAPES).items():
            inside = ~np.isnan(values)
            np.testing.assert_array_equal(values[inside], weights[name][inside])
        assert sum((~np.isnan(v)).sum() for v in joined(targets, SHAPES).values()) == numbers_in(fragment, SHAPES)


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
        _, size = written(place / str(sizes), held(random_weights(0), sizes), 'f32', process)
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
