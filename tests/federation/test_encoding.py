"""Encoded numbers: their sizes, how far they are from what was encoded, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pretrax.federation.encoding import BLOCK, NotFiniteError, decode, encode, encoded_size, keeps_residual

ENCODINGS = ('f32', 'bf16', 'int8', 'int4')
LARGEST = {'int8': 127, 'int4': 7}
NUMBERS = arrays.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
)


def round_trip(values, encoding, residual=None):
    content, left = encode(values, encoding, residual)
    assert content.nbytes == encoded_size(values.size, encoding)
    return decode(content.tobytes(), encoding, values.size), left


def errors_allowed(values, encoding):
    """The largest error of each number that the definition of an encoding allows."""
    if encoding == 'f32':
        return np.zeros(values.shape)
    if encoding == 'bf16':
        return np.abs(values) * 2.0**-8
    blocks = np.zeros(-(-values.size // BLOCK) * BLOCK)
    blocks[: values.size] = np.abs(values)
    peak = np.repeat(blocks.reshape(-1, BLOCK).max(axis=1), BLOCK)[: values.size]
    scale = peak / LARGEST[encoding] * (1 + 2.0**-7)  # rounded up to bf16
    return scale / 2 * (1 + 2.0**-20) + LARGEST[encoding] * 2.0**-126  # smaller scales are 0


@example(values=np.zeros(0, np.float32), encoding='int8')
@example(values=np.zeros(0, np.float32), encoding='int4')
@given(values=NUMBERS, encoding=st.sampled_from(ENCODINGS))
def test_the_error_is_within_the_definition_of_the_encoding(values, encoding):
    decoded, _ = round_trip(values, encoding)
    assert (np.abs(decoded.astype(float) - values) <= errors_allowed(values, encoding)).all()


@pytest.mark.parametrize('encoding', ['int8', 'int4'])
def test_scales_are_normal_numbers(encoding):
    """Some machines compute with subnormal numbers as with 0. What is too small is sent later."""
    values = np.full(BLOCK, 1e-38, np.float32)
    decoded, left = round_trip(values, encoding)
    assert not decoded.any()
    np.testing.assert_array_equal(left, values)


@given(values=NUMBERS)
def test_bf16_is_rounded_as_ml_dtypes_does(values):
    decoded, _ = round_trip(values, 'bf16')
    np.testing.assert_array_equal(decoded, values.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize('encoding', ['int8', 'int4'])
def test_what_is_sent_and_the_residual_are_what_was_to_be_sent(encoding):
    """Error feedback: after many rounds, the sum of what was sent is the true sum but for the last residual."""
    random = np.random.default_rng(0)
    sent, wanted, residual = 0.0, 0.0, np.zeros((7, 333), np.float32)
    for _ in range(50):
        values = random.normal(0, 1e-3, (7, 333)).astype(np.float32)
        decoded, residual = round_trip(values, encoding, residual)
        assert residual is not None
        sent, wanted = sent + decoded.reshape(7, 333), wanted + values
    np.testing.assert_allclose(sent + residual, wanted, atol=1e-7)
    assert np.abs(residual).max() < 1e-3


@pytest.mark.parametrize('encoding', ENCODINGS)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('at', [0, 70, 40_000])
def test_numbers_that_are_not_finite_are_refused(encoding, bad, at):
    values = np.ones(40_001, np.float32)
    values[at] = bad
    with pytest.raises(NotFiniteError):
        encode(values, encoding)


@pytest.mark.parametrize(('encoding', 'dtype'), [('f32', '<f4'), ('bf16', ml_dtypes.bfloat16)])
def test_encoded_numbers_that_are_not_finite_are_refused(encoding, dtype):
    with pytest.raises(NotFiniteError):
        decode(np.array([1, np.nan], dtype).tobytes(), encoding, 2)


@pytest.mark.parametrize('encoding', ['int8', 'int4'])
def test_scales_that_are_not_finite_are_refused(encoding):
    content, _ = encode(np.ones(100, np.float32), encoding)
    content[2:4] = np.array([np.inf], ml_dtypes.bfloat16).view(np.uint8)  # of the second block
    with pytest.raises(NotFiniteError):
        decode(content.tobytes(), encoding, 100)


def test_numbers_too_large_for_bf16_are_refused():
    with pytest.raises(NotFiniteError):
        encode(np.array([np.finfo(np.float32).max]), 'bf16')


def test_content_of_another_size_is_refused():
    content, _ = encode(np.ones(100, np.float32), 'int8')
    with pytest.raises(ValueError, match='131 bytes, not 132'):
        decode(content[:-1].tobytes(), 'int8', 100)


def test_only_integers_keep_a_residual():
    assert [encoding for encoding in ENCODINGS if keeps_residual(encoding)] == ['int8', 'int4']
    assert [encode(np.ones(3, np.float32), encoding)[1] is not None for encoding in ENCODINGS] == [
        False, False, True, True,
    ]  # fmt: skip
