"""Presets have the published sizes, and choices that do not fit together are refused in words."""

import contextlib
import re
from pathlib import Path

import jax
import pytest

from decoders import decoder_options
from pretrax.errors import UserError
from pretrax.model.architecture import resolve
from pretrax.model.choices import presets
from pretrax.model.families import FAMILY_NAMES, PRESET_NAMES
from pretrax.model.option_names import RENAMED
from pretrax.model.weights import layers_with
from published import ABOUT, PUBLISHED
from small import LATENT, LLAMA, MIXTURE, count_parameters, mesh_of, transformer


def test_the_names_of_presets_are_those_of_the_table():
    assert (*presets(),) == PRESET_NAMES


@pytest.mark.parametrize('preset', PRESET_NAMES)
def test_parameters_as_published(preset):
    count = count_parameters({'preset': preset}, vocab_size=1000, length=1024)
    if preset in ABOUT:
        expected, tolerance = ABOUT[preset]
        assert count == pytest.approx(expected, rel=tolerance)
    else:
        assert count == PUBLISHED[preset]


def test_parameters_of_matrix_products():
    """Llama 2 7B: all of its parameters but the embedding and the norms (Touvron et al. 2023)."""
    arch = resolve(decoder_options(preset='llama2-7b'), 32000, 4096)
    norms = (2 * 32 + 1) * 4096
    assert arch.n_matmul_params == 6_738_415_616 - 32000 * 4096 - norms


@pytest.mark.parametrize(
    ('preset', 'active', 'tolerance'),
    # Jiang et al. 2024, section 1; the others' names: Qwen count without the embedding (57b) or round (3.3 to 3)
    # DeepSeek-AI 2024, arXiv:2405.04434 (V2: 21B; Lite: 2.4B), arXiv:2412.19437; Kimi Team 2025, arXiv:2507.20534
    [('deepseek-v2-lite', 2.4e9 + 102400 * 2048, 0.05), ('deepseek-v2', 21.4e9, 0.01), ('deepseek-v3', 37e9, 0.02),
    ('kimi-k2', 32.6e9, 0.02),
     # GLM-4.5 Team 2025, arXiv:2508.06471, table 1, without embeddings; MiniMax-M2's card: 10B
     ('glm4.5', 32e9 + 2 * 151552 * 5120, 0.01), ('glm4.5-air', 12e9 + 2 * 151552 * 4096, 0.02),
     ('minimax-m2', 10e9 + 2 * 200064 * 3072, 0.02),
     ('olmoe-1b-7b', 1.3e9, 0.02), ('mixtral-8x7b', 12.9e9, 0.005), ('qwen2-57b-a14b', 14.2e9, 0.005),
     ('qwen3-235b-a22b', 22.2e9, 0.005),
     ('moonlight-16b-a3b', 2.24e9 + 2 * 163840 * 2048, 0.01), ('qwen3-30b-a3b', 3.3e9, 0.02), ('qwen1.5-moe-a2.7b',
     2.7e9, 0.01), ('mixtral-8x22b', 39e9, 0.005)],
)  # fmt: skip
def test_parameters_per_token(preset, active, tolerance):
    """The experts that a token uses. FLOPs are computed from these, without embeddings and norms."""
    arch = transformer({'preset': preset}, vocab_size=1000, length=1024).arch
    with jax.set_mesh(mesh_of()):
        weights = transformer({'preset': preset}, vocab_size=1000, length=1024).abstract()
    everything = sum(w.size for w in jax.tree.leaves(weights))
    assert everything - arch.n_idle_params == pytest.approx(active, rel=tolerance)
    small = {'norm1', 'norm2', 'norm', 'q_norm', 'k_norm', 'q_bias', 'k_bias', 'v_bias', 'embed'}
    small |= {'q_full_norm', 'k_full_norm', 'kv_a_norm', 'q_a_norm', 'router_bias'}
    named = jax.tree_util.tree_leaves_with_path(weights)
    padding = (arch.padded_vocab_size - arch.vocab_size) * arch.d_model
    products = sum(w.size for path, w in named if path[-1].name not in small) - padding
    assert arch.n_matmul_params == products - arch.n_idle_params


@pytest.mark.parametrize(('preset', 'active'), [('gpt-oss-20b', 3.61e9), ('gpt-oss-120b', 5.13e9)])
def test_parameters_per_token_of_experts_with_biases(preset, active):
    """OpenAI 2025, arXiv:2508.10925, table 1, which leaves out the embedding."""
    arch = resolve(decoder_options(preset=preset), 201088, 1024)
    assert PUBLISHED[preset] - 201088 * 2880 - arch.n_idle_params == pytest.approx(active, rel=0.003)


def test_without_experts_a_preset_is_dense():
    arch = resolve(decoder_options(preset='mixtral-8x7b', n_experts=0), 1000, 64)
    assert (arch.experts.n_experts, arch.experts.router.balance_loss, arch.n_idle_params) == (0, 0.0, 0)


def test_a_preset_can_be_overridden():
    arch = resolve(decoder_options(preset='gpt2-124m', n_layers=6, tied=False), 50257, 512)
    assert (arch.n_layers, arch.embedding.tied, arch.d_model, arch.norm.kind) == (6, False, 768, 'layernorm')


def test_sizes_left_out_follow_from_the_others():
    arch = resolve(decoder_options(n_layers=1, d_model=512, n_heads=8), 1000, 64)
    assert (arch.attention.d_head, arch.attention.n_kv_heads) == (64, 8)
    assert arch.feed_forward.d_ff == 1408  # 8/3 of 512 is 1365.3, up to a multiple of 64
    assert (arch.vocab_size, arch.padded_vocab_size) == (1000, 1024)


SIZES = {'n_layers': 1, 'd_model': 32, 'n_heads': 4}
GLOBAL = SIZES | {'n_layers': 2, 'window': 4, 'global_every': 2, 'attention.global_d_head': 16}


@pytest.mark.parametrize('d_head', [2, 6, 14, 80, 96, 98, 128, 254])
@pytest.mark.parametrize('fraction', [0.001, 0.011, 0.3, 0.49, 0.77])
def test_a_proposed_rotary_fraction_works(d_head, fraction):
    with contextlib.suppress(ValueError):
        decoder_options(**SIZES, d_head=d_head, rotary_fraction=fraction)
        return
    with pytest.raises(ValueError, match=r'model\.rope\.fraction') as error:
        decoder_options(**SIZES, d_head=d_head, rotary_fraction=fraction)
    proposed = float(re.search(r'use model.rope.fraction=([\d.]+)', str(error.value))[1])
    assert proposed > fraction
    decoder_options(**SIZES, d_head=d_head, rotary_fraction=proposed)


@pytest.mark.parametrize('family', ['gemma2', 'gemma3', 'gemma4', 'olmo3', 'gpt-oss', 'cohere2', 'llama4'])
def test_a_window_of_zero_turns_off_the_windows_of_a_family(family):
    arch = resolve(decoder_options(**SIZES | {'n_layers': 4}, family=family, window=0), 100, 16)
    assert not any(arch.windows)
    assert [kind.rope_base is None for kind in arch.kinds] == [
        False,
        False,
        False,
        family == 'llama4',
    ]  # by `nope_every`


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'preset': 'gpt3'}, "there is no 'gpt3'"),
        ({'d_model': 32}, 'n_layers, attention.n_heads missing'),
        (SIZES | {'n_heads': 5}, 'd_model = 32 is not divisible by model.attention.n_heads = 5'),
        (SIZES | {'n_kv_heads': 3}, 'model.attention.n_heads = 4 is not divisible by model.attention.n_kv_heads = 3'),
        (SIZES | {'d_head': 7}, 'model.attention.d_head = 7 is odd'),
        (
            SIZES | {'attention.global_d_head': 16},
            'model.attention.global_d_head = 16 applies to layers without a window',
        ),
        (GLOBAL | {'attention.global_n_kv_heads': 3}, r'n_heads = 4 is not divisible by .*global_n_kv_heads = 3'),
        (GLOBAL | {'attention_sinks': True}, 'model.attention.sinks = True does not fit layers without a window'),
        (SIZES | {'rotary_fraction': 0.4}, r'model.rope.fraction = 0.4 rotates 3 of 8 .*\nuse model.rope.fraction=0.5'),
        (SIZES | {'rotary_fraction': 0.1}, r'rotates 0 of 8 .*\nuse model.rope.fraction=0.25'),
        (SIZES | {'norm_bias': True}, 'model.norm.bias = true: rmsnorm has no bias'),
        (SIZES | {'shared_norm': True}, 'share a norm only if they run in parallel'),
        (SIZES | {'family': 'stablelm', 'block_norms': 'post'}, 'norms after attention and feed-forward have no bias'),
        (
            SIZES | {'global_every': 2},
            'model.attention.global_every = 2 exempts layers from a window, but there is none',
        ),
        (SIZES | {'family': 'gpt2', 'block_norms': 'sandwich'}, 'norms after attention and feed-forward have no bias'),
        (SIZES | {'capacity': 1.5}, 'model.experts.capacity = 1.5 applies to experts, but there are none'),
        (SIZES | {'n_experts': 1}, 'at least 2 experts'),
        (
            SIZES | {'n_experts': 4, 'experts_per_token': 5},
            'model.experts.n_experts = 4 with model.experts.experts_per_token = 5',
        ),
        (
            SIZES | {'n_experts': 4, 'activation': 'gelu'},
            'model.feed_forward.activation = gelu: experts always have a gate',
        ),
        (MIXTURE | {'mlp_bias': True}, 'model.feed_forward.bias = true: a shared expert has no biases here'),
        (SIZES | {'n_experts': 4, 'shared_gate': True}, 'there is no shared expert'),
        (SIZES | {'n_experts': 4, 'router_bias_rate': 0.1}, 'moves the biases of routers, but there are none'),
        (
            SIZES | {'n_experts': 4, 'n_expert_groups': 3},
            'model.experts.n_experts = 4 is not divisible by model.experts.router.n_groups = 3',
        ),
        (
            SIZES | {'n_experts': 4, 'groups_per_token': 2},
            'model.experts.router.groups_per_token = 2 of model.experts.router.n_groups = 1',
        ),
        (SIZES | {'n_experts': 4, 'n_expert_groups': 4}, '1 of 4 groups have 1 experts'),
        (SIZES | {'q_rank': 8}, 'model.attention.latent.q_rank = 8 belongs to latent attention, but there is none'),
        (SIZES | {'kv_rank': 8, 'n_kv_heads': 2}, 'model.attention.n_kv_heads = 2 does not fit latent attention'),
        (SIZES | {'kv_rank': 8, 'window': 3}, 'model.attention.window = 3 does not fit latent attention'),
        (SIZES | {'kv_rank': 8, 'd_rope': 3}, 'model.attention.latent.d_rope = 3 is odd'),
        (SIZES | {'rope_scaling': {'kind': 'llama3', 'low_freq_factor': 5}}, 'low_freq_factor 5.0 is above'),
        (SIZES | {'window_type': 'chunked'}, 'model.attention.window_type = chunked, but there is no window'),
        (SIZES | {'attention_temperature': 0.1}, 'applies to layers without positions, and all have them'),
        (SIZES | {'temperature_length': 4}, 'model.attention.temperature_length = 4, but there is no temperature'),
        (SIZES | {'weigh_inputs': True}, 'model.experts.router.weigh_inputs = True applies to experts'),
        (
            SIZES | {'n_experts': 4, 'weigh_inputs': True, 'mlp_bias': True},
            'experts whose inputs are weighed have no biases',
        ),
        (
            SIZES | {'kv_rank': 8, 'nope_every': 1, 'attention_temperature': 0.1},
            'model.attention.temperature = 0.1 does not fit latent',
        ),
        (SIZES | {'layer_types': ()}, 'layer_types has 0 entries'),
        (SIZES | {'layer_types': ('full',) * 99}, 'layer_types has 99 entries'),
        (SIZES | {'layer_types': ('window',)}, 'gives layers a window, but there is none'),
        (
            SIZES | {'window': 4, 'layer_types': ('full',)},
            'model.attention.window = 4, and model.layer_types gives no layer a window',
        ),
        (LLAMA | {'window': 4, 'global_every': 2, 'layer_types': ('window', 'full')}, 'leave out one of them'),
        (
            SIZES | {'layer_types': ('delta',), 'n_heads': None},
            '2 model.d_model = 64 is not divisible by model.recurrent.d_head = 128',
        ),
        (
            SIZES | {'family': 'mamba2', 'layer_types': ('full',)},
            'layers without a feed-forward, .*\ngive model.feed_forward.d_ff',
        ),
        (
            SIZES | {'conv_width': 3},
            'model.recurrent.conv_width = 3 applies to delta nets and state-space models, but there are none',
        ),
        (
            SIZES | {'n_experts': 4, 'd_ff': 0},
            'model.experts.n_experts = 4 with model.feed_forward.d_ff = 0: experts without a width',
        ),
        (SIZES | {'dense_layers': 1}, 'model.experts.dense_layers = 1 applies to experts, but there are none'),
        (MIXTURE | {'dense_layers': 2}, 'leave none of the 2 layers with experts'),
        (MIXTURE | {'dense_layers': (2,)}, 'names layer 2, and the layers are 0 to 1'),
        (MIXTURE | {'expert_every': 3}, 'leave none of the 2 layers with experts'),
        (MIXTURE | {'d_ff_dense': 8}, 'model.experts.d_ff_dense is the width of layers without experts'),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        decoder_options(**options)


# A value that the configuration may say, of each option that applies to attention only
OF_ATTENTION = {
    'n_heads': 4, 'n_kv_heads': 2, 'd_head': 8, 'attention_dropout': 0.1, 'kv_rank': 8, 'q_rank': 8, 'd_rope': 4,
    'd_nope': 4,
    'qk_norm': 'head', 'qkv_bias': True, 'o_bias': True, 'rope_base': 5e5, 'local_rope_base': 1e4,
    'rope_scaling': {'kind': 'linear', 'factor': 2.0}, 'rotary_fraction': 0.5, 'nope_every': 2, 'nope_global': True,
    'window': 4, 'window_type': 'chunked', 'global_every': 2, 'query_pre_attn_scalar': 9.0,
    'attention_temperature': 0.1,
    'temperature_length': 16, 'attention_softcap': 30.0, 'attention_gate': True, 'attention_sinks': True,
}  # fmt: skip
MAMBA = {'family': 'mamba2', 'n_layers': 2, 'd_model': 32, 'linear_d_head': 8, 'linear_d_key': 8}


@pytest.mark.parametrize('option', OF_ATTENTION)
def test_an_option_of_attention_is_refused_if_no_layer_has_attention(option):
    with pytest.raises(
        ValueError, match=f'model.{RENAMED[option]} = .* applies to attention, but no layer uses attention'
    ):
        decoder_options(**MAMBA, **{option: OF_ATTENTION[option]})


@pytest.mark.parametrize(
    ('options', 'option'),
    [
        (MAMBA | {'mlp_bias': True}, 'mlp_bias'),
        (MAMBA | {'parallel_block': True}, 'parallel_block'),
        (MAMBA | {'bias': True}, 'bias'),
        (SIZES | {'d_ff': 0, 'parallel_block': True}, 'parallel_block'),
    ],
)
def test_an_option_of_the_feed_forward_is_refused_if_layers_have_none(options, option):
    with pytest.raises(
        ValueError, match=f'model.{RENAMED.get(option, option)} applies to the feed-forward, but layers have none'
    ):
        decoder_options(**options)


def test_layer_types_without_a_window_turn_off_the_window_of_a_family():
    arch = resolve(decoder_options(**SIZES, family='llama4', layer_types=('full',)), 100, 16)
    assert (arch.attention.window, arch.attention.window_type) == (0, 'sliding')


def test_learned_positions_of_a_state_space_model_are_reported():
    arch = resolve(decoder_options(**MAMBA, positions='learned'), 100, 16)
    assert 'learned' in arch.describe()
    assert 'learned' not in resolve(decoder_options(**MAMBA), 100, 16).describe()


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (SIZES | {'family': 'gpt2', 'max_sequence_length': 8}, 'sequence_length = 16 exceeds'),
    ],
)
def test_options_that_do_not_fit_the_data_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        resolve(decoder_options(**options), 100, 16)


@pytest.mark.parametrize(
    ('options', 'length', 'mesh', 'message'),
    [
        (LLAMA, 16, (1, 1, 8), r'model.attention.n_heads = 4 is not divisible by mesh.t = 8\nuse mesh.t=2'),
        (LLAMA, 16, (1, 1, 4), r'model.attention.n_kv_heads = 2 is not divisible by mesh.t = 4\nuse mesh.t=2'),
        (LLAMA | {'d_ff': 49}, 16, (1, 1, 2),
        r'model.feed_forward.d_ff = 49 is not divisible by mesh.t = 2\nuse mesh.t=1'),
        (LLAMA, 15, (1, 1, 2), r'batch.sequence_length = 15 is not divisible by mesh.t = 2\nuse mesh.t=1'),
        (MIXTURE | {'d_shared': 25}, 16, (1, 1, 2),
        r'model.experts.d_shared = 25 is not divisible by mesh.t = 2\nuse mesh.t=1'),
        (
            {'n_layers': 1, 'd_model': 36, 'n_heads': 3, 'd_ff': 48}, 15, (1, 1, 3),
            r'the padded vocabulary = 128 is not divisible by mesh.t = 3\nuse mesh.t=1',
        ),
        (LATENT, 16, (1, 8, 1),
        r'model.attention.latent.kv_rank = 12 is not divisible by mesh.d = 8\nuse mesh.d=4 mesh.r=2'),
        (LLAMA | {'d_model': 36, 'd_head': 8}, 16, (1, 8, 1),
        r'd_model = 36 is not divisible by mesh.d = 8\nuse mesh.d=4 mesh.r=2'),
        (
            {'family': 'gpt2', 'n_layers': 1, 'd_model': 32, 'n_heads': 4, 'max_sequence_length': 17}, 16, (1, 1, 2),
            'max_sequence_length=18',
        ),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide_the_model_is_refused(options, length, mesh, message):
    with pytest.raises(UserError, match=message):
        transformer(options, mesh_of(*mesh), length=length)


def test_layers_alternate_as_published():
    """Gemma 3: five local layers, then a global one with its own base; SmolLM3: every fourth without positions."""
    gemma, smollm = (resolve(decoder_options(preset=name), 1000, 64) for name in ('gemma3-1b', 'smollm3-3b'))
    assert gemma.windows == ((512,) * 5 + (0,)) * 4 + (512,) * 2
    assert [kind.rope_base for kind in gemma.kinds] == ([1e4] * 5 + [1e6]) * 4 + [1e4] * 2
    assert [kind.rope_base for kind in smollm.kinds] == ([5e6] * 3 + [None]) * 9
    command, exaone = (resolve(decoder_options(preset=name), 1000, 64) for name in ('command-r7b', 'exaone4-1.2b'))
    assert [kind.rope_base for kind in command.kinds] == ([5e4] * 3 + [None]) * 8
    assert [kind.rope_base for kind in exaone.kinds] == [1e6] * 30  # without a window, every layer has positions
    olmo = resolve(decoder_options(preset='olmo3-7b'), 1000, 64)
    assert [bool(kind.rope_scaling) for kind in olmo.kinds] == [False, False, False, True] * 8
    four = resolve(decoder_options(preset='gemma3-4b'), 1000, 64)
    assert [kind.rope_scaling and kind.rope_scaling.factor for kind in four.kinds[:6]] == [None] * 5 + [8.0]


def test_layers_with_experts_are_counted_as_qwen_and_deepseek_count_them():
    """Qwen: layer i if (i + 1) % decoder_sparse_step == 0, unless it is named; DeepSeek: after the first layers."""
    known = MIXTURE | {'n_layers': 6, 'd_ff_dense': 32}
    for options, expected in (
        ({'expert_every': 2, 'dense_layers': (3,)}, (1, 5)), ({'dense_layers': 2}, (2, 3, 4, 5)),
        ({'window': 4, 'layer_types': ('full', 'window', 'window'), 'dense_layers': (0, 1, 2, 3, 4)}, (5,)),
    ):  # fmt: skip
        arch = resolve(decoder_options(**known, **options), 100, 16)
        for name in ('experts', 'router', 'expert_up', 'shared_mix'):
            assert layers_with(arch, name) == expected
        assert layers_with(arch, 'up') == tuple(i for i in range(6) if i not in expected)
        assert layers_with(arch, 'q') == layers_with(arch, 'norm2') == tuple(range(6))
    assert arch.windows == (0, 4, 4, 0, 4, 4)


def test_features_of_a_preset_can_be_turned_off():
    off = {'window': 0, 'global_every': 0, 'attention_softcap': 0, 'final_softcap': 0, 'rope_scaling': {'kind': 'none'}}
    arch = resolve(decoder_options(preset='gemma2-2b', **off), 1000, 64)
    assert (arch.windows, arch.attention.softcap, arch.head.softcap, arch.rope.scaling) == ((0,) * 26, 0, 0, None)
    for part in ('window', 'capped', 'none'):
        assert part not in arch.describe()


def test_the_report_has_every_choice():
    said = resolve(decoder_options(preset='gemma2-27b'), 1000, 64).describe()
    for part in ('embedding times sqrt(width)', 'rmsnorm (1 + w)', 'sandwich-norms', 'but in every 2nd layer', 'geglu',
                 'window 4096', 'scores over sqrt(144)', 'scores capped at 50', 'logits capped at 30'):  # fmt: skip
        assert part in said
    said = resolve(decoder_options(preset='llama3.2-1b', nope_every=4, qkv_bias=True), 1000, 64).describe()
    for part in ('base 500000', 'llama3 x32', 'none in every 4th layer', 'biases of q, k, v'):
        assert part in said
    alone = transformer({'family': 'mamba2', 'n_layers': 2, 'd_model': 64})
    assert 'no feed-forward' in alone.choices['architecture']
    assert 'state-space model (Mamba 2) in 2 of 2 layers' in alone.choices['architecture']
    assert 'attention' not in alone.choices
    assert alone.choices['states'] == 'chunks of 64 tokens in plain XLA (there is no fused kernel)'
    said = resolve(decoder_options(preset='phi2-2.7b', residual_multiplier=0.2), 1000, 64).describe()
    for part in (
        'in parallel, one norm for both',
        'of 0.4 of each head',
        'residual branches times 0.2',
        'norms, unembedding',
    ):
        assert part in said
    said = resolve(decoder_options(preset='command-r7b'), 1000, 64).describe()
    for part in ('logits times 0.25', 'none in layers without a window', 'but in every 4th layer'):
        assert part in said


def test_the_page_has_every_preset_and_family():
    page = (Path(__file__).parents[2] / 'docs' / 'models.md').read_text()
    assert not [name for name in (*PRESET_NAMES, *FAMILY_NAMES) if f'`{name}`' not in page]
