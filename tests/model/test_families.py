"""Presets have the published sizes, and choices that do not fit together are refused in words."""

import jax
import pytest

from pretrax.errors import UserError
from pretrax.model.families import PRESETS, TransformerOptions, resolve
from small import LLAMA, mesh_of, transformer

# Parameters of the released checkpoints: `num_parameters()` of the models of these names on the Hugging Face hub
# (openai-community/gpt2*, meta-llama/Llama-2-*, meta-llama/Meta-Llama-3*).
PUBLISHED = {
    'gpt2-124m': 124_439_808,
    'gpt2-355m': 354_823_168,
    'gpt2-774m': 774_030_080,
    'gpt2-1.5b': 1_557_611_200,
    'llama2-7b': 6_738_415_616,
    'llama2-13b': 13_015_864_320,
    'llama2-70b': 68_976_648_192,
    'llama3-8b': 8_030_261_248,
    'llama3-70b': 70_553_706_496,
    'llama3-405b': 405_853_388_800,
}


@pytest.mark.parametrize('preset', PRESETS)
def test_parameters_as_published(preset):
    """Counted on the arrays themselves, without the rows that pad the vocabulary."""
    model = transformer({'preset': preset}, vocab_size=1000, length=1024)
    with jax.set_mesh(mesh_of()):
        weights = model.abstract()
    tables = 1 if model.arch.tied else 2
    padding = tables * (model.arch.padded_vocab_size - model.arch.vocab_size) * model.arch.d_model
    count = sum(w.size for w in jax.tree.leaves(weights)) - padding
    if preset in PUBLISHED:
        assert count == PUBLISHED[preset]
    else:  # named, roughly, by their size without the embedding and the unembedding
        size = float(preset.removeprefix('seqax-')[:-1]) * {'m': 1e6, 'b': 1e9}[preset[-1]]
        without_tables = count - 2 * model.arch.vocab_size * model.arch.d_model
        assert without_tables == pytest.approx(size, rel=0.25)


def test_parameters_of_matrix_products():
    """Llama 2 7B: all of its parameters but the embedding and the norms (Touvron et al. 2023)."""
    arch = resolve(TransformerOptions(preset='llama2-7b'), 32000, 4096)
    norms = (2 * 32 + 1) * 4096
    assert arch.n_matmul_params == 6_738_415_616 - 32000 * 4096 - norms


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
    ],
)
def test_choices_that_do_not_fit_together(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerOptions(**options)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (SIZES | {'vocab_size': 50}, "vocab_size = 50 is smaller than the tokenizer's 100"),
        (SIZES | {'family': 'gpt2', 'max_sequence_length': 8}, 'sequence_length = 16 exceeds'),
    ],
)
def test_choices_that_do_not_fit_the_data(options, message):
    with pytest.raises(UserError, match=message):
        resolve(TransformerOptions(**options), 100, 16)


@pytest.mark.parametrize(
    ('options', 'length', 'mesh', 'message'),
    [
        (LLAMA, 16, (1, 1, 8), r'n_heads = 4 is not divisible by mesh.t = 8\nuse mesh.t=4'),
        (LLAMA, 16, (1, 1, 4), r'n_kv_heads = 2 is not divisible by mesh.t = 4\nuse mesh.t=2'),
        (LLAMA | {'d_ff': 49}, 16, (1, 1, 2), r'd_ff = 49 is not divisible by mesh.t = 2\nuse mesh.t=1'),
        (LLAMA, 15, (1, 1, 2), r'batch.sequence_length = 15 is not divisible by mesh.t = 2\nuse mesh.t=1'),
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
