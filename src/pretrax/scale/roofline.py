"""Predicts the time of a step from sizes, before compiling: each phase by the resource that limits it.

A phase takes as long as the slowest of its products (FLOPs over the speed of the matrix units), its memory traffic (bytes over
bandwidth) and its communication (bytes over the link). Other work hides communication as far as XLA's schedules of compiled
steps do on that hardware (`Exposed`); what is left is exposed, and adds to the step.

Per device and step, with T tokens and P parameters of the layers that multiply an activation, sharded over all devices:

    products     6 P T FLOPs; if layers are recomputed 2 P T more, without the last product of each layer; 8 P T for the
                 unembedding if the loss is in chunks
    attention    forward 2 products of the causal half, backward 5 (Dao 2023, arXiv:2307.08691, section 3.1), on TPUs 7 in
                 two kernels; forward again unless everything is kept
    memory       norms, residuals, activation, rotation: 10 M + 3 F + 2 (H + 2 K) D values per token and layer, three times
                 (forward, backward twice); the logits four times, five in chunks; the table of the embedding 16 bytes and
                 the optimizer 56 bytes per parameter, with the norms that are logged
    over d       weights in the compute dtype, gathered twice per pass (the backward pass needs them again), three times in
                 stages that are recomputed; tables once. Their gradients in f32, scattered once
    over t       activations: a layer gathers two and scatters two in the forward pass, the same in the backward pass, and
                 gathers two again for the gradients of the weights; the ends two each
    over r       gradients in f32, once per step, over the slow network
    over e       each token's row to its experts and back, forward and backward; gradients of all but the experts
    over c       heads to whole sequences and back, or keys and values around a ring, and their gradients; gradients
    over p       the hidden states of a micro-batch, and gradients of the tables;
                 the bubble, (p - 1) / (rounds passes + p - 1) of the step
"""

import dataclasses
from collections.abc import Mapping

from pretrax.model.architecture import Architecture
from pretrax.scale.devices import Device
from pretrax.scale.flops import causal_keys
from pretrax.scale.links import LINKS, axis_rates, link_of
from pretrax.scale.step_facts import StepFacts
from pretrax.scale.topology import Topology


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
_BEHIND = 0.25  # share of the products of a layer that do not depend on its collectives over t
BUBBLE = 'pipeline bubble'


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Share of the time of collectives in which the step waits: what XLA does not hide with the options that pretrax sets.

    Read from compiled steps: `benchmarks/schedule.py`.

    Attributes:
        tables: gathers of the embedding and the unembedding over d, at the start of a pass.
        table_sums: sums of their gradients.
        gathers: gathers of the weights of layers over d.
        sums: sums of the gradients of layers over d.
        gathers_beside, sums_beside: likewise, if the mesh has e, c, t or p too, so that d spans a part of a slice.
        last_sums: of the last layer of the backward pass alone.
        t, e, c, p: activations over that axis.
        copies: sums of gradients over the axes that replicate weights.
        layer_copies: those of layers over r, in a step of one pass.
        one_ring: those of the above over d that use one ring, although d spans several dimensions of a torus; tables_beside:
            the tables' gathers there.
        all_reduced: those of the sums above over d that are all-reduces, which send twice the bytes.
    """

    tables: float
    table_sums: float
    gathers: float
    sums: float
    gathers_beside: float
    sums_beside: float
    last_sums: float
    t: float
    e: float
    c: float
    p: float
    copies: float
    layer_copies: float
    one_ring: frozenset[str] = frozenset()
    all_reduced: frozenset[str] = frozenset()


_EXPOSED = {
    'GPU': Exposed(
        tables=0.9, table_sums=0.5, gathers=0.05, sums=0.0, gathers_beside=0.05, sums_beside=0.0, last_sums=0.75,
        t=0.6, e=0.7, c=0.3, p=1.0, copies=0.9, layer_copies=0.35,
    ),
    'SparseCore': Exposed(
        tables=1.0, table_sums=0.5, gathers=0.01, sums=0.11, gathers_beside=1.0, sums_beside=0.15, last_sums=0.0,
        t=0.37, e=1.0, c=1.0, p=0.4, copies=1.0, layer_copies=1.0,
        one_ring=frozenset({'sums', 'gathers_beside', 'tables_beside'}),
    ),
    'TPU v6e': Exposed(
        tables=1.0, table_sums=0.6, gathers=1.0, sums=0.4, gathers_beside=1.0, sums_beside=0.15, last_sums=0.0,
        t=0.37, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
    ),
    'TPU v5e': Exposed(
        tables=1.0, table_sums=1.0, gathers=0.07, sums=0.27, gathers_beside=0.25, sums_beside=1.0, last_sums=0.0,
        t=0.75, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
        one_ring=frozenset({'tables', 'gathers', 'sums'}), all_reduced=frozenset({'table_sums', 'sums'}),
    ),
    'TPU v5e, slices': Exposed(
        tables=1.0, table_sums=1.0, gathers=0.07, sums=1.0, gathers_beside=0.25, sums_beside=1.0, last_sums=0.0,
        t=0.75, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
        one_ring=frozenset({'tables', 'gathers'}), all_reduced=frozenset({'table_sums', 'sums'}),
    ),
    'TPU v4': Exposed(
        tables=1.0, table_sums=1.0, gathers=0.0, sums=1.0, gathers_beside=0.0, sums_beside=1.0, last_sums=0.0,
        t=1.0, e=1.0, c=0.0, p=1.0, copies=1.0, layer_copies=1.0,
        all_reduced=frozenset({'table_sums', 'sums'}),
    ),
}  # fmt: skip


def exposed_on(device: Device, slices: int = 1) -> Exposed:
    """What is not hidden on a device, of one slice or of several."""
    if not device.name.startswith('TPU'):
        return _EXPOSED['GPU']
    name = f'{device.name}, slices' if slices > 1 else device.name
    return _EXPOSED.get(name) or _EXPOSED.get(device.name) or _EXPOSED['SparseCore']


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the step: seconds that it takes, seconds that do not overlap with other work, and what limits it."""

    name: str
    seconds: float
    exposed: float
    bound: str

    @property
    def communicates(self) -> bool:
        return self.bound in 'rdectp' and self.name != BUBBLE


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step by phases. `seconds` is the sum of their exposed times, with the bubble."""

    phases: tuple[Phase, ...]
    seconds: float
    mfu: float

    @property
    def communication(self) -> float:
        """Seconds of communication."""
        return sum(phase.seconds for phase in self.phases if phase.communicates)

    @property
    def exposed(self) -> float:
        """Seconds in which the step waits for communication."""
        return sum(phase.exposed for phase in self.phases if phase.communicates)

    @property
    def bound(self) -> str:
        """The resource that limits most of the time."""
        times: dict[str, float] = {}
        for phase in self.phases:
            times[phase.bound] = times.get(phase.bound, 0.0) + phase.exposed
        return max(times, key=lambda name: times[name])


def predict(
    arch: Architecture,
    n_params: int,
    sequence_length: int,
    device: Device,
    step: StepFacts,
    topology: Topology | None = None,
) -> Prediction | None:
    """Predicts the time of a step in bf16; None for a device whose links are not known.

    Args:
        arch: the decoder.
        n_params: all parameters of the model.
        sequence_length: tokens per sequence.
        device: each device of the mesh.
        step: how it runs.
        topology: the shape and network of the hardware, if known.
    """
    link, bandwidth = link_of(topology) if topology else LINKS.get(device.name), device.bandwidth
    if link is None or bandwidth is None:
        return None
    tokens, passes = step.tokens * step.all_passes, step.all_passes
    recompute, loss_again = step.recomputes, step.loss_chunks > 1
    keys = sum(causal_keys(window, sequence_length) for window in arch.windows) / arch.n_layers
    experts_per_token = arch.experts_per_token if arch.n_experts else 0
    head = arch.padded_vocab_size * arch.d_model
    matmul_params = arch.n_matmul_params - head
    is_tpu = device.name.startswith('TPU')
    reach = REACH_TPU if is_tpu else REACH_GPU
    r, d, e, c, t, p = (step.mesh.get(axis, 1) for axis in 'rdectp')
    devices = r * d * e * c * t * p
    here = tokens / (r * d * e * c)  # tokens per device
    layers = arch.n_layers / p
    down = 0 if arch.n_experts or p > 1 else arch.n_layers * arch.d_model * arch.d_ff  # its product is not needed again
    products = (6 * matmul_params + 2 * recompute * (matmul_params - down)) * tokens / devices
    products /= device.peak('bf16') * reach.products
    scores = (
        4
        * keys
        * arch.n_heads
        * arch.d_head
        * here
        * layers
        / t
        * (1 + (3.5 if is_tpu else 2.5) + (step.saved is not None))
    )
    attention = scores / (device.peak('bf16') * reach.attention)
    values = 10 * arch.d_model + (
        3 * arch.d_ff * max(1, experts_per_token) + 2 * (arch.n_heads + 2 * arch.n_kv_heads) * arch.d_head
    )
    elementwise = _WIDTH * values * here / t * layers * (4 if recompute else 3) / (bandwidth * reach.memory)
    logits = (5 if loss_again else 4) * _WIDTH * arch.padded_vocab_size * here / t / p
    logits = (logits + passes * 16 * arch.padded_vocab_size * arch.d_model / t) / (bandwidth * reach.memory)
    unembed = (8 if loss_again else 6) * head * tokens / devices / (device.peak('bf16') * reach.products)
    update = 56 * n_params / (d * e * t * p) / (bandwidth * reach.memory)

    shares, rates = exposed_on(device, topology.slices if topology else 1), axis_rates(link, step.mesh, topology)

    def send(axis: str, n_bytes: float, rate: float | None = None) -> float:
        """Seconds to gather or scatter `n_bytes` over an axis."""
        n = step.mesh.get(axis, 1)
        return n_bytes * (n - 1) / n / (rate or rates[axis])

    beside = '' if e * c * t * p == 1 else '_beside'

    def over_d_of(what: str, n_bytes: float, times: float) -> tuple[float, float]:
        """Seconds over d, and those of them that are exposed."""
        twice = 2 if what in shares.all_reduced else 1
        one_ring = what in shares.one_ring or f'{what}{beside}' in shares.one_ring
        seconds = times * twice * send('d', n_bytes, min(link.inside, rates['d']) if one_ring else None)
        return seconds, getattr(shares, what) * seconds

    of_tables, of_layers, of_experts = _held(arch, n_params, step.mesh)
    gathers = 3 if recompute and p > 1 else 2  # a stage runs forward once more before each of its layers does
    turns = passes + (p - 1) / step.rounds  # in those of the bubble a stage computes too
    parts = [
        over_d_of('tables', _WIDTH * of_tables, step.passes),
        over_d_of('table_sums', 4 * of_tables, step.passes),
        over_d_of(f'gathers{beside}', gathers * _WIDTH * of_layers, turns),
        over_d_of(f'sums{beside}', 4 * of_layers, turns),
    ]
    over_d = sum(seconds for seconds, _ in parts)
    exposed_d = sum(waits for _, waits in parts) + over_d_of('last_sums', 4 * of_layers / layers, turns)[1]
    row = _WIDTH * here * arch.d_model  # bytes of the hidden states
    over_t = send('t', (10 * layers + 4) * row)
    over_r = 2 * send('r', 4 * (of_tables + of_layers) / d)
    rows_e = send('e', 4 * layers * row * experts_per_token)
    is_ring = arch.n_kv_heads % (c * t)  # model/context.py
    heads = (c if is_ring else 1) * arch.n_kv_heads + (0 if is_ring else arch.n_heads)
    columns_c = send('c', layers * 6 * _WIDTH * here * heads * arch.d_head / t)
    sums_c = 2 * send('c', 4 * (of_tables + of_layers) / d)
    sums_e = 2 * send('e', 4 * (of_tables + of_layers - of_experts) / d)
    hops_p, sums_p = 4 * row / t * step.rounds / link.inside * (p > 1), 2 * send('p', 4 * of_tables / d)
    exposed_t = max(shares.t * over_t, over_t - _BEHIND * (products + attention))
    exposed_d = max(exposed_d, over_d - (products + attention + elementwise))
    tables_r = 2 * send('r', 4 * of_tables / d)
    layers_r = shares.layer_copies if step.all_passes == 1 else shares.copies
    waits_r = shares.copies * tables_r + layers_r * (over_r - tables_r)
    over_copies = {'e': sums_e, 'c': sums_c, 'p': sums_p}
    phases = [
        Phase('products of the layers', products, products, 'products'),
        Phase('attention', attention, attention, 'attention'),
        Phase('norms, activations, rotation', elementwise, elementwise, 'memory'),
        Phase('head and loss', unembed + logits, unembed + logits, 'products' if unembed > logits else 'memory'),
        Phase('optimizer', update, update, 'memory'),
        Phase('weights and gradients over d', over_d, exposed_d, 'd'),
        Phase('activations over t', over_t, exposed_t, 't'),
        Phase('tokens to experts over e', rows_e, shares.e * rows_e, 'e'),
        Phase('heads and columns over c', columns_c, max(shares.c * columns_c, columns_c - attention), 'c'),
        Phase('activations over p', hops_p, shares.p * hops_p, 'p'),
        Phase('gradients over r', over_r, waits_r, 'r'),
        *(Phase(f'gradients over {axis}', of, shares.copies * of, axis) for axis, of in over_copies.items()),
    ]
    busy = sum(phase.exposed for phase in phases)
    if p > 1:
        bubble = sum(phase.exposed for phase in phases if not phase.communicates) * (p - 1) / (step.rounds * passes)
        phases.append(Phase(BUBBLE, bubble, bubble, 'p'))
        busy += bubble
    used = [phase for phase in phases if phase.seconds]
    per_token = 6 * (matmul_params + head) + 12 * keys * arch.n_heads * arch.d_head * arch.n_layers
    return Prediction(tuple(used), busy, per_token * tokens / (busy * devices * device.peak('bf16')))


def _held(arch: Architecture, n_params: int, mesh: Mapping[str, int]) -> tuple[float, float, float]:
    """Parameters that a group over d holds: of the embedding and the unembedding, of the layers, and of experts in these."""
    e, t, p = (mesh.get(axis, 1) for axis in 'etp')
    tables = arch.padded_vocab_size * arch.d_model * (1 if arch.tied else 2)
    experts = arch.n_layers * arch.n_experts * arch.d_model * arch.d_ff * (3 if arch.gated else 2)
    here = experts / (e * t * p)
    return tables / t, (n_params - tables - experts) / (t * p) + here, here
