"""Every number of the weights is in exactly one fragment."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_parts import numbers_in
from pretrax.errors import UserError
from pretrax.federation.fragments import fragments

DECODER = {'embed': (50, 8), 'layers.q': (6, 8, 8), 'layers.norm1': (6, 8), 'norm': (8,), 'unembed': (50, 8)}
LAYERS = {'layers.q': range(6), 'layers.norm1': range(6)}


def counts(shapes, divided):
    """How many fragments each number is in."""
    found = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for fragment in divided:
        for name, runs in fragment.items():
            for start, stop in runs or ((None, None),):
                found[name][(slice(start, stop), ...) if found[name].ndim else ...] += 1
    return found


@given(count=st.integers(1, 6), n_layers=st.integers(6, 9))
def test_every_number_is_in_one_fragment(count, n_layers):
    shapes = DECODER | {'layers.q': (n_layers, 8, 8), 'scale': ()}
    divided = fragments(shapes, count, {'layers.q': range(n_layers), 'layers.norm1': range(6)})
    assert all((found == 1).all() for found in counts(shapes, divided).values())
    assert sum(numbers_in(fragment, shapes) for fragment in divided) == sum(map(math.prod, shapes.values()))


def test_layers_are_strided_and_the_tables_apart():
    first, second = fragments(DECODER, 2, LAYERS)
    assert first['layers.q'] == first['layers.norm1'] == ((0, 1), (2, 3), (4, 5))
    assert second['layers.q'] == ((1, 2), (3, 4), (5, 6))
    assert ('embed' in first, 'unembed' in second) == (True, True)


def test_one_fragment_is_everything():
    assert fragments(DECODER, 1, LAYERS) == [dict.fromkeys(DECODER)]


def test_rows_follow_the_layers_that_have_the_weight():
    """In a hybrid, the rows of a weight count the layers that have it."""
    shapes = {'layers.q': (2, 8), 'layers.conv': (4, 8)}
    first, second, third = fragments(shapes, 3, {'layers.q': (2, 5), 'layers.conv': (0, 1, 3, 4)})
    assert first == {'layers.conv': ((0, 1), (2, 3))}
    assert second == {'layers.conv': ((1, 2), (3, 4))}
    assert third == {'layers.q': ((0, 1), (1, 2))}


def test_layers_in_names_and_arrays_without_layers():
    shapes = {'blocks.0.w': (4,), 'blocks.1.w': (4,), 'blocks.2.w': (4,), 'table': (100,), 'head': (90,), 'bias': (5,)}
    first, second = fragments(shapes, 2)
    assert set(first) == {'blocks.0.w', 'blocks.2.w', 'head', 'bias'}
    assert set(second) == {'blocks.1.w', 'table'}


def test_a_weight_with_a_number_in_its_name_is_not_stacked():
    """As those of an NNX module with a list of layers."""
    shapes = {f'layers.{layer}.up.kernel': (8, 32) for layer in range(4)}
    first, second = fragments(shapes, 2, {name: range(8) for name in shapes})
    assert first == {'layers.0.up.kernel': None, 'layers.2.up.kernel': None}
    assert second == {'layers.1.up.kernel': None, 'layers.3.up.kernel': None}


def test_too_many_fragments_are_refused():
    with pytest.raises(UserError, match=r'federation\.fragments=6'):
        fragments(DECODER, 6, LAYERS | {'layers.q': [0] * 6, 'layers.norm1': [0] * 6})
