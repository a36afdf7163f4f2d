"""Which options of a model shape its weights, and which are free."""

from decoders import decoder_options
from pretrax.huggingface.configs import NOT_COMPUTED, compare
from pretrax.model.architecture import KEYS, resolve
from pretrax.weights.origin import FREE

# Options that decide which weights there are, their sizes or their meaning.
SHAPING = frozenset((
    'n_layers', 'd_model', 'attention.n_heads', 'attention.n_kv_heads', 'attention.d_head', 'attention.latent.kv_rank',
    'attention.latent.q_rank', 'attention.latent.d_nope', 'attention.latent.d_rope', 'feed_forward.d_ff', 'vocab_size',
    'padded_vocab_size', 'max_sequence_length', 'norm.kind', 'norm.offset', 'block.norms', 'block.parallel',
    'block.shared_norm',
    'attention.global_d_head', 'attention.global_n_kv_heads', 'attention.global_k_as_v', 'attention.v_norm',
    'block.layer_scale', 'attention.qk_norm',
    'positions', 'layer_types', 'attention.sinks', 'attention.gate', 'recurrent.n_heads',
    'recurrent.n_key_heads',
    'recurrent.d_head', 'recurrent.d_key', 'recurrent.conv_width', 'recurrent.conv_bias', 'feed_forward.activation',
    'attention.qkv_bias', 'attention.o_bias', 'feed_forward.bias', 'norm.bias',
    'head.bias', 'embedding.tied', 'experts.n_experts', 'experts.experts_per_token', 'experts.dense_layers',
    'experts.every', 'experts.d_ff_dense', 'experts.d_shared',
    'experts.shared_gate', 'experts.router.scores', 'experts.router.bias', 'experts.router.n_groups',
    'experts.router.groups_per_token', 'experts.router.group_scores', 'experts.router.normalize',
    'experts.router.weigh_inputs',
))  # fmt: skip


def test_every_option_of_the_architecture_is_free_or_shapes_weights_or_is_not_computed():
    """A new field of Architecture needs a decision here, and in `configs.compare`."""
    assert not FREE & SHAPING
    assert not (FREE | SHAPING) & set(NOT_COMPUTED)
    assert {*KEYS} == FREE | SHAPING | set(NOT_COMPUTED)


def test_one_decoder_written_in_two_ways_is_the_same():
    def arch(**more):
        options = {'n_layers': 4, 'd_model': 16, 'n_heads': 2, 'n_experts': 4, **more}
        return resolve(decoder_options(**options), 128, 16)

    assert compare(arch(expert_every=2), arch(dense_layers=(0, 2)), '', '') == {}
    assert compare(arch(group_scores='max'), arch(group_scores='top2'), '', '') == {}
    assert set(compare(arch(expert_every=2), arch(dense_layers=(0, 1)), '', '')) == {
        'experts.dense_layers',
        'experts.every',
    }
