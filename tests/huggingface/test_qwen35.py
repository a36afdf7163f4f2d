"""Qwen3.5 as it is released: a language model beside a vision tower, and all experts of a layer in one tensor."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options
from pretrax.huggingface.model import open_model
from pretrax.huggingface.weights import shapes
from pretrax.model.weights import abstract_weights
from small import mesh_of

GOLDENS = Path(__file__).parents[1] / 'goldens'
CONFIGS = {name: json.loads((GOLDENS / name / 'config.json').read_text()) for name in ('qwen3.5', 'qwen3.5-moe')}


def stacked(tensors):
    """Of each layer: gates and ups [E, 2F, M], downs [E, M, F]."""
    rest = {name: x for name, x in tensors.items() if '.experts.' not in name}
    for layer in {name.partition('.experts.')[0] for name in tensors if '.experts.' in name}:
        of = {
            kind: [tensors[f'{layer}.experts.{i}.{kind}_proj.weight'] for i in range(4)]
            for kind in ('gate', 'up', 'down')
        }
        rest[f'{layer}.experts.gate_up_proj'] = np.concatenate([np.stack(of['gate']), np.stack(of['up'])], axis=1)
        rest[f'{layer}.experts.down_proj'] = np.stack(of['down'])
    return rest


@pytest.mark.parametrize('case', CONFIGS)
def test_a_released_checkpoint_has_the_weights_of_its_text_model(case, tmp_path):
    tensors = stacked(load_file(GOLDENS / case / 'model.safetensors'))
    tensors = {name.replace('model.', 'model.language_model.', 1): x for name, x in tensors.items()}
    others = {
        'model.visual.pos_embed.weight': np.ones((2, 2), np.float32),
        'mtp.fc.weight': np.ones((2, 2), np.float32),
    }
    save_file(tensors | others, tmp_path / 'model.safetensors')
    outer = {'model_type': CONFIGS[case]['model_type'].removesuffix('_text'), 'vision_config': {}, 'image_token_id': 9}
    tied = {'tie_word_embeddings': CONFIGS[case]['tie_word_embeddings']}
    (tmp_path / 'config.json').write_text(json.dumps({'text_config': CONFIGS[case], **outer, **tied}))
    opened, alone = open_model(str(tmp_path)), open_model(str(GOLDENS / case))
    assert opened.arch == alone.arch
    assert 'visual (1 tensors), mtp (1 tensors)' in opened.notes[0]
    with jax.set_mesh(mesh_of()):
        like = abstract_weights(alone.arch)
    ours, theirs = opened.weights(like), alone.weights(like)
    for path in shapes(like):
        pieces = [sorted(weights.pieces(path), key=lambda piece: piece[0]) for weights in (ours, theirs)]
        assert [at for at, _ in pieces[0]] == [at for at, _ in pieces[1]]
        assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(*pieces, strict=True)), path


@pytest.mark.parametrize(
    'fields',
    [{'attn_output_gate': False}, {'output_gate_type': 'sigmoid'}, {'mamba_ssm_dtype': 'bfloat16'},
    {'mlp_only_layers': [1]},
     {'attention_bias': True}, {'layer_types': ['sliding_attention'] * 4}],
)  # fmt: skip
def test_what_the_class_does_not_have_is_refused(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        read_options(CONFIGS['qwen3.5'] | fields)
