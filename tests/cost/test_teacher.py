"""What a teacher adds to a step: the bytes of its weights, and two FLOPs per weight and token.

`tests/plan/test_memory.py` compares the memory of whole steps with what compilers allocate.
"""

import json

import jax
import pytest

from pretrax import config_from_values
from pretrax.cost.teacher import teacher_memory
from pretrax.observe.device_memory import bytes_per_device
from pretrax.run.setup import prepare, step_facts

# Sizes of a teacher: 6 layers of width 256, of 4 query heads and 2 key-value heads of 64
TEACHER = {
    'model_type': 'llama', 'hidden_act': 'silu', 'hidden_size': 256, 'intermediate_size': 1024,
    'num_attention_heads': 4,
    'num_hidden_layers': 6, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-5, 'rope_theta': 1e4,
    'tie_word_embeddings': False,
    'vocab_size': 8192, 'max_position_embeddings': 512,
}  # fmt: skip


def prepared(directory, **changes):
    """A run that learns from a teacher whose weights are not read."""
    (directory / 'config.json').write_text(json.dumps(TEACHER))
    values = {
        'name': 'student', 'run_dir': str(directory / 'run'), 'steps': 5,
        'model': {'family': 'llama', 'n_layers': 4, 'd_model': 128, 'attention': {'n_heads': 4, 'n_kv_heads': 4},
        'feed_forward': {'d_ff': 512}, 'embedding': {'tied': False}},
        'data': {'name': 'synthetic', 'vocab_size': 8192}, 'batch': {'tokens': 4096, 'sequence_length': 512},
        'optimizer': {'learning_rate': 1e-3}, 'precision': {'compute': 'f32'},
        'distill': {'teacher': f'hf:{directory}'},
    }  # fmt: skip
    return prepare(config_from_values(values | changes), lambda text: None)


@pytest.mark.parametrize('mesh', [{'r': 8}, {'d': 4, 't': 2}])
def test_weights_of_the_teacher_are_those_of_its_arrays(tmp_path, mesh):
    run = prepared(tmp_path, mesh=mesh)
    held = sum(map(bytes_per_device, jax.tree.leaves(run.like.constants)))
    assert teacher_memory(step_facts(run)).weights == pytest.approx(held, rel=0.01)
    assert any(line.topic == 'memory' and 'teacher ' in line.text for line in run.startup)


def test_flops_are_those_counted_by_hand(tmp_path):
    """Per token: 6 for each weight of the student, 2 for each of the teacher;
    attention to half of the keys, once or thrice.
    """
    run, L = prepared(tmp_path, mesh={'r': 8}), 512
    student = 4 * (4 * 128 * 128 + 3 * 128 * 512) + 8192 * 128
    teacher = 6 * (256 * (4 + 2 + 2 + 4) * 64 + 3 * 256 * 1024) + 8192 * 256
    scores = 3 * 4 * (2 * 2 * 128 * L / 2) + 6 * (2 * 2 * 256 * L / 2)
    assert run.flops.causal == pytest.approx(6 * student + 2 * teacher + scores)
