"""About how much memory a training step needs on each device, from sizes alone, before anything is compiled; and how much a
compiled one takes.

What XLA holds at once is largest in one of three phases, and the phase that takes most is the answer. Letters: T tokens of a
device and pass, M d_model, H heads, K key-value heads, D head, F feed-forward, V vocabulary, t the tensor parallel devices. w is
the width of the compute dtype; weights, moments and gradients are f32 and shared out over d, t, p and e as their types say.

    always         weights and moments. They are donated: the new ones take their place
    copies         made before the loop over the layers, and held through it. On TPUs all layers' shards in the compute dtype; on
                   GPUs the shards of w_o and w_down turned over, in f32, as their product wants them. Without a loop, where all
                   is kept, every weight in the compute dtype; where layers are recomputed, each layer's slice of the stack
    activations    kept by the forward pass for the backward pass, in every layer: its input, M / t, and what is named and kept:
                   2 H D + 2 K D for attention, M for its output, 2 F (without a gate F). Where nothing is dropped (one device)
                   also the results of norms and of the activation: 4 M + 2 (H + K) D + 3 F, as Korthikanti et al. 2022
                   (arXiv:2205.05198, section 4) have it, without dropout and without the [L, L] matrix, which no kernel stores

    loss           activations, the logits V / t, whose gradient takes their place, the normed stream, and the gathered unembedding
                   In chunks the logits of one, and the gradient of the unembedding, whole in f32, until the layers are done
    layers         activations, the gradients of the layers, and of one layer: its values as far as the backward pass holds them at
                   once (made again or sliced out of what was kept): 2 (H + K) D of attention; up, gate and the gradients of
                   these and of the activation, 5 F (TPUs have functions of elements inside of products: up, gate and one
                   gradient, 3 F); six streams M, half of them whole along t. Over d its weights gathered, and their gradients
                   in f32 before they are scattered: XLA for GPUs scatters those of a layer while it does the next one, for
                   TPUs some of them earlier, so that about three quarters are there at once
                   In a loop also the gradient of the logits: XLA multiplies it by the stream only after the loop (for TPUs
                   mostly: benchmarks/memory.py has a step in which it does so before, and which is predicted 17 % too large)
    update         the gradients of all weights; after the loop those of both vocabulary tables, whole in f32, and of the logits

With accumulation the gradients summed so far are there too, in f32, in every phase. In a pipeline each stage holds the kept
values of all its passes, those of the pass at work sliced out of them, every micro-batch at the entrance and the exit, the
logits of one, and the gradients of its layers twice: of the pass, and of all. Of an exchange over e nothing is kept.
"""

import dataclasses
import math
from typing import Any

from pretrax.model.architecture import Architecture
from pretrax.scale.step_facts import StepFacts

BYTES = {'f32': 4, 'bf16': 2}
ROOM = 1.25  # places of an exchange over an even load's, as in model/exchange.py


@dataclasses.dataclass(frozen=True)
class Memory:
    """Expected bytes on one device when they are most, by what they are for."""

    weights: int  # f32, sharded as their types say
    moments: int  # optimizer state, f32, sharded as the weights
    copies: int  # of weights, in another dtype or layout
    activations: int  # kept by the forward pass for the backward pass
    gradients: int  # f32
    head: int  # logits, their gradient, and what they are made of
    layer: int  # one layer at work: its values, its weights and their gradients
    phase: str = dataclasses.field(default='', compare=False)  # in which it is most

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != 'phase'}

    def __str__(self) -> str:
        """One line, largest part first: 'about 3.1 GB a device: activations 1.9 GB, weights 0.5 GB, ...'."""
        parts = sorted(self.parts().items(), key=lambda part: -part[1])
        return f'about {size(self.total)} a device: ' + ', '.join(f'{name} {size(n)}' for name, n in parts if n)


def expected_memory(arch: Architecture, n_params: int, step: StepFacts) -> Memory:
    """Expected memory per device.

    Args:
        arch: the decoder.
        n_params: all parameters of the model.
        step: how its step runs.
    """
    n = {axis: step.mesh.get(axis, 1) for axis in 'rdectp'}
    width, t, whole = BYTES[step.compute], n['t'], n['d'] == 1
    saved, unrolled, platform = step.saved, step.unrolled, step.platform
    d_model, d_head, d_ff, d_shared = arch.d_model, arch.d_head, arch.d_ff, arch.d_shared
    n_experts, experts_per_token = (arch.n_experts, arch.experts_per_token) if arch.n_experts else (1, 1)
    device_tokens = math.ceil(step.tokens / (n['r'] * n['d'] * n['e'] * n['c']))
    layers = math.ceil(arch.n_layers / n['p'])

    matrices = 3 if arch.gated else 2
    heads = d_head * (arch.n_heads + arch.n_kv_heads)
    dense = d_model * (2 * heads + matrices * d_shared)
    rows = n_experts * d_ff / (n['e'] if n_experts > 1 else 1)  # of w_down: experts of this device, or the feed-forward
    experts = matrices * d_model * rows
    one_layer = (dense + experts) / t
    all_layers = arch.n_layers * (dense + matrices * d_model * n_experts * d_ff)
    of_layers = layers * one_layer / n['d']
    shard = of_layers + (n_params - all_layers) / (n['d'] * t)

    inner = experts_per_token * d_ff + d_shared  # that a token visits
    exchanged = n['e'] > 1 and n_experts > 1
    near = d_shared if exchanged else inner  # of which something can be kept: of an exchange nothing is
    moe = experts_per_token * d_model if n_experts > 1 else 0  # each token's row, once for each of its experts
    far = ROOM if exchanged else 1.0
    named = {
        'q': d_head * arch.n_heads, 'k': d_head * arch.n_kv_heads, 'v': d_head * arch.n_kv_heads, 'attention': d_head * arch.n_heads,
        'attention_out': d_model, 'up': near, 'gate': near if arch.gated else 0,
        'mlp_out': d_model if arch.n_norms == 4 else 0,  # read by a norm only
    }  # fmt: skip
    everything = (
        2 * arch.n_norms * d_model
        + (3 if arch.qk_norm != 'none' else 2) * heads
        + matrices * near
        + (0 if exchanged else moe)
    )
    if saved is None:
        kept = everything
    else:
        kept = sum(named[name] for name, choice in saved.items() if choice == 'keep' and name in named)
        kept += d_model if saved.get('input', 'keep') == 'keep' else 0
    activations = width * device_tokens * layers * kept / t
    if n['p'] > 1:  # of every pass what is kept of a chunk, and the chunk at work; what enters and leaves
        ticks, stream = step.rounds * step.micro_batches + n['p'] - 1, width * device_tokens * d_model / t
        chunk = (
            width * device_tokens * layers / step.rounds * (sum(named.values()) + d_model if saved == {} else kept) / t
        )
        activations = ticks * (stream if saved == {} else chunk) + chunk + 2 * step.micro_batches * stream

    copies = 0.0
    if unrolled:
        copies = (width if saved is None else 4) * of_layers if width < 4 or saved is not None else 0.0
    elif platform == 'tpu':
        copies = width * of_layers if width < 4 else 0.0
    elif platform != 'cpu':
        copies = 4 * layers * d_model * (d_head * arch.n_heads + rows) / t / n['d']

    table = arch.padded_vocab_size * d_model / t
    added_up = 4 * table if step.loss_chunks > 1 else 0.0  # the gradient of the unembedding, over the chunks
    head = width * device_tokens * (arch.padded_vocab_size / t / step.loss_chunks + d_model) + added_up
    # rows that travel over e: in the order of devices, as they arrive, in that of experts, and what these make of them
    inside = platform == 'tpu'  # of products: functions of elements
    wide = (2 if inside else 4) + arch.gated
    at_work = 2 * heads + far * (wide * inner + (4 if exchanged else 1) * moe)
    layer = width * device_tokens * (at_work / t + (3 / t + 3) * d_model)
    if unrolled and saved is None:
        layer = width * device_tokens * ((3 if arch.gated else 2) * inner + 3 * d_model)
    if not whole:
        layer += (width + (3 if inside else 4)) * one_layer
    earlier = 4 * shard if step.passes > 1 else 0.0
    after_loop = 0.0 if unrolled or n['p'] > 1 else added_up or head
    summed = 2 if n['p'] > 1 else 1  # gradients of all passes of a stage, and of one

    phases = {
        'loss': {'activations': activations, 'gradients': earlier, 'head': head + (0 if whole else width * table), 'layer': 0.0},
        'layers': {
            'activations': activations, 'gradients': earlier + summed * 4 * of_layers, 'head': after_loop, 'layer': layer,
        },
        'update': {
            'activations': 0.0, 'gradients': earlier + 4 * of_layers + 4 * (n_params - all_layers) / t,
            'head': after_loop, 'layer': 0.0,
        },
    }  # fmt: skip
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    parts = {'weights': 4 * shard, 'moments': 4 * step.moments * shard, 'copies': copies} | phases[phase]
    return Memory(**{name: math.ceil(n) for name, n in parts.items()}, phase=phase)


def memory_of(compiled: Any) -> int:
    """Bytes that a compiled step takes on each device while it runs: the program, and all that XLA allocates for arguments,
    temporaries, and results that do not take the place of an argument.

    Not the sum of `memory_analysis`'s classes: libtpu's class of temporaries counts results that take an argument's place,
    and more than is ever allocated where a step is large (14.2 GB for one of 10.3 GB; docs/lab-notes.md).
    """
    stats = compiled.memory_analysis()
    return stats.total_allocation_bytes + stats.generated_code_size_in_bytes


def temporaries_of(compiled: Any) -> int:
    """Bytes of what XLA allocates beside arguments and results."""
    stats = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.total_allocation_bytes - stats.argument_size_in_bytes - results


def memory_here(device: Any) -> int | None:
    """Bytes that a program may take of a device that is here; None: it does not say."""
    return (device.memory_stats() or {}).get('bytes_limit') if device.platform != 'cpu' else None


def size(n_bytes: float) -> str:
    """1_500_000_000 -> '1.5 GB', decimal, as a reader compares it with the makers' figures."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if n_bytes < 999.5:
            return f'{n_bytes:.3g} {unit}'
        n_bytes /= 1000
    return f'{n_bytes:.3g} TB'
