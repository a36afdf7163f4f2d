"""Layers that differ, in stacks of weights: which layer gets which slice."""

import numpy as np
import pytest

from pretrax.model.stack import Segment, Stack, segments

DENSE, EXPERTS = {'norm1', 'up'}, {'norm1', 'router'}


@pytest.mark.parametrize(
    ('layers', 'found'),
    [
        ('aaaa', [(0, 1, 4)]),
        ('wwwgwwwgww', [(0, 4, 2), (8, 1, 2)]),
        ('dddmmmm', [(0, 1, 3), (3, 1, 4)]),
        ('lllglllg', [(0, 4, 2)]),
        ('abc', [(0, 3, 1)]),
        ('abbbbc', [(0, 1, 1), (1, 1, 4), (5, 1, 1)]),
        ('ababbb', [(0, 2, 2), (4, 1, 2)]),
        ('a', [(0, 1, 1)]),
    ],
)
def test_layers_are_cut_into_repetitions(layers, found):
    assert segments(layers) == found


@pytest.mark.parametrize('names', ['ddeeee', 'dedededd', 'edd', 'eeee'])
def test_a_layer_gets_the_weights_that_count_the_layers_before_it(names):
    kinds = [EXPERTS if name == 'e' else DENSE for name in names]
    numbers = {
        'norm1': np.arange(len(names)),
        'up': np.array([i for i, name in enumerate(names) if name == 'd']),
        'router': np.array([i for i, name in enumerate(names) if name == 'e']),
    }  # the number of its layer in the place of each weight
    stack = Stack({name: w[:, None] for name, w in numbers.items()}, kinds)
    expected = [{'norm1': [i], 'router' if name == 'e' else 'up': [i]} for i, name in enumerate(names)]
    assert [stack.layer(i) for i in range(len(names))] == expected
    looped = []
    for segment in segments(kinds):
        cycles = stack.cycles(segment)
        for n in range(segment.repeats):
            cycle = {name: w[n] for name, w in cycles.items()}
            looped += [stack.cycle_layer(segment, i, cycle) for i in range(segment.length)]
    assert looped == expected


def test_a_stack_that_one_segment_needs_whole_is_not_copied():
    w = np.zeros((6, 3))
    assert Stack({'norm1': w}, [DENSE] * 6).cycles(Segment(0, 1, 6))['norm1'] is w
