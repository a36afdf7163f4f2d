"""The scope and the phase of an operation, from its path."""

import pytest

from pretrax.hlo.scopes import place_of


@pytest.mark.parametrize(
    ('path', 'scope', 'phase'),
    [
        ('jit(f)/jit(per_device)/gradients/jvp(layer_0)/block/norm/mul', ('layer_0', 'norm'), 'forward'),
        ('jit(f)/gradients/transpose(jvp(layer_1))/block/attention/attend/div', ('layer_1', 'attention', 'attend'),
        'backward'),
        ('jit(f)/gradients/transpose(gradients)/jvp(loss)/cross_entropy/ab,bc->ac/dot', ('loss', 'cross_entropy'),
        'backward'),
        ('jit(f)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/rematted_computation/block/norm/mul', ('layer',
        'norm'), 'recomputation'),
        ('jit(f)/gradients/transpose(jvp(layer_3))/block/feed_forward/gradients/jvp(layer_3)/block/feed_forward/checkpoint/mul', ('layer_3', 'feed_forward'), 'backward'),
        ('jit(f)/gradients/jvp(embed)/jit(_take)/gather', ('embedding',), 'forward'),
        ('jit(f)/optimizer/jit(clip)/min', ('optimizer',), 'update'),
        ('jit(f)/shard_map/gradients/gradient_reduction/psum', ('gradient_reduction',), 'backward'),
        ('jit(f)/add', ('metrics',), 'update'),
        ('state.optimizer.mu.layers.q', ('optimizer state',), 'input'),
    ],
)  # fmt: skip
def test_the_place_of_an_operation_follows_from_its_path(path, scope, phase):
    assert place_of(path) == (scope, phase)


def test_a_path_of_one_word_says_nothing():
    assert place_of('reduce_sum') is None
