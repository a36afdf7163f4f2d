"""Digests see every change, and say which device sent what."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import AxisType

from pretrax.shardlib import all_gather, axis_index, f32, psum, psum_scatter, typed_shard_map
from pretrax.shardlib.digests import MIXED, MOVES, OWN, Digested, Loop, digest, digest_sent, labels_of, name_of

DTYPES = ['float32', 'bfloat16', 'float16', 'float8_e4m3fn', 'int32', 'uint8', 'int8']


@hypothesis.settings(max_examples=40)
@hypothesis.given(strategies.data(), strategies.sampled_from(DTYPES))
def test_every_flipped_bit_and_every_exchange_of_elements_changes_a_digest(data, dtype):
    shape = tuple(data.draw(strategies.lists(strategies.integers(1, 5), min_size=1, max_size=3)))
    size = jnp.dtype(dtype).itemsize
    words = np.random.default_rng(0).integers(0, 256, (*shape, size), dtype=np.uint8)

    def of(words):
        return digest(jnp.asarray(words.view(jnp.dtype(dtype))[..., 0])).item()

    before, flat = of(words), words.reshape(-1)
    byte, bit = data.draw(strategies.integers(0, flat.size - 1)), data.draw(strategies.integers(0, 7))
    flipped = flat.copy()
    flipped[byte] ^= 1 << bit
    assert of(flipped.reshape(words.shape)) != before
    rows = flat.reshape(-1, size)
    a, b = (data.draw(strategies.integers(0, len(rows) - 1)) for _ in range(2))
    if not np.array_equal(rows[a], rows[b]):
        exchanged = rows.copy()
        exchanged[[a, b]] = rows[[b, a]]
        assert of(exchanged.reshape(words.shape)) != before


def test_rows_have_digests_of_their_own():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    changed = x.copy()
    changed[1, 2] = np.nextafter(changed[1, 2], 9)
    same = np.asarray(digest(x, by_row=True)) == np.asarray(digest(changed, by_row=True))
    assert same.tolist() == [True, False, True]


@typed_shard_map
def layers(w: f32['N M/d'], x: f32['B/d M']) -> tuple[f32['M/d'], f32['']]:
    def layer(x, w):
        whole = all_gather('M/d -> M', w)
        x = x * whole
        return x, psum_scatter('M -> M/d', jnp.sum(x, axis=0))

    x, sums = jax.lax.scan(layer, x, w)
    mean = psum('d', jnp.sum(x))
    return jnp.sum(sums, axis=0), psum('d', mean * jnp.sum(x) * (1.0 + axis_index('d')))


@pytest.fixture(scope='module')
def sent():
    """Digests of that function for two batches, and with the batch moved ahead."""
    mesh = jax.make_mesh((4,), ('d',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    places = []

    def run(ahead, w, x):
        digests, places[:] = digest_sent(layers, (w, x), {}, moving=((False, True), {}), axis='d', ahead=ahead)
        return digests

    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 8), (8, 8)))
    program = jax.jit(run)

    def call(ahead=False, w=w, x=x):
        with jax.set_mesh(mesh):
            return np.asarray(program(np.bool_(ahead), w, x))

    return call, places, w, x


def test_places_are_in_the_order_of_the_program_and_have_names(sent):
    run, places, *_ = sent
    count = run().shape[1]
    assert count == len(labels_of(places))
    names = [name_of(places, number) for number in range(count)]
    ends = {0: ('all_gather over d', 'turn 1 of 3'), 5: ('reduce_scatter over d', 'turn 3 of 3')}
    assert all(names[i].startswith(first) and names[i].endswith(last) for i, (first, last) in ends.items())
    assert [name.split()[0] for name in names[6:]] == ['psum_invariant', 'psum_invariant', 'the', 'the']
    with pytest.raises(IndexError):
        name_of(places, count)
    assert name_of([Loop(2, [Digested('a', 0), Loop(3, [Digested('b', 0)])])], 7) == 'b, turn 3 of 3, turn 2 of 2'


def test_the_first_digest_that_differs_is_that_of_the_device_whose_input_differs(sent):
    run, _, w, x = sent
    before = run()
    changed = x.copy()
    changed[5, 3] += 1  # of device 2, which has rows 4 and 5
    differ = before != run(x=changed)
    assert differ[:, 1].tolist() == [False, False, True, False]
    assert not differ[:, 0].any()
    changed = w.copy()
    changed[1, 7] += 1  # of device 3, in the second layer
    differ = before != run(w=changed)
    assert not differ[:, :2].any()
    assert differ[:, 2].tolist() == [False, False, False, True]


def test_labels_say_what_a_moved_batch_changes(sent):
    run, places, *_ = sent
    labels, before, ahead = labels_of(places), run(), run(ahead=True)
    assert labels.tolist() == [OWN, MOVES] * 3 + [MOVES, MOVES | OWN, MIXED, MIXED]
    moves, stays = ahead == np.roll(before, 1, axis=0), ahead == before
    assert moves[:, labels == MOVES].all()
    assert stays[:, labels == OWN].all()
    assert not (stays | moves)[:, labels == MOVES | OWN].any()
