"""Expected memory of a training step per device, from sizes, before compiling; and the memory of a compiled step.

The step has three phases, and the one that needs most memory decides. Letters: T tokens per device and pass, M d_model,
H heads, K key-value heads, D head, F feed-forward, V vocabulary, t tensor-parallel devices. w is the width of the
compute dtype. Weights, moments and gradients are f32 and sharded over d, t, p and e as their types say.

    always         weights and moments. They are donated: the new ones replace them. Moments in host memory are on the
                   device in the phase `update` only.
    copies         made before the loop over the layers, and held during it. TPUs: the shards of all layers in the
                   compute dtype. GPUs: the shards of w_o and w_down, transposed, in f32. Unrolled layers: every weight
                   in the compute dtype if all activations are kept; each layer's slice of the stack if layers are
                   recomputed. CPUs: also the unembedding in the compute dtype, and, except with AdamW, the moments:
                   XLA for CPUs computes the new ones once more inside the update of the weights, from a copy of the
                   old ones.
    activations    kept by the forward pass for the backward pass, per layer: its input, M / t, and the kept named
                   values: 2 H D + 2 K D for attention, and H sums of its softmax in f32, M for its output, 2 F (without
                   a gate F). If everything is kept (one device), also the results of norms and of the activation: 4 M +
                   2 (H + K) D + 3 F, as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4), without dropout.
                   The [L, L] matrix is kept only in sequences of up to 512 tokens without a fused kernel, in f32 and in
                   the compute dtype. On CPUs, 7 M are in f32, 3 M in the compute dtype, and there are 3 (H + K) D.

    loss           activations, the logits V / t, which their gradient replaces, the normed hidden states, and the
                   gathered unembedding. CPUs: the logits in f32 too, and a transposed copy of their gradient. Unrolled,
                   those of one prediction at a time; in a loop, of all modules of multi-token prediction. With a loss
                   in chunks: the logits of one chunk, and the gradient of the unembedding, in f32 and not sharded over
                   d, until the layers are done.
    layers         activations, the gradients of the layers, and the values of one layer that its backward pass holds at
                   the same time: 2 (H + K) D of attention; up, gate and the gradients of these and of the activation, 5
                   F (on TPUs, which fuse elementwise functions into products: up, gate and one gradient, 3 F); six
                   hidden states M, three of them not sharded over t. Over d: the gathered weights of the layer, and
                   their gradients in f32 before they are scattered. XLA for GPUs scatters those of a layer during the
                   next layer; XLA for TPUs scatters some earlier, so that about three quarters exist at the same time.
                   In a loop also the gradient of the logits: XLA multiplies it by the hidden states only after the
                   loop. (On TPUs not always: one step of benchmarks/memory.py is predicted 17 % too large.)
    update         the gradients of all weights; after a loop also those of both vocabulary tables, in f32 and not
                   sharded over d, and of the logits.

With accumulation, the gradients summed so far exist in every phase, in f32. In a pipeline, each stage holds the kept
values of all its passes, a slice of them for the current pass, every micro-batch at the first and last stage, the
logits of one, and the gradients of its layers twice: those of the pass, and their sum. In the schedule 1f1b each stage
holds the inputs of some chunks, the kept values of one, the gradients of its layers and those of one chunk, and the
vocabulary tables with their gradients, not sharded over d. With several rounds it also holds the matrices of its chunks
in the compute dtype. An exchange over e keeps nothing.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pretrax.amounts import size
from pretrax.cost.saved import offloaded_activations, saved_values
from pretrax.cost.step_facts import BYTES, StepFacts
from pretrax.cost.teacher import teacher_memory
from pretrax.model.architecture import CHUNK, Architecture
from pretrax.model.expert_slots import ROOM

# Field of `Memory`: its text
IN_HOST = {
    'host': 'offloaded',
    'snapshot': 'copy of the state for a checkpoint',
    'island': 'weights, momentum and differences of the federation',
}
# Bytes of a process on a CPU besides its arrays, measured for GPT-2 124M: Python and JAX, and while it compiles
_OF_PROCESS, _OF_COMPILER = 450_000_000, 1_350_000_000
_UNWRITTEN = 64 << 20  # bytes of a state, or an eighth of it, that a step on CPUs may copy: checkpoint/state_files.py


@dataclasses.dataclass(frozen=True)
class Memory:
    """Expected bytes per device in the phase that needs most, by purpose."""

    weights: int  # f32, sharded as their types say
    moments: int  # optimizer state, f32, sharded as the weights
    copies: int  # of weights, in another dtype or layout
    activations: int  # kept by the forward pass for the backward pass
    gradients: int  # f32
    head: int  # logits, their gradient and their inputs
    layer: int  # the current layer: its values, its weights and their gradients
    teacher: int = 0  # of distillation: its weights, and what its forward pass holds in this phase
    host: int = 0  # in host memory: offloaded activations and parts of the state
    snapshot: int = 0  # in host memory while a checkpoint is written: a copy of the state; on CPUs of a part of it
    island: int = 0  # in host memory: see `with_island`
    phase: str = dataclasses.field(default='', compare=False)  # the phase that needs most

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes of device memory by purpose."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in ('phase', *IN_HOST)}

    def process_text(self, n_devices: int) -> str:
        """The memory of a process with CPU devices, as text: while it steps, saves and compiles."""
        stepping = n_devices * (self.total + self.island) + _OF_PROCESS
        saving, compiling = stepping + n_devices * self.snapshot, n_devices * (self.weights + self.moments)
        return (
            f'the process: about {size(stepping)} while it steps, {size(saving)} while it saves, '
            f'{size(compiling + _OF_COMPILER)} while it compiles'
        )

    def __str__(self) -> str:
        """One line, largest part first: 'about 3.1 GB per device: activations 1.9 GB, weights 0.5 GB, ...'."""
        parts = sorted(self.parts().items(), key=lambda part: -part[1])
        in_host = [f'{text} {size(n)}' for name, text in IN_HOST.items() if (n := getattr(self, name))]
        return (
            f'about {size(self.total)} per device: '
            + ', '.join(f'{name} {size(n)}' for name, n in parts if n)
            + ('; besides, in host memory: ' + ', '.join(in_host) if in_host else '')
        )


def expected_memory(arch: Architecture, n_params: int, step: StepFacts) -> Memory:
    """Expected memory per device.

    Args:
        arch: the decoder.
        n_params: all parameters of the model, and the rows that pad its vocabulary.
        step: how its step runs.
    """
    n = {axis: step.mesh.get(axis, 1) for axis in 'rdectp'}
    width, t, whole = BYTES[step.compute], n['t'], n['d'] == 1
    predictions, arch = 1 if step.unrolled else 1 + arch.multi_token.n_layers, arch.with_modules
    saved, unrolled, platform = step.saved, step.unrolled, step.platform
    d_model, n_experts = arch.d_model, arch.experts.n_experts
    d_head = arch.mean_of_heads(lambda heads: heads.d_value)
    with_experts = arch.n_expert_layers / arch.n_layers  # share of the layers
    d_ff = (1 - with_experts) * arch.sizes['F']  # widths, averaged over the layers
    d_expert, d_shared = with_experts * arch.feed_forward.d_ff, with_experts * arch.experts.d_shared
    device_tokens = math.ceil(step.tokens / (n['r'] * n['d'] * n['e'] * n['c']))
    layers = math.ceil(arch.n_layers / n['p'])

    matrices = arch.feed_forward.n_matrices
    with_attention = arch.n_attention_layers / arch.n_layers
    with_state = arch.n_recurrent_layers / arch.n_layers
    keys, values = (
        arch.recurrent.n_key_heads * arch.recurrent.d_key,
        arch.recurrent.n_heads * arch.recurrent.d_head,
    )  # of a state
    of_attention = arch.mean_d_head * (1 + arch.attention.gate / 2) * arch.attention.n_heads + arch.mean_kv_width
    of_state = keys + 1.5 * values
    heads = with_attention * of_attention + with_state * of_state  # half of the columns of the mixer's matrices
    mixer = with_attention * arch.mean_attention_params + with_state * 2 * d_model * of_state
    dense = mixer + d_model * matrices * d_shared
    rows = (
        n_experts * d_expert / n['e'] + d_ff
    )  # of w_down: those of the experts on this device, and of the feed-forward
    all_layers = arch.n_layers * (dense + matrices * d_model * (n_experts * d_expert + d_ff))
    latent = arch.attention.latent_params(arch.d_model) * (1 - 1 / t)  # what is not sharded over t
    of_layers = layers * ((dense + matrices * d_model * rows) / t + latent) / n['d']
    largest = max(
        arch.sizes['F'] * (arch.n_dense_layers > 0), n_experts * arch.feed_forward.d_ff / n['e'] + arch.experts.d_shared
    )
    one_layer = (max(arch.attention_params, 2 * d_model * of_state) + d_model * matrices * largest) / t + latent
    shard = of_layers + (n_params - all_layers) / (n['d'] * t)

    inner = d_ff + arch.experts.experts_per_token * d_expert + d_shared  # width that a token visits
    exchanged = n['e'] > 1 and n_experts > 1
    near = d_ff + d_shared if exchanged else inner  # the part that can be kept: an exchange keeps nothing
    moe = arch.experts.experts_per_token * d_model * with_experts  # each token's row, once per expert that it visits
    far = ROOM if exchanged else 1.0
    named = {name: one.values for name, one in saved_values(arch, step).items()}
    everything = (
        2 * arch.n_norms * d_model
        + (3 if arch.attention.qk_norm != 'none' else 2) * heads
        + matrices * near
        + (0 if exchanged else moe)
    )
    if saved is None:
        kept = everything + step.probabilities * arch.attention.n_heads * with_attention * (4 / width + 1)
        if platform == 'cpu':  # what norms and the residual stream need is in f32
            kept += ((3 * arch.n_norms + 1) * 4 / width + 3 - 2 * arch.n_norms) * d_model + heads
    else:
        kept = sum(named[name] for name, choice in saved.items() if choice == 'keep' and name in named)
        kept += d_model if saved.get('input', 'keep') == 'keep' else 0
    activations = width * device_tokens * layers * kept / t
    if n['p'] > 1:  # kept values of every pass, the current chunk, and the micro-batches at the ends
        ticks, stream = step.rounds * step.micro_batches + n['p'] - 1, width * device_tokens * d_model / t
        chunk = (
            width * device_tokens * layers / step.rounds * (sum(named.values()) + d_model if saved == {} else kept) / t
        )
        activations = ticks * (stream if saved == {} else chunk) + chunk + 2 * step.micro_batches * stream
        if step.inputs is not None:  # the inputs of some chunks, x and its gradient between stages, the current chunk
            activations = (step.inputs + 2) * stream + chunk

    copies = 0.0
    if unrolled:
        copies = (width if saved is None else 4) * of_layers if width < 4 or saved is not None else 0.0
    elif platform == 'tpu' or (step.inputs is not None and step.rounds > 1):
        copies = width * of_layers if width < 4 else 0.0
    elif platform != 'cpu':
        columns = with_attention * d_head * arch.attention.n_heads + with_state * values
        copies = 4 * layers * d_model * (columns + rows) / t / n['d']

    table = arch.padded_vocab_size * d_model / t
    if platform == 'cpu':
        copies += step.update.copied + (width * table if width < 4 else 0.0)
    added_up = 4 * table if step.loss_chunks > 1 else 0.0  # gradient of the unembedding, summed over the chunks
    logits = predictions * arch.padded_vocab_size / t / step.loss_chunks  # those of each token predicted
    on_cpu = (4 + width) * device_tokens * logits if platform == 'cpu' else 0.0
    head = width * device_tokens * (logits + d_model) + on_cpu + added_up
    # rows exchanged over e: in the order of devices, as received, in the order of experts, and the results of these
    inside = platform == 'tpu'  # elementwise functions are fused into products
    wide = (2 if inside else 4) + arch.feed_forward.gated
    mixing = 2 * of_attention if arch.attention.n_heads else 0
    if arch.has_states:  # in chunks: decays and scores of pairs, queries, keys, values and states, in f32
        pairs = 4 * CHUNK + 4 * arch.recurrent.d_key + 6 * arch.recurrent.d_head
        states = 2 * arch.recurrent.d_key * arch.recurrent.d_head / CHUNK
        mixing = max(mixing, 4 / width * arch.recurrent.n_heads * (pairs + states))
    of_dense = arch.sizes['F'] if arch.n_dense_layers else 0
    widest = max(
        of_dense,
        (arch.experts.experts_per_token * arch.feed_forward.d_ff + arch.experts.d_shared) if with_experts else 0,
    )  # of a layer
    rows_of_experts = arch.experts.experts_per_token * d_model * (with_experts > 0)
    at_work = mixing + far * (wide * widest + (4 if exchanged else 1) * rows_of_experts)
    layer = (
        width
        * device_tokens
        * (at_work / t + (3 / t + 3) * d_model + (arch.attention.latent.q_rank + arch.sizes['C_kv']) * (t > 1))
    )
    if unrolled and saved is None:
        layer = width * device_tokens * (arch.feed_forward.n_matrices * widest + 3 * d_model)
    if not whole:
        layer += (width + (3 if inside else 4)) * one_layer
    earlier = 4 * shard if step.passes > 1 else 0.0
    after_loop = 0.0 if unrolled or n['p'] > 1 else added_up or head
    summed = 2.0 if n['p'] > 1 else 1.0  # a stage holds the gradients of one pass and their sum
    if (
        step.inputs is not None
    ):  # those of a chunk; and, outside the layers, those of the vocabulary tables, and the tables
        summed = 1 + 1 / step.rounds
        earlier += 2 * (4 + width) * table
        head /= n['p']

    teacher = teacher_memory(step)
    phases = {
        'loss': {
            'activations': activations,
            'gradients': earlier,
            'head': head + (0 if whole else width * table),
            'layer': 0.0,
            'teacher': teacher.loss,
        },
        'layers': {
            'activations': activations,
            'gradients': earlier + summed * 4 * of_layers,
            'head': after_loop,
            'layer': layer,
        },
        'update': {
            'activations': 0.0,
            'gradients': earlier + 4 * of_layers + 4 * (n_params - all_layers) / t,
            'head': after_loop,
            'layer': 0.0,
        },
    }
    if step.teacher is not None:
        phases['teacher'] = {'activations': activations, 'gradients': earlier, 'teacher': teacher.layer}
    offloaded = step.update.state if 'optimizer' in step.in_host else 0.0
    phases['update']['moments'] = offloaded
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    parts = {'weights': 4 * shard, 'copies': copies} | dict.fromkeys(('head', 'layer', 'moments', 'teacher'), 0.0)
    parts |= phases[phase]
    parts['moments'] += step.update.state - offloaded
    parts['teacher'] += teacher.weights
    parts['host'] = offloaded + 4 * shard * ('weights' in step.in_host) + offloaded_activations(arch, step)
    whole = parts['snapshot'] = 4 * shard + step.update.state
    if platform == 'cpu':
        parts['snapshot'] = min(whole, max(_UNWRITTEN, whole / 8))
    return Memory(**{name: math.ceil(n) for name, n in parts.items()}, phase=phase)


def with_island(memory: Memory, arrays: float, mesh: Mapping[str, int], devices_per_host: int) -> Memory:
    """Adds what an island of a federation holds in host memory: `arrays` as large as the weights."""
    hosts, held, _ = shards_on_hosts(mesh, devices_per_host)
    per_device = arrays * memory.weights * held * hosts / math.prod(mesh.values())
    return dataclasses.replace(memory, island=math.ceil(per_device))


def shards_on_hosts(mesh: Mapping[str, int], devices_per_host: int) -> tuple[int, int, int]:
    """The hosts of a mesh, and how many different shards of the weights each of them has, and all of them have."""
    devices = math.prod(mesh.values())
    shards = devices // mesh['r'] // mesh['c']
    return max(1, devices // devices_per_host), min(devices_per_host, shards), shards


def memory_of(compiled: Any) -> int:
    """Bytes per device of a compiled step while it runs: the program, arguments, temporaries, and results that do not
    replace an argument.

    This is not the sum of the classes of `memory_analysis`: libtpu counts results that replace an argument as
    temporaries, and overestimates large steps (14.2 GB instead of 10.3 GB; benchmarks/lab-notes.md).
    """
    stats = compiled.memory_analysis()
    return stats.total_allocation_bytes + stats.generated_code_size_in_bytes


def temporaries_of(compiled: Any) -> int:
    """Bytes that XLA allocates for neither arguments nor results."""
    stats = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.total_allocation_bytes - stats.argument_size_in_bytes - results
