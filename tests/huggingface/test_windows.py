"""Layers with a window are those of each class of transformers, and a vision tower is left out
(goldens/make_windows.py).
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoders import decoder_options
from goldens.golden import LOGITS, QUICK, captured_logits, relative
from pretrax.huggingface.configs import compare, read_options, write_config
from pretrax.huggingface.model import open_model
from pretrax.model.architecture import resolve
from pretrax.model.loss import Batch
from pretrax.model.weights import Weights
from pretrax.shardlib import num, typed_shard_map
from small import mesh_of
from small import transformer as decoder

CASES = Path(__file__).parents[1] / 'goldens' / 'windows'
WINDOWS = {
    'qwen2': [0, 0, 0, 5, 5],  # from max_window_layers on
    'qwen2-moe': [5, 0, 5, 0, 0],  # every other layer below max_window_layers
    'qwen3-moe': [5] * 5,  # max_window_layers is not read
    'smollm3': [0, 5, 0, 5, 0],  # layers without positions
    'qwen2-moe-types': [5, 0, 0, 5, 0],
    'smollm3-types': [5, 0, 0, 5, 0],
    'gemma2-types': [5, 0, 0, 5, 0],
    'gemma3-vision': [5] * 5 + [0, 5],
}


def logits_of(directory, monkeypatch, **flips):
    golden, opened = load_file(directory / 'golden.safetensors'), open_model(str(directory))
    tokens = np.broadcast_to(golden['tokens'], (8, golden['tokens'].shape[1]))
    ones = np.ones_like(tokens)
    rows = Batch(tokens, tokens, ones, np.arange(tokens.shape[1], dtype=np.int32) * ones, mask=ones.astype(np.float32))
    with jax.set_mesh(mesh_of()):
        model = decoder(opened.options | flips, vocab_size=32, length=tokens.shape[1])
        like = model.abstract()
        found = opened.weights(like)
        flat = {path: np.zeros(shape, np.float32) for path, shape in found.shapes.items()}
        for path, array in flat.items():
            for at, piece in found.pieces(path):
                array[at] = piece
        paths, tree = jax.tree_util.tree_flatten_with_path(like)
        weights = tree.unflatten([flat[jax.tree_util.keystr(path, simple=True, separator='.')] for path, _ in paths])
        captured_logits(monkeypatch)

        @typed_shard_map
        def run(weights: Weights, batch: Batch) -> num['B/r/d/e L/c V/t']:
            return model.loss(weights, batch)['logits']

        logits = jax.jit(run, compiler_options=QUICK)(weights, rows)
    return relative(np.asarray(logits)[:1, :, :32], golden['logits']), opened


@pytest.mark.parametrize(
    'case', [case if case == 'qwen2-moe' else pytest.param(case, marks=pytest.mark.slow) for case in WINDOWS]
)
def test_each_class_has_its_windows(case, monkeypatch):
    error, opened = logits_of(CASES / case, monkeypatch)
    assert list(opened.arch.windows) == WINDOWS[case]
    assert error <= LOGITS
    without, _ = logits_of(CASES / case, monkeypatch, window=0, global_every=0, layer_types=None)
    assert without > 10 * LOGITS  # the window is seen


@pytest.mark.parametrize('case', WINDOWS)
def test_what_is_exported_has_the_same_windows(case):
    arch = open_model(str(CASES / case)).arch
    config, table = write_config(arch, open_model(str(CASES / case)).options['family'])
    options, _ = read_options(config)
    assert table.model_type in (case.removesuffix('-types').replace('-moe', '_moe'), 'gemma3_text')
    assert options['attention.window'] == 5
    assert [kind == 'sliding_attention' for kind in config.get('layer_types', ['sliding_attention'] * 5)] == [
        window > 0 for window in WINDOWS[case]
    ]


@pytest.mark.parametrize('names', ['before', 'since 4.52'])
def test_the_language_model_of_gemma_3_is_found_under_both_names(names, tmp_path):
    """transformers before 4.52 and since then have other prefixes; the files of 5.23 have the former again."""
    tensors = load_file(CASES / 'gemma3-vision' / 'model.safetensors')
    assert any(name.startswith('language_model.model.') for name in tensors)
    renamed = {}
    for name, x in tensors.items():
        new = name.replace('language_model.model.', 'model.language_model.')
        renamed[new if new != name or names == 'before' else f'model.{name}'] = x
    (tmp_path / 'config.json').write_text((CASES / 'gemma3-vision' / 'config.json').read_text())
    save_file(tensors if names == 'before' else renamed, tmp_path / 'model.safetensors')
    opened = open_model(str(tmp_path))
    vision = sum('vision_tower' in name for name in tensors)
    projector = sum('multi_modal_projector' in name for name in tensors)
    assert f'left out: multi_modal_projector ({projector} tensors), vision_tower ({vision} tensors)' in opened.notes[0]
    assert len(opened.checkpoint.tensors) == len(tensors) - vision - projector
    with jax.set_mesh(mesh_of()):
        found = opened.weights(decoder(opened.options, vocab_size=32, length=20).abstract())
    (embedding,) = [piece for _, piece in found.pieces('embed')]
    np.testing.assert_array_equal(embedding[:32], tensors['language_model.model.embed_tokens.weight'])


def test_layers_in_another_order_are_another_model():
    """Layers with a state have no window, as attention to everything has none."""

    def of(*layer_types):
        options = {'n_layers': 4, 'd_model': 32, 'n_heads': 4, 'linear_heads': 4, 'layer_types': layer_types}
        return resolve(decoder_options(**options), 32, 20)

    one, other, written_out = of('delta', 'full'), of('full', 'delta'), of('delta', 'full', 'delta', 'full')
    assert one.windows == other.windows == (0,) * 4
    assert one.attention_windows == (0, 0)
    assert set(compare(one, other, 'there', 'here')) == {'layer_types'}
    assert compare(one, written_out, 'there', 'here') == {}
