"""Presets have the published sizes, and choices that do not fit together are refused in words."""

from pathlib import Path

import jax
import pytest

from pretrax.errors import UserError
from pretrax.model.families import FAMILIES, PRESETS, TransformerOptions, resolve
from small import LLAMA, MIXTURE, mesh_of, transformer

# Parameters of the released checkpoints: `num_parameters()` of the models of these names on the Hugging Face hub.
PUBLISHED = {
    'gpt2-124m': 124_439_808, 'gpt2-355m': 354_823_168, 'gpt2-774m': 774_030_080, 'gpt2-1.5b': 1_557_611_200,
    'llama2-7b': 6_738_415_616, 'llama2-13b': 13_015_864_320, 'llama2-70b': 68_976_648_192,
    'llama3-8b': 8_030_261_248, 'llama3-70b': 70_553_706_496, 'llama3-405b': 405_853_388_800,
    'llama3.1-8b': 8_030_261_248, 'llama3.1-70b': 70_553_706_496, 'llama3.1-405b': 405_853_388_800,
    'llama3.2-1b': 1_235_814_400, 'llama3.2-3b': 3_212_749_824, 'llama3.3-70b': 70_553_706_496,
    'mistral-7b-v0.1': 7_241_732_096, 'mistral-7b-v0.3': 7_248_023_552,
    'mistral-nemo-12b': 12_247_782_400, 'mistral-small-24b': 23_572_403_200,
    'qwen2-0.5b': 494_032_768, 'qwen2-1.5b': 1_543_714_304, 'qwen2-7b': 7_615_616_512, 'qwen2-72b': 72_706_203_648,
    'qwen2.5-0.5b': 494_032_768, 'qwen2.5-1.5b': 1_543_714_304, 'qwen2.5-3b': 3_085_938_688,
    'qwen2.5-7b': 7_615_616_512, 'qwen2.5-14b': 14_770_033_664, 'qwen2.5-32b': 32_763_876_352,
    'qwen2.5-72b': 72_706_203_648,
    'qwen3-0.6b': 596_049_920, 'qwen3-1.7b': 1_720_574_976, 'qwen3-4b': 4_022_468_096, 'qwen3-8b': 8_190_735_360,
    'qwen3-14b': 14_768_307_200, 'qwen3-32b': 32_762_123_264,
    'mixtral-8x7b': 46_702_792_704, 'mixtral-8x22b': 140_620_634_112, 'qwen1.5-moe-a2.7b': 14_315_784_192,
    'qwen3-30b-a3b': 30_532_122_624, 'qwen3-235b-a22b': 235_093_634_560,
    'gemma-2b': 2_506_172_416, 'gemma-7b': 8_537_680_896,
    'gemma2-2b': 2_614_341_888, 'gemma2-9b': 9_241_705_984, 'gemma2-27b': 27_227_128_320,
    'gemma3-270m': 268_098_176, 'gemma3-1b': 999_885_952,
    'olmo2-1b': 1_484_916_736, 'olmo2-7b': 7_298_617_344, 'olmo2-13b': 13_716_198_400, 'olmo2-32b': 32_234_279_936,
    'smollm-135m': 134_515_008, 'smollm-360m': 361_821_120, 'smollm-1.7b': 1_711_376_384,
    'smollm2-135m': 134_515_008, 'smollm2-360m': 361_821_120, 'smollm2-1.7b': 1_711_376_384,
    'smollm3-3b': 3_075_098_624,
    'phi3-mini-4k': 3_821_079_552, 'phi3-medium-4k': 13_960_238_080, 'phi4-14b': 14_659_507_200,
}  # fmt: skip
# Checkpoints with a vision tower too: embedding and other parameters of the text model in millions, as the paper's
# table 1 rounds them (arXiv:2503.19786). seqax's are named by their size without the embedding and the unembedding.
ABOUT = {
    'gemma3-4b': (675e6 + 3209e6, 0.002), 'gemma3-12b': (1012e6 + 10759e6, 0.002), 'gemma3-27b': (1416e6 + 25600e6, 0.002),
    'qwen2-57b-a14b': (57.41e9, 0.001),
    'seqax-84m': (84e6 + 2 * 32768 * 512, 0.25), 'seqax-270m': (270e6 + 2 * 32768 * 1024, 0.25),
    'seqax-540m': (540e6 + 2 * 32768 * 2048, 0.25), 'seqax-1b': (1e9 + 2 * 32768 * 2048, 0.25),
    'seqax-2b': (2e9 + 2 * 32768 * 4096, 0.25),
}  # fmt: skip


@pytest.mark.parametrize('preset', PRESETS)
def test_parameters_as_published(preset):
    """Counted on the arrays themselves, without the rows that pad the vocabulary."""
    model = transformer({'preset': preset}, vocab_size=1000, length=1024)
    with jax.set_mesh(mesh_of()):
        weights = model.abstract()
    tables = 1 if model.arch.tied else 2
    padding = tables * (model.arch.padded_vocab_size - model.arch.vocab_size) * model.arch.d_model
    count = sum(w.size for w in jax.tree.leaves(weights)) - padding
    if preset in ABOUT:
        expected, tolerance = ABOUT[preset]
        assert count == pytest.approx(expected, rel=tolerance)
    else:
        assert count == PUBLISHED[preset]


def test_parameters_of_matrix_products():
    """Llama 2 7B: all of its parameters but the embedding and the norms (Touvron et al. 2023)."""
    arch = resolve(TransformerOptions(preset='llama2-7b'), 32000, 4096)
    norms = (2 * 32 + 1) * 4096
    assert arch.n_matmul_params == 6_738_415_616 - 32000 * 4096 - norms


@pytest.mark.parametrize(
    ('preset', 'active', 'tolerance'),
    # Jiang et al. 2024, section 1; the others' names: Qwen count without the embedding (57b) or round (3.3 to 3)
    [('mixtral-8x7b', 12.9e9, 0.005), ('qwen2-57b-a14b', 14.2e9, 0.005), ('qwen3-235b-a22b', 22.2e9, 0.005),
     ('qwen3-30b-a3b', 3.3e9, 0.02), ('qwen1.5-moe-a2.7b', 2.7e9, 0.01), ('mixtral-8x22b', 39e9, 0.005)],
)  # fmt: skip
def test_parameters_per_token(preset, active, tolerance):
    """The experts that a token uses. FLOPs are computed from these, without embeddings and norms."""
    arch = transformer({'preset': preset}, vocab_size=1000, length=1024).arch
    with jax.set_mesh(mesh_of()):
        weights = transformer({'preset': preset}, vocab_size=1000, length=1024).abstract()
    everything = sum(w.size for w in jax.tree.leaves(weights))
    assert everything - arch.n_idle_params == pytest.approx(active, rel=tolerance)
    small = {'norm1', 'norm2', 'norm', 'q_norm', 'k_norm', 'q_bias', 'k_bias', 'v_bias', 'embed'}
    named = jax.tree_util.tree_leaves_with_path(weights)
    padding = (arch.padded_vocab_size - arch.vocab_size) * arch.d_model
    products = sum(w.size for path, w in named if path[-1].name not in small) - padding
    assert arch.n_matmul_params == products - arch.n_idle_params


def test_without_experts_a_preset_is_dense():
    arch = resolve(TransformerOptions(preset='mixtral-8x7b', n_experts=0), 1000, 64)
    assert (arch.n_experts, arch.balance_loss, arch.n_idle_params) == (0, 0.0, 0)


def test_a_preset_can_be_overridden():
    arch = resolve(TransformerOptions(preset='gpt2-124m', n_layers=6, tied=False), 50257, 512)
    assert (arch.n_layers, arch.tied, arch.d_model, arch.norm) == (6, False, 768, 'layernorm')


def test_sizes_left_out_follow_from_the_others():
    arch = resolve(TransformerOptions(n_layers=1, d_model=512, n_heads=8), 1000, 64)
    assert (arch.d_head, arch.n_kv_heads) == (64, 8)
    assert arch.d_ff == 1408  # 8/3 of 512 is 1365.3, up to a multiple of 64
    assert (arch.vocab_size, arch.padded_vocab_size) == (1000, 1024)


SIZES = {'n_layers': 1, 'd_model': 32, 'n_heads': 4}


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'preset': 'gpt3'}, "there is no 'gpt3'"),
        ({'d_model': 32}, 'n_layers, n_heads missing'),
        (SIZES | {'n_heads': 5}, 'd_model = 32 is not divisible by model.n_heads = 5'),
        (SIZES | {'n_kv_heads': 3}, 'n_heads = 4 is not divisible by model.n_kv_heads = 3'),
        (SIZES | {'d_head': 7}, 'd_head = 7 is odd'),
        (SIZES | {'global_every': 2}, 'global_every = 2 exempts layers from a window, and there is none'),
        (SIZES | {'family': 'gpt2', 'block_norms': 'sandwich'}, 'norms after attention and feed-forward have no bias'),
        (SIZES | {'capacity': 1.5}, 'capacity = 1.5 applies to experts, and there are none'),
        (SIZES | {'n_experts': 1}, 'at least 2 experts'),
        (SIZES | {'n_experts': 4, 'experts_per_token': 5}, 'n_experts = 4 with model.experts_per_token = 5'),
        (SIZES | {'n_experts': 4, 'activation': 'gelu'}, 'activation = gelu: experts always have a gate and no biases'),
        (SIZES | {'n_experts': 4, 'bias': True}, 'bias = true: experts always have a gate and no biases'),
        (SIZES | {'n_experts': 4, 'shared_gate': True}, 'there is no shared expert'),
        (SIZES | {'rope_scaling': {'kind': 'llama3', 'low_freq_factor': 4}}, 'low_freq_factor 4.0 is not below'),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerOptions(**options)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (SIZES | {'vocab_size': 50}, "vocab_size = 50 is smaller than the tokenizer's 100"),
        (SIZES | {'family': 'gpt2', 'max_sequence_length': 8}, 'sequence_length = 16 exceeds'),
    ],
)
def test_options_that_do_not_fit_the_data_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        resolve(TransformerOptions(**options), 100, 16)


@pytest.mark.parametrize(
    ('options', 'length', 'mesh', 'message'),
    [
        (LLAMA, 16, (1, 1, 8), r'n_heads = 4 is not divisible by mesh.t = 8\nuse mesh.t=4'),
        (LLAMA, 16, (1, 1, 4), r'n_kv_heads = 2 is not divisible by mesh.t = 4\nuse mesh.t=2'),
        (LLAMA | {'d_ff': 49}, 16, (1, 1, 2), r'd_ff = 49 is not divisible by mesh.t = 2\nuse mesh.t=1'),
        (LLAMA, 15, (1, 1, 2), r'batch.sequence_length = 15 is not divisible by mesh.t = 2\nuse mesh.t=1'),
        (MIXTURE | {'d_shared': 25}, 16, (1, 1, 2), r'd_shared = 25 is not divisible by mesh.t = 2\nuse mesh.t=1'),
        (
            {'n_layers': 1, 'd_model': 36, 'n_heads': 3, 'd_ff': 48}, 15, (1, 1, 3),
            r'the padded vocabulary = 128 is not divisible by mesh.t = 3\nuse mesh.t=2',
        ),
        (LLAMA | {'d_model': 36, 'd_head': 8}, 16, (1, 8, 1), r'd_model = 36 is not divisible by mesh.d = 8\nuse mesh.d=6'),
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
    gemma, smollm = (resolve(TransformerOptions(preset=name), 1000, 64) for name in ('gemma3-1b', 'smollm3-3b'))
    assert gemma.windows == ((512,) * 5 + (0,)) * 4 + (512,) * 2
    assert [kind.rope_base for kind in gemma.kinds] == [1e4] * 5 + [1e6]
    assert [kind.rope_base for kind in smollm.kinds] == [5e6] * 3 + [None]
    four = resolve(TransformerOptions(preset='gemma3-4b'), 1000, 64)
    assert [kind.rope_scaling and kind.rope_scaling.factor for kind in four.kinds] == [None] * 5 + [8.0]


def test_features_of_a_preset_can_be_turned_off():
    off = {'window': 0, 'global_every': 0, 'attention_softcap': 0, 'final_softcap': 0, 'rope_scaling': {'kind': 'none'}}
    arch = resolve(TransformerOptions(preset='gemma2-2b', **off), 1000, 64)
    assert (arch.windows, arch.attention_softcap, arch.final_softcap, arch.rope_scaling) == ((0,) * 26, 0, 0, None)
    for part in ('window', 'capped', 'none'):
        assert part not in arch.describe()


def test_the_report_has_every_choice():
    said = resolve(TransformerOptions(preset='gemma2-27b'), 1000, 64).describe()
    for part in ('embedding times sqrt(width)', 'rmsnorm (1 + w)', 'sandwich-norms', 'but in every 2nd layer', 'geglu',
                 'window 4096', 'scores over sqrt(144)', 'scores capped at 50', 'logits capped at 30'):  # fmt: skip
        assert part in said
    said = resolve(TransformerOptions(preset='llama3.2-1b', nope_every=4, qkv_bias=True), 1000, 64).describe()
    for part in ('base 500000', 'llama3 x32', 'none in every 4th layer', 'biases of q, k, v'):
        assert part in said


def test_the_page_has_every_preset_and_family():
    page = (Path(__file__).parents[2] / 'docs' / 'models.md').read_text()
    assert not [name for name in (*PRESETS, *FAMILIES) if f'`{name}`' not in page]
