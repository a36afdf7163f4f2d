"""About how much memory a training step needs on each device, from sizes alone, before anything is compiled.

It answers 'will it fit, and what is large'. The compiler's own figure, to be had after compilation, is exact, and
usually 1.0 to 1.4 times this one: buffers of the backward pass come on top.
Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), without dropout and without the stored
[L, L] attention matrix, as no attention kernel of ours stores one. What one layer keeps for one token, in values of
the compute dtype (M d_model, H heads, K key-value heads, D head, F feed-forward):

    two norms        2 M in, 2 M out; four of them, before and after: 4 M in, 4 M out
    attention        H D queries, 2 K D keys and values, H D output; H D + K D more where queries and keys are normed
    feed-forward     2 F: before and after the activation; gated (SwiGLU): 3 F; of experts k (3 F + M) for k a token

For GPT-2 (H D = K D = M, F = 4 M) in bf16 that is 32 M bytes, the paper's 34 M less two dropout masks. Sequence
parallelism divides all of it by t. The loss holds the logits and their gradient, sharded over the vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

BYTES = {'f32': 4, 'bf16': 2}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Expected bytes on one device, by what they are for."""

    weights: int  # f32, sharded over d and t
    moments: int  # optimizer state, f32, sharded as the weights
    gradients: int  # f32, sharded as the weights
    gathered: int  # weights in the compute dtype: this device's shard of all, and one layer of them gathered over d
    activations: int  # kept by the forward pass for the backward pass
    logits: int  # and their gradient

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        """One line, largest part first: 'about 3.1 GB a device: activations 1.9 GB, weights 0.5 GB, ...'."""
        parts = sorted(dataclasses.asdict(self).items(), key=lambda part: -part[1])
        return f'about {size(self.total)} a device: ' + ', '.join(f'{name} {size(n)}' for name, n in parts)


def expected_memory(
    *,
    n_params: int,
    n_layers: int,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    d_ff: int,
    vocab_size: int,
    gated: bool,
    tokens: int,
    mesh: Mapping[str, int],
    moments: float = 2.0,
    compute: Literal['bf16', 'f32'] = 'bf16',
    recompute: bool = False,
    n_experts: int = 1,
    experts_per_token: int = 1,
    d_shared: int = 0,
    n_norms: int = 2,
    qk_norm: bool = False,
    rounds: int = 1,
    micro_batches: int = 1,
) -> Memory:
    """Expected memory of one device.

    Args:
        n_params: all parameters of the model.
        tokens: tokens of one forward pass over the whole mesh (with accumulation: of one micro-batch, not the batch).
        mesh: size of each mesh axis; `d`, `t`, `p` shard weights, `e` those of experts, `r`, `d`, `e` the batch, `c` the
            sequence, missing is 1.
        moments: optimizer state over parameters, as f32: AdamW 2, Lion and momentum 1, Adafactor about 0.
        recompute: the backward pass runs each layer again and only the layers' inputs are kept.
        n_experts: feed-forwards of width d_ff in a layer, and `experts_per_token` that each token visits.
        d_shared: width of the feed-forward that every token visits beside them.
        n_norms: of the residual stream, in a layer.
        qk_norm: queries and keys are normed.
        rounds: of a pipeline (`p` > 1), in which every stage holds the activations of all its passes.
        micro_batches: that go through it in a step, each of `tokens`.
    """
    sizes = {axis: mesh.get(axis, 1) for axis in ('r', 'd', 'e', 'c', 't', 'p')}
    width = BYTES[compute]
    device_tokens = math.ceil(tokens / (sizes['r'] * sizes['d'] * sizes['e'] * sizes['c']))
    layers = math.ceil(n_layers / sizes['p'])
    matrices = 3 if gated else 2
    a_layers_experts = matrices * d_model * n_experts * d_ff if n_experts > 1 else 0
    experts = n_layers * a_layers_experts  # these alone are sharded over e
    shard = math.ceil((n_params - experts + experts // sizes['e']) / (sizes['d'] * sizes['t'] * sizes['p']))
    layer_params = d_model * (d_head * 2 * (n_heads + n_kv_heads) + matrices * (n_experts * d_ff + d_shared))
    layer_params -= a_layers_experts - a_layers_experts // sizes['e']

    heads = (3 if qk_norm else 2) * d_head * (n_heads + n_kv_heads)
    inner = 2 * n_norms * d_model + heads + matrices * (experts_per_token * d_ff + d_shared)
    if n_experts > 1:  # each token's row, once for each of its experts
        inner += experts_per_token * d_model
    kept = (layers * d_model + inner) if recompute else layers * inner
    if sizes['p'] > 1:  # of each pass through a chunk its input, and all micro-batches at the entrance and the exit
        passes, chunk = rounds * micro_batches + sizes['p'] - 1, math.ceil(layers / rounds)
        kept = (passes * d_model + chunk * inner) if recompute else passes * chunk * inner
        kept += 2 * micro_batches * d_model
    return Memory(
        weights=4 * shard,
        moments=math.ceil(4 * moments * shard),
        gradients=4 * shard,
        gathered=(width * shard if compute != 'f32' else 0) + width * layer_params // sizes['t'],
        activations=width * device_tokens * kept // sizes['t'],
        logits=2 * width * device_tokens * vocab_size // sizes['t'],
    )


def size(n_bytes: float) -> str:
    """1_500_000_000 -> '1.5 GB', decimal, as a reader compares it with the makers' figures."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if n_bytes < 999.5:
            return f'{n_bytes:.3g} {unit}'
        n_bytes /= 1000
    return f'{n_bytes:.3g} TB'
