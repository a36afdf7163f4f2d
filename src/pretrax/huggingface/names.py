"""Maps tensors of Hugging Face checkpoints to pretrax weights, with one table per family.

A row has a tensor's name and its axes in the letters of `model/weights.py`: `'layers.q: (H D) M'` is a matrix whose rows
are the dimensions of all heads, head by head. If one tensor concatenates several weights along an axis, the row lists
them, as in `Fused(1, 'layers.q: M (H D)', 'layers.k: M (K D)')`. {layer} and {expert} in a name index the leading dimensions
`layers` and `E` of the pretrax weight, which the row omits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fused:
    """Several weights, concatenated along an axis of one tensor."""

    axis: int
    parts: tuple[str, ...]

    def __init__(self, axis: int, *parts: str):
        object.__setattr__(self, 'axis', axis)
        object.__setattr__(self, 'parts', parts)


@dataclass(frozen=True)
class NameTable:
    """The tensors of a family.

    Args:
        rows: rows by tensor name.
        prefix: prefix of tensor names, which files saved from the model without its head omit.
        ignored: patterns of tensors that are not weights: masks and tables that old versions saved.
    """

    rows: Mapping[str, str | Fused]
    prefix: str = 'model.'
    ignored: tuple[str, ...] = ('*.rotary_emb.inv_freq',)


GPT2 = NameTable(
    {
        'transformer.wte.weight': 'embed: V M',
        'transformer.wpe.weight': 'positions: P M',
        'transformer.h.{layer}.ln_1.weight': 'layers.norm1: M',
        'transformer.h.{layer}.ln_1.bias': 'layers.norm1_bias: M',
        # Conv1D has [input, output] weights, the transpose of Linear
        'transformer.h.{layer}.attn.c_attn.weight': Fused(
            1, 'layers.q: M (H D)', 'layers.k: M (K D)', 'layers.v: M (K D)'
        ),
        'transformer.h.{layer}.attn.c_attn.bias': Fused(
            0, 'layers.q_bias: (H D)', 'layers.k_bias: (K D)', 'layers.v_bias: (K D)'
        ),
        'transformer.h.{layer}.attn.c_proj.weight': 'layers.o: (H D) M',
        'transformer.h.{layer}.attn.c_proj.bias': 'layers.o_bias: M',
        'transformer.h.{layer}.ln_2.weight': 'layers.norm2: M',
        'transformer.h.{layer}.ln_2.bias': 'layers.norm2_bias: M',
        'transformer.h.{layer}.mlp.c_fc.weight': 'layers.up: M F',
        'transformer.h.{layer}.mlp.c_fc.bias': 'layers.up_bias: F',
        'transformer.h.{layer}.mlp.c_proj.weight': 'layers.down: F M',
        'transformer.h.{layer}.mlp.c_proj.bias': 'layers.down_bias: M',
        'transformer.ln_f.weight': 'norm: M',
        'transformer.ln_f.bias': 'norm_bias: M',
        'lm_head.weight': 'unembed: V M',
    },
    prefix='transformer.',
    ignored=('*.attn.bias', '*.attn.masked_bias'),
)

_ATTENTION = {
    'model.layers.{layer}.self_attn.q_proj.weight': 'layers.q: (H D) M',
    'model.layers.{layer}.self_attn.k_proj.weight': 'layers.k: (K D) M',
    'model.layers.{layer}.self_attn.v_proj.weight': 'layers.v: (K D) M',
    'model.layers.{layer}.self_attn.o_proj.weight': 'layers.o: M (H D)',
}
_MLP = {
    'model.layers.{layer}.mlp.gate_proj.weight': 'layers.gate: F M',
    'model.layers.{layer}.mlp.up_proj.weight': 'layers.up: F M',
    'model.layers.{layer}.mlp.down_proj.weight': 'layers.down: M F',
}
_PRE_NORMS = {
    'model.layers.{layer}.input_layernorm.weight': 'layers.norm1: M',
    'model.layers.{layer}.post_attention_layernorm.weight': 'layers.norm2: M',
}
_AROUND = {
    'model.embed_tokens.weight': 'embed: V M',
    'model.norm.weight': 'norm: M',
    'lm_head.weight': 'unembed: V M',
}

_SANDWICH_NORMS = {
    'model.layers.{layer}.input_layernorm.weight': 'layers.norm1: M',
    'model.layers.{layer}.post_attention_layernorm.weight': 'layers.norm1_after: M',
    'model.layers.{layer}.pre_feedforward_layernorm.weight': 'layers.norm2: M',
    'model.layers.{layer}.post_feedforward_layernorm.weight': 'layers.norm2_after: M',
}
_POST_NORMS = {
    'model.layers.{layer}.post_attention_layernorm.weight': 'layers.norm1_after: M',
    'model.layers.{layer}.post_feedforward_layernorm.weight': 'layers.norm2_after: M',
}
_QKV_BIASES = {
    'model.layers.{layer}.self_attn.q_proj.bias': 'layers.q_bias: (H D)',
    'model.layers.{layer}.self_attn.k_proj.bias': 'layers.k_bias: (K D)',
    'model.layers.{layer}.self_attn.v_proj.bias': 'layers.v_bias: (K D)',
}
_HEAD_NORMS = {
    'model.layers.{layer}.self_attn.q_norm.weight': 'layers.q_norm: D',
    'model.layers.{layer}.self_attn.k_norm.weight': 'layers.k_norm: D',
}
_FULL_NORMS = {
    'model.layers.{layer}.self_attn.q_norm.weight': 'layers.q_full_norm: (H D)',
    'model.layers.{layer}.self_attn.k_norm.weight': 'layers.k_full_norm: (K D)',
}
_FUSED = {
    'model.layers.{layer}.self_attn.qkv_proj.weight': Fused(
        0, 'layers.q: (H D) M', 'layers.k: (K D) M', 'layers.v: (K D) M'
    ),
    'model.layers.{layer}.self_attn.o_proj.weight': 'layers.o: M (H D)',
    'model.layers.{layer}.mlp.gate_up_proj.weight': Fused(0, 'layers.gate: F M', 'layers.up: F M'),
    'model.layers.{layer}.mlp.down_proj.weight': 'layers.down: M F',
}

_MIXTRAL_EXPERTS = {
    'model.layers.{layer}.block_sparse_moe.gate.weight': 'layers.router: E M',
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight': 'layers.expert_gate: F M',
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight': 'layers.expert_up: F M',
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight': 'layers.expert_down: M F',
}
_QWEN_EXPERTS = {
    'model.layers.{layer}.mlp.gate.weight': 'layers.router: E M',
    'model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight': 'layers.expert_gate: F M',
    'model.layers.{layer}.mlp.experts.{expert}.up_proj.weight': 'layers.expert_up: F M',
    'model.layers.{layer}.mlp.experts.{expert}.down_proj.weight': 'layers.expert_down: M F',
}
_SHARED_EXPERT = {
    'model.layers.{layer}.mlp.shared_expert.gate_proj.weight': 'layers.shared_gate: F_shared M',
    'model.layers.{layer}.mlp.shared_expert.up_proj.weight': 'layers.shared_up: F_shared M',
    'model.layers.{layer}.mlp.shared_expert.down_proj.weight': 'layers.shared_down: M F_shared',
    'model.layers.{layer}.mlp.shared_expert_gate.weight': 'layers.shared_mix: () M',  # a matrix of one row
}

TABLES = {
    'gpt2': GPT2,
    'llama': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_MLP}),  # Mistral, Gemma and SmolLM3 too
    'qwen2': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_QKV_BIASES, **_MLP}),
    'qwen3': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP}),
    'mixtral': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_MIXTRAL_EXPERTS}),
    'qwen2-moe': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_QKV_BIASES, **_QWEN_EXPERTS, **_SHARED_EXPERT}),
    'qwen3-moe': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_HEAD_NORMS, **_QWEN_EXPERTS}),
    'gemma2': NameTable({**_AROUND, **_SANDWICH_NORMS, **_ATTENTION, **_MLP}),
    'gemma3': NameTable({**_AROUND, **_SANDWICH_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP}),
    'olmo2': NameTable({**_AROUND, **_POST_NORMS, **_ATTENTION, **_FULL_NORMS, **_MLP}),
    'phi3': NameTable({**_AROUND, **_PRE_NORMS, **_FUSED}),
}


@dataclass(frozen=True)
class TensorPart:
    """A pretrax weight inside a tensor: its path and the letters of the tensor's axes, grouped where axes are merged."""

    path: str
    axes: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(text: str) -> 'TensorPart':
        path, _, axes = text.partition(':')
        groups = re.findall(r'\(([^)]*)\)|(\w+)', axes)  # '()' is an axis of size 1
        return TensorPart(path.strip(), tuple(tuple((merged or single).split()) for merged, single in groups))

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(letter for group in self.axes for letter in group)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of this weight inside the tensor."""
        return tuple(int(np.prod([sizes[letter] for letter in group])) for group in self.axes)

    def to_ours(self, array: np.ndarray, ours: tuple[str, ...], sizes: Mapping[str, int]) -> np.ndarray:
        """Converts the tensor to the axes of the pretrax weight (a view)."""
        split = array.reshape([sizes[letter] for letter in self.letters])
        return split.transpose([self.letters.index(letter) for letter in ours])

    def to_theirs(self, array: np.ndarray, ours: tuple[str, ...], sizes: Mapping[str, int]) -> np.ndarray:
        """Converts the pretrax weight to the axes of the tensor."""
        return array.transpose([ours.index(letter) for letter in self.letters]).reshape(self.shape(sizes))


@dataclass(frozen=True)
class TensorRow:
    """A parsed row of a table: a tensor's name and its parts, in order along `axis`."""

    name: str
    parts: tuple[TensorPart, ...]
    axis: int

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        shapes = [part.shape(sizes) for part in self.parts]
        return tuple(
            sum(shape[axis] for shape in shapes) if axis == self.axis else size for axis, size in enumerate(shapes[0])
        )

    def slices(self, part: TensorPart, sizes: Mapping[str, int]) -> tuple[slice, ...]:
        """The slices of a part in the tensor."""
        before = sum(other.shape(sizes)[self.axis] for other in self.parts[: self.parts.index(part)])
        along = slice(before, before + part.shape(sizes)[self.axis])
        return tuple(along if axis == self.axis else slice(None) for axis in range(len(part.axes)))


def rows(table: NameTable) -> list[TensorRow]:
    """Parses the rows of a table."""
    found = []
    for name, row in table.rows.items():
        texts, axis = ((row,), 0) if isinstance(row, str) else (row.parts, row.axis)
        found.append(TensorRow(name, tuple(TensorPart.parse(text) for text in texts), axis))
    return found
