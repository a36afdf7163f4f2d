"""What the teacher of distillation adds to the memory of a step. It runs forward only, on the mesh of the student.

Letters as in memory.py: T tokens per device and pass, M d_model, V vocabulary, t tensor-parallel devices; sizes
are those of the teacher. Its weights are sharded as the student's, in the compute dtype, without moments or gradients.

    always    weights
    loss      the hidden states after the last layer, and the hidden states that the student learns; of one chunk of the
              sequences, the normed hidden states and the logits, in the compute dtype and in f32; over d, the gathered
              unembedding
    teacher   one layer while it runs: queries, keys, values and the result of attention, the values of the
              feed-forward, three hidden states; over d, its gathered weights. Activations of the student exist then too
"""

import dataclasses
import math

from pretrax.cost.step_facts import BYTES, StepFacts
from pretrax.model.architecture import Architecture


@dataclasses.dataclass(frozen=True)
class TeacherMemory:
    """Bytes per device: always, during the loss besides, and while a layer of the teacher runs besides."""

    weights: float
    loss: float
    layer: float


NO_TEACHER = TeacherMemory(0.0, 0.0, 0.0)


def n_params(arch: Architecture) -> int:
    """Weights of a decoder, without norms and biases."""
    positions = arch.max_sequence_length * arch.d_model if arch.positions == 'learned' else 0
    tables = arch.padded_vocab_size * arch.d_model * (1 if arch.embedding.tied else 2)
    return arch.n_matmul_params - arch.vocab_size * arch.d_model + arch.n_idle_params + tables + positions


def in_experts(arch: Architecture) -> int:
    """The expert weights among them, which `e` shards too."""
    per_expert = arch.d_model * arch.feed_forward.d_ff * arch.feed_forward.n_matrices
    return arch.n_expert_layers * arch.experts.n_experts * per_expert


def teacher_memory(step: StepFacts) -> TeacherMemory:
    """What the teacher of a step needs on each device; nothing if it has none."""
    arch = step.teacher
    if arch is None:
        return NO_TEACHER
    n = {axis: step.mesh.get(axis, 1) for axis in 'rdect'}
    width, t, d_model = BYTES[step.compute], n['t'], arch.d_model
    tokens = math.ceil(step.tokens / (n['r'] * n['d'] * n['e'] * n['c']))
    experts = in_experts(arch)
    weights = width * (experts / n['e'] + n_params(arch) - experts) / (n['d'] * t)

    logits = tokens / step.loss_chunks * arch.padded_vocab_size / t
    table = arch.padded_vocab_size * d_model / t
    stream = width * tokens * d_model / t
    loss = stream * (1 + step.kept_states) + (width + 4) * logits + width * (table if n['d'] > 1 else 0.0)

    heads = 2 * (arch.mean_d_head * arch.attention.n_heads + arch.mean_kv_width)
    dense = arch.sizes['F'] if arch.n_dense_layers else 0
    widest = max(
        dense,
        arch.experts.experts_per_token * arch.feed_forward.d_ff + arch.experts.d_shared
        if arch.experts.n_experts
        else 0,
    )
    layer = width * tokens * ((heads + arch.feed_forward.n_matrices * widest) / t + 3 * d_model)
    if n['d'] > 1:
        matrices = d_model * arch.feed_forward.n_matrices
        wide = max(dense, arch.experts.n_experts * arch.feed_forward.d_ff / n['e'] + arch.experts.d_shared)
        layer += width * (arch.attention_params + matrices * wide) / t
    return TeacherMemory(weights, loss, layer)
