"""Predicts the time of a step from sizes, before compiling: each phase by the resource that limits it.

A phase takes as long as the slowest of its products (FLOPs over the speed of the matrix units), its memory traffic (bytes over
bandwidth) and its communication (bytes over the link). The gathers and reductions of weights over `d` overlap with the
products of their layer. All other communication is exposed.

Per device and step, with T tokens and P parameters of the layers that multiply an activation, sharded over all devices:

    products     6 P T FLOPs; 8 P T if layers are recomputed, or for the unembedding if the loss is in chunks
    attention    forward 2 products of the causal half, backward 5 (Dao 2023, arXiv:2307.08691, section 3.1); forward again
                 if it is recomputed
    memory       norms, residuals, activation, rotation: 10 M + 3 F + 2 (H + 2 K) D values per token and layer, three times
                 (forward, backward twice); the logits four times, five in chunks; the optimizer 28 bytes per parameter
    over d       weights in the compute dtype, gathered twice per pass (recomputation uses the second gather), and their
                 gradients, scattered once
    over t       activations: a layer gathers two and scatters two in the forward pass, the same in the backward pass, and
                 gathers two again for the gradients of the weights
    over r       gradients in f32, once per step, over the slow network; nothing overlaps
    over e       each token's row to its experts and back, forward and backward
    over c       keys and values to the c - 1 other devices, and their gradients
    over p       the bubble, (p - 1) / (rounds passes + p - 1) of the step
"""

import dataclasses

from pretrax.model.architecture import Architecture
from pretrax.scale.devices import Device
from pretrax.scale.flops import causal_keys
from pretrax.scale.links import LINKS
from pretrax.scale.step_facts import StepFacts


@dataclasses.dataclass(frozen=True)
class Reach:
    """Share of the peak that is reached in practice: by products, by attention, and of the memory bandwidth."""

    products: float
    attention: float
    memory: float


# H200: 770 to 800 of 989 TFLOP/s in an 8192^3 product; cuDNN, 128 wide, causal, 591 forward and 474 backward at 4096
# tokens (NVIDIA's figures); copies at 4.3 of 4.8 TB/s. TPU: large products nearly fill the systolic array, and
# attention waits for the vector unit.
REACH_GPU = Reach(0.79, 0.52, 0.9)
REACH_TPU = Reach(0.92, 0.45, 0.9)
_WIDTH = 2  # bytes of bf16


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the step: seconds that it takes, seconds that do not overlap with other work, and what limits it."""

    name: str
    seconds: float
    exposed: float
    bound: str


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step by phases. `seconds` is the sum of their exposed times, with the bubble."""

    phases: tuple[Phase, ...]
    seconds: float
    mfu: float

    @property
    def bound(self) -> str:
        """The resource that limits most of the time."""
        times: dict[str, float] = {}
        for phase in self.phases:
            times[phase.bound] = times.get(phase.bound, 0.0) + phase.exposed
        return max(times, key=lambda name: times[name])


def predict(
    arch: Architecture, n_params: int, sequence_length: int, device: Device, step: StepFacts
) -> Prediction | None:
    """Predicts the time of a step in bf16; None for a device whose links are not known.

    Args:
        arch: the decoder.
        n_params: all parameters of the model.
        sequence_length: tokens per sequence.
        device: each device of the mesh.
        step: how it runs.
    """
    link, bandwidth = LINKS.get(device.name), device.bandwidth
    if link is None or bandwidth is None:
        return None
    tokens, passes = step.tokens * step.all_passes, step.all_passes
    recompute, loss_again = step.recomputes, step.loss_chunks > 1
    keys = sum(causal_keys(window, sequence_length) for window in arch.windows) / arch.n_layers
    experts_per_token = arch.experts_per_token if arch.n_experts else 0
    head = arch.padded_vocab_size * arch.d_model
    matmul_params = arch.n_matmul_params - head
    reach = REACH_TPU if device.name.startswith('TPU') else REACH_GPU
    r, d, e, c, t, p = (step.mesh.get(axis, 1) for axis in 'rdectp')
    devices = r * d * e * c * t * p
    here = tokens / (r * d * e * c)  # tokens per device
    layers = arch.n_layers / p
    shared = matmul_params * tokens / devices
    products = (8 if recompute else 6) * shared / (device.peak('bf16') * reach.products)
    scores = 4 * keys * arch.n_heads * arch.d_head * here * layers / t * (1 + 2.5 + recompute)
    attention = scores / (device.peak('bf16') * reach.attention)
    values = 10 * arch.d_model + (
        3 * arch.d_ff * max(1, experts_per_token) + 2 * (arch.n_heads + 2 * arch.n_kv_heads) * arch.d_head
    )
    elementwise = _WIDTH * values * here / t * layers * (4 if recompute else 3) / (bandwidth * reach.memory)
    logits = (5 if loss_again else 4) * _WIDTH * arch.padded_vocab_size * here / t / p / (bandwidth * reach.memory)
    unembed = (8 if loss_again else 6) * head * tokens / devices / (device.peak('bf16') * reach.products)
    update = 28 * n_params / (d * e * t * p) / (bandwidth * reach.memory)

    def ring(n: float, size: int) -> float:
        return n * (size - 1) / size / link.inside

    weights = _WIDTH * n_params / (e * t * p)
    over_d = passes * ring(3 * weights, d)
    over_t = ring(10 * layers * _WIDTH * here * arch.d_model, t)
    over_r = 2 * 4 * n_params / (d * e * t * p) * (r - 1) / r / link.between
    over_e = ring(4 * layers * _WIDTH * here * experts_per_token * arch.d_model, e)
    over_c = (c - 1) * layers * 6 * _WIDTH * here * arch.n_kv_heads * arch.d_head / t / link.inside
    hidden = max(0.0, over_d - (products + attention + elementwise))
    phases = [
        Phase('products of the layers', products, products, 'products'),
        Phase('attention', attention, max(attention, over_c), 'attention'),
        Phase('norms, activations, rotation', elementwise, elementwise, 'memory'),
        Phase('head and loss', unembed + logits, unembed + logits, 'products' if unembed > logits else 'memory'),
        Phase('optimizer', update, update, 'memory'),
        Phase('weights and gradients over d', over_d, hidden, 'd'),
        Phase('activations over t', over_t, over_t, 't'),
        Phase('tokens to experts over e', over_e, over_e, 'e'),
        Phase('keys and values over c', over_c, 0.0, 'c'),
        Phase('gradients over r', over_r, over_r, 'r'),
    ]
    busy = sum(phase.exposed for phase in phases)
    if p > 1:
        bubble = busy * (p - 1) / (step.rounds * passes)
        phases.append(Phase('pipeline bubble', bubble, bubble, 'p'))
        busy += bubble
    used = [phase for phase in phases if phase.seconds]
    per_token = 6 * (matmul_params + head) + 12 * keys * arch.n_heads * arch.d_head * arch.n_layers
    return Prediction(tuple(used), busy, per_token * tokens / (busy * devices * device.peak('bf16')))
