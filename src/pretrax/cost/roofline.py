"""Predicts the time of a step from sizes, before compiling: each phase by the resource that limits it.

A phase takes as long as the slowest of its products (FLOPs over the speed of the matrix units), its memory traffic
(bytes over bandwidth) and its communication (bytes over the link). Other work hides communication as far as XLA's
schedules of compiled steps do on that hardware (`cost/exposed.py`); what is left is exposed, and adds to the step. The
shares of the peaks that are reached, latency and launches are those of the chip (`devices.Reach`).

Per device and step, with T tokens and P parameters of the layers that multiply an activation, sharded over all devices:

    products     6 P T FLOPs, and 2 P T for those that the backward pass repeats (`cost/saved.py`); 8 P T for the
                 unembedding if the loss is in chunks, or of micro-batches that a pipeline interleaves
    attention    forward 2 products of the causal half, backward 5 (Dao 2023, arXiv:2307.08691, section 3.1), on TPUs 7
                 in two kernels; forward again unless its result is kept
    QK clip      forward 2 D_qk FLOPs for each head and pair of a query and a key of a sequence, visible or not; XLA for
                 GPUs writes the f32 logit and reads it again
    memory       norms, residuals, activation, rotation: 10 M + 3 F + 2 (H + 2 K) D values per token and layer, three
                 times (forward, backward twice); the logits four times, five in chunks; the table of the embedding 16
                 bytes per parameter
    eight bits   5 bytes for each value that is rounded, 18 for each weight and pass; products at the peak of eight bits
    optimizer    memory traffic of weights, gradients and state; of whole matrices the slower of products and traffic,
                 and their exchanges, which nothing hides: `train/update_cost.py`
    host         offloaded state, to the device and back; offloaded activations, there and back in each pass
    over d       weights in the compute dtype, gathered twice per pass (the backward pass needs them again), three times
                 in stages that are recomputed; tables once. Their gradients in f32, scattered once
    over t       activations: a layer gathers two and scatters two in the forward pass, the same in the backward pass,
                 and gathers two again for the gradients of the weights; one that is recomputed scatters its attention
                 once more; the ends two each
    over r       gradients in f32, once per step, over the slow network
    over e       rows of tokens to experts and back: `cost/experts.py`; gradients of all but the experts
    over c       heads to whole sequences and back, or keys and values around a ring, and their gradients; gradients
    over p       the hidden states of a micro-batch, and gradients of the tables;
                 the bubble, (p - 1) / (rounds passes + p - 1) of the step
    launches     seconds per layer and pass
    latency      of each collective: for every device that its data passes
    beside       a share of hidden communication, since it takes units and bandwidth from the work that hides it
    teacher      its forward pass: 2 P T FLOPs, and 4 P T of its unembedding, whose logits the backward pass computes
                 again; its weights gathered over d once per pass, its tables too; four activations per layer over t
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from pretrax.cost.experts import products_of_experts, rows_of_experts
from pretrax.cost.exposed import Exposed, exposed_on
from pretrax.cost.flops import causal_keys
from pretrax.cost.interval import Published, published_steps
from pretrax.cost.links import MeshNetwork
from pretrax.cost.saved import offloaded_activations, repeated_products, repeated_share
from pretrax.cost.step_facts import BYTES, StepFacts
from pretrax.cost.teacher import n_params as params_of
from pretrax.cost.topology import Topology
from pretrax.model.architecture import CHUNK, Architecture
from pretrax.model.axes import AXES

_BEHIND = 0.25  # share of the products of a layer that do not depend on its collectives over t
BUBBLE = 'pipeline bubble'


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
    published: Published | None = None  # published steps of its kind, which give the interval

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
    step: StepFacts,
    topology: Topology,
    shares: Exposed | None = None,
) -> Prediction:
    """Predicts the time of a step. Products, activations and gathers are in its compute dtype.

    Args:
        arch: the decoder.
        n_params: all parameters of the model, and the rows that pad its vocabulary.
        sequence_length: tokens per sequence.
        step: how it runs.
        topology: the hardware, which the mesh fills.
        shares: of the communication that waits; None: with the compiler options that pretrax sets.
    """
    sizes = _Sizes(arch, n_params, sequence_length, step, topology, shares)
    products, attention, elementwise = _products(sizes), _attention(sizes), _elementwise(sizes)
    phases = [
        products,
        attention,
        *[_largest_logits(sizes)] * step.clips_logits,
        elementwise,
        _head(sizes),
        _rounding(sizes),
        _launches(sizes),
        *_optimizer(sizes),
        *_host_link(sizes, products.seconds + attention.seconds + elementwise.seconds),
        _over_d(sizes, products.seconds + attention.seconds + elementwise.seconds),
        _over_t(sizes, products.seconds + attention.seconds),
        _tokens_over_e(sizes),
        _columns_over_c(sizes, attention.seconds),
        _activations_over_p(sizes),
        _gradients_over_r(sizes),
        *_gradients_over_others(sizes),
    ]
    flops = _model_flops(sizes)
    if step.teacher is not None:
        forward = dataclasses.replace(step, saved=None)  # nothing is computed again
        of_teacher = _Sizes(step.teacher, params_of(step.teacher), sequence_length, forward, topology, shares)
        phases += _teacher(of_teacher)
        flops += _model_flops(of_teacher) / 3
    phases.append(_slowed(sizes, phases))
    if sizes.p > 1:
        phases.append(_bubble(sizes, phases))
    seconds = sum(phase.exposed for phase in phases)
    used = tuple(phase for phase in phases if phase.seconds)
    mfu = flops / (seconds * sizes.devices * topology.device.peak('bf16'))
    has_experts, eight = arch.experts.n_experts > 1, step.eight_bits is not None
    return Prediction(used, seconds, mfu, published_steps(topology.device.name, step.compute, eight, has_experts))


class _Sizes:
    """A step, and the sizes that its phases share.

    Attributes:
        keys: numbers of the keys that a query head attends to, on average over positions and layers.
        tokens, tokens_here: of a step, over the mesh and per device.
        rows: of the experts of a layer.
        cores: of a GPU, which share each product; 1 for a TPU.
        layers: per device, with those of multi-token prediction.
        hidden: bytes of the hidden states of the tokens of a device.
        matmul_params: parameters of layers that multiply a token.
        in_tables, in_layers, in_experts: parameters that a group over d holds: of the embedding and the unembedding, of
            layers, and of the experts in these.
        turns: forward and backward passes through a stage of a pipeline, with those of the bubble.
        with_bubble: `turns` over the passes of a step; stages communicate in those of the bubble too.
        network: the links between the devices of the mesh.
        shares: of the communication that waits.
    """

    def __init__(
        self,
        arch: Architecture,
        n_params: int,
        sequence_length: int,
        step: StepFacts,
        topology: Topology,
        shares: Exposed | None,
    ) -> None:
        self.arch, self.device, self.step = arch, topology.device, step
        self.sequence_length = sequence_length
        self.is_tpu = topology.platform == 'tpu'
        self.reach = topology.device.reach
        self.network = MeshNetwork(topology, step.mesh)
        self.shares = shares or exposed_on(topology.device, topology.slices)
        self.r, self.d, self.e, self.c, self.t, self.p = (step.mesh.get(axis, 1) for axis in AXES)
        self.devices = self.r * self.d * self.e * self.c * self.t * self.p
        self.tokens = step.tokens * step.all_passes
        self.tokens_here = self.tokens / (self.r * self.d * self.e * self.c)
        chunked = arch.attention.window_type == 'chunked'
        keys = [
            causal_keys(kind.window, sequence_length, chunked) * arch.heads(kind).mean_width
            for kind in arch.kinds
            if kind.mixer == 'attention'
        ]
        self.keys = sum(keys) / arch.n_layers
        self.rows = rows_of_experts(arch, step, sequence_length)
        self.cores = 1 if self.is_tpu else getattr(topology.target, 'cores', 1)
        self.layers = (arch.n_layers + arch.multi_token.n_layers) / self.p
        self.turns = step.all_passes + (self.p - 1) / step.rounds
        self.with_bubble = self.turns / step.all_passes
        self.width = BYTES[step.compute]
        self.hidden = self.width * self.tokens_here * arch.d_model
        self.unembedding = arch.padded_vocab_size * arch.d_model
        self.matmul_params = arch.n_matmul_params - self.unembedding
        tables = self.unembedding * (1 if arch.embedding.tied else 2)
        of_expert = arch.d_model * arch.feed_forward.d_ff * arch.feed_forward.n_matrices
        experts = arch.n_expert_layers * arch.experts.n_experts * of_expert
        self.in_tables = tables / self.t
        self.in_experts = experts / (self.e * self.t * self.p)
        self.in_layers = (n_params - tables - experts) / (self.t * self.p) + self.in_experts

    def products(self, flops: float, in_eight_bits: float = 0.0) -> float:
        """The seconds that products take if a share of their FLOPs is in eight bits."""
        eight = self.step.eight_bits
        inverse = (1 - in_eight_bits) / self.device.peak(self.step.compute)
        if eight is not None:
            inverse += in_eight_bits / self.device.peak(eight.kind)
        return flops * inverse / self.reach.products

    def traffic(self, n_bytes: float) -> float:
        """Seconds of memory traffic."""
        assert self.device.bandwidth is not None
        return n_bytes / (self.device.bandwidth * self.reach.memory)

    def gather(self, axis: str, n_bytes: float, rings: int | None = None, runs: float = 1) -> float:
        """Seconds to gather or scatter `n_bytes` over an axis, in `runs` collectives."""
        return self.network.seconds('all-gather', axis, n_bytes, rings, runs)

    def all_reduce(self, axis: str, n_bytes: float, runs: float = 1) -> float:
        """Seconds to sum `n_bytes` over an axis, in `runs` collectives."""
        return self.network.seconds('all-reduce', axis, n_bytes, runs=runs)


def _model_flops(sizes: _Sizes) -> float:
    """FLOPs of the model for the tokens of a step, without what is computed again."""
    arch = sizes.arch
    scores = 12 * sizes.keys * arch.attention.n_heads * sizes.layers * sizes.p
    return (6 * (sizes.matmul_params + sizes.unembedding + arch.n_state_products) + scores) * sizes.tokens


def _products(sizes: _Sizes) -> Phase:
    arch, eight = sizes.arch.replace({'experts.experts_per_token': 0}), sizes.step.eight_bits
    params = arch.n_matmul_params - sizes.unembedding
    flops = 6 * params + 2 * sum(repeated_products(arch, sizes.step).values())
    share = (eight.params - eight.experts) / params if eight else 0.0
    seconds = sizes.products(flops * sizes.tokens / sizes.devices, share) + _expert_products(sizes)
    return _work('products of the layers', seconds, 'products')


def _expert_products(sizes: _Sizes) -> float:
    """Seconds of the products of experts. Each takes as long as the slower of its FLOPs and its memory traffic."""
    if not sizes.arch.n_expert_layers:
        return 0.0
    eight, of_layer = sizes.step.eight_bits, 0.0
    for times, flops, n_bytes, tiles in products_of_experts(sizes.arch, sizes.step, sizes.rows):
        idle = math.ceil(tiles / sizes.cores) * sizes.cores / tiles  # cores that wait for others
        work = idle * sizes.products(flops, float(eight is not None and eight.experts > 0))
        of_layer += times * max(work, sizes.traffic(n_bytes))
    return of_layer * sizes.arch.n_routers / sizes.p * sizes.step.all_passes


def _rounding(sizes: _Sizes) -> Phase:
    """To eight bits: a value is read for the scale, read again, and written; weights, which are f32, twice."""
    eight, seconds = sizes.step.eight_bits, 0.0
    if eight is not None:
        values = (2 * sizes.width + 1) * eight.values * sizes.tokens_here
        weights = 2 * (2 * 4 + 1) * (eight.params + eight.head) * sizes.step.all_passes
        seconds = sizes.traffic((values + weights) / sizes.t / sizes.p)
    return _work('rounding to eight bits', seconds, 'memory')


def _attention(sizes: _Sizes) -> Phase:
    arch = sizes.arch
    forward = 4 * sizes.keys * arch.attention.n_heads * sizes.tokens_here * sizes.layers / sizes.t
    flops = forward * (1 + (3.5 if sizes.is_tpu else 2.5) + sizes.step.attends_twice)
    # Chunks of layers with a state, which the backward pass computes again.
    of_tokens = CHUNK * (
        arch.recurrent.n_heads * arch.recurrent.d_head + arch.recurrent.n_key_heads * arch.recurrent.d_key
    )
    chunks = 2 * (arch.n_state_products + arch.n_recurrent_layers * of_tokens) * sizes.tokens_here / sizes.t / sizes.p
    flops += 4 * chunks
    return _work('attention', flops / (sizes.device.peak(sizes.step.compute) * sizes.reach.attention), 'attention')


def _largest_logits(sizes: _Sizes) -> Phase:
    """Products of all queries and keys, beside those of the attention kernel: `model/qk_clip.py`."""
    arch = sizes.arch
    pairs = sizes.sequence_length * arch.attention.n_heads * sizes.tokens / sizes.devices  # in a layer
    widths = sum(arch.heads(kind).d_query for kind in arch.kinds if kind.mixer == 'attention')
    products = sizes.products(2 * pairs * widths)
    if sizes.is_tpu:  # whose compiler takes the maximum in the kernel of the product
        return _work('logits for QK clip', products, 'products')
    written = sizes.traffic(4 * pairs * arch.n_attention_layers)
    return _work('logits for QK clip', max(products, written) + written, 'memory')


def _elementwise(sizes: _Sizes) -> Phase:
    arch = sizes.arch
    feed_forward = 3 * arch.n_dense_layers / arch.n_layers * arch.sizes['F']
    heads = arch.attention.n_heads * arch.mean_d_head + 2 * arch.mean_kv_width
    attention = 2 * heads * arch.n_attention_layers
    linear = 8 * (arch.recurrent.n_heads * arch.recurrent.d_head + arch.recurrent.n_key_heads * arch.recurrent.d_key)
    mixers = (attention + linear * arch.n_recurrent_layers) / arch.n_layers
    values = 10 * arch.d_model + feed_forward + mixers
    times = 3 + repeated_share(arch, sizes.step)
    n_bytes = sizes.width * values * sizes.tokens_here / sizes.t * sizes.layers * times
    of_experts = 3 * times * arch.feed_forward.d_ff / sizes.t * sizes.rows.slots + arch.d_model * sizes.rows.moved
    n_bytes += sizes.width * of_experts * arch.n_routers / sizes.p * sizes.step.all_passes
    return _work('norms, activations, rotation', sizes.traffic(n_bytes), 'memory')


def _head(sizes: _Sizes) -> Phase:
    arch, step = sizes.arch, sizes.step
    again = step.loss_chunks > 1 or (sizes.p > 1 and step.inputs is None)
    n_bytes = (5 if again else 4) * sizes.width * arch.padded_vocab_size * sizes.tokens_here / sizes.t / sizes.p
    n_bytes *= 1 + arch.multi_token.n_layers
    logits = sizes.traffic(n_bytes + step.all_passes * 16 * arch.padded_vocab_size * arch.d_model / sizes.t)
    flops = (8 if again else 6) * sizes.unembedding * sizes.tokens / sizes.devices
    product = sizes.products(flops, float(step.eight_bits is not None and step.eight_bits.head > 0))
    return _work('head and loss', product + logits, 'products' if product > logits else 'memory')


def _optimizer(sizes: _Sizes) -> Iterator[Phase]:
    """The update of single values, the work on whole matrices, and the exchanges with the owners of these."""
    update = sizes.step.update
    yield _work('optimizer', sizes.traffic(update.traffic), 'memory')
    products = update.flops / (sizes.device.peak(update.precision) * sizes.reach.products)
    traffic = sizes.traffic(update.matrices)
    yield _work('matrices of the optimizer', max(products, traffic), 'products' if products > traffic else 'memory')
    for one in update.exchanges:
        axes = ' '.join(one.axes)
        yield _work(f'matrices over {axes}', sizes.network.seconds(one.kind, one.axes, one.bytes), one.axes[0])


def _host_link(sizes: _Sizes, hidden_by: float) -> Iterator[Phase]:
    """State that is fetched and sent back, which waits; and activations, which the work on other layers hides."""
    step, link = sizes.step, sizes.device.host
    if link is None:
        return
    weights = 4 * (sizes.in_tables + sizes.in_layers) / sizes.d
    state = step.update.state * ('optimizer' in step.in_host) + weights * ('weights' in step.in_host)
    yield _work('state in host memory', 2 * state / link, 'host')
    seconds = 2 * step.passes * offloaded_activations(sizes.arch, step) / link
    yield Phase('activations in host memory', seconds, max(0.0, seconds - hidden_by), 'host')


def _launches(sizes: _Sizes) -> Phase:
    passes = sizes.turns * (1 + repeated_share(sizes.arch, sizes.step) / 3)
    return _work('launches', sizes.reach.launch * sizes.layers * passes, 'launches')


def _slowed(sizes: _Sizes, phases: Iterable[Phase]) -> Phase:
    """Hidden communication takes units and memory bandwidth from the work that hides it."""
    hidden = sum(phase.seconds - phase.exposed for phase in phases)
    return _work('work beside communication', sizes.reach.beside * hidden, 'memory')


def _work(name: str, seconds: float, bound: str) -> Phase:
    return Phase(name, seconds, seconds, bound)


def _over_d(sizes: _Sizes, hidden_by: float) -> Phase:
    """Gathers of weights and sums of gradients; at most `hidden_by` seconds of other work hide them."""
    shares, step = sizes.shares, sizes.step
    beside = '_beside_t' if sizes.t > 1 else ''
    is_alone = sizes.e * sizes.c * sizes.t * sizes.p == 1

    def exposed_seconds(what: str, n_bytes: float, times: float, runs: float = 1) -> tuple[float, float]:
        """Seconds, and the exposed seconds among them; each time in `runs` collectives."""
        twice = 2 if what in shares.all_reduced else 1
        rings = 2 if is_alone and what in shares.one_ring else None
        seconds = times * twice * sizes.gather('d', n_bytes, rings, runs)
        return seconds, getattr(shares, what) * seconds

    # A stage that is recomputed runs forward once more before each of its layers does.
    width = 2 if step.reduction == 'bf16_r_d' else 4
    gathers = 3 if step.recomputes and sizes.p > 1 else 2
    parts = [
        exposed_seconds('tables', sizes.width * sizes.in_tables, step.passes),
        exposed_seconds('table_sums', width * sizes.in_tables, step.passes),
        exposed_seconds(
            f'gathers{beside}', gathers * sizes.width * sizes.in_layers, sizes.turns, gathers * sizes.layers
        ),
        exposed_seconds(f'sums{beside}', width * sizes.in_layers, sizes.turns, sizes.layers),
    ]
    seconds = sum(seconds for seconds, _ in parts)
    exposed = (
        sum(waits for _, waits in parts)
        + exposed_seconds('last_sums', width * sizes.in_layers / sizes.layers, sizes.turns)[1]
    )
    return Phase('weights and gradients over d', seconds, max(exposed, seconds - hidden_by), 'd')


def _over_t(sizes: _Sizes, work: float) -> Phase:
    """Activations; a part of the products and attention hides them."""
    per_layer = 10 + len({'attention_out', 'mlp_out'} & set(repeated_products(sizes.arch, sizes.step)))
    share = sizes.shares.t_again if sizes.step.recomputes else sizes.shares.t
    behind = _BEHIND
    if (parts := sizes.step.batch_parts) > 1:
        share, behind = sizes.shares.t_in_parts, 1 - 1 / parts
    arrays = per_layer * sizes.layers * sizes.with_bubble + 4
    seconds = sizes.gather('t', arrays * sizes.hidden, runs=arrays * sizes.step.all_passes)
    return Phase('activations over t', seconds, max(share * seconds, seconds - behind * work), 't')


def _tokens_over_e(sizes: _Sizes) -> Phase:
    n_bytes = sizes.width * sizes.arch.d_model * sizes.rows.exchanges * sizes.rows.sent
    seconds = sizes.arch.n_routers / sizes.p * sizes.turns * sizes.network.seconds('all-to-all', 'e', n_bytes)
    return Phase('tokens to experts over e', seconds, sizes.shares.e * seconds, 'e')


def _columns_over_c(sizes: _Sizes, attention: float) -> Phase:
    """Keys and values around a ring, which attention hides, or heads to sequences and back: see model/context.py."""
    arch, c = sizes.arch, sizes.c
    values, heads = sizes.layers * sizes.tokens_here / sizes.t, arch.attention.n_heads * arch.mean_d_head
    if sizes.step.context == 'ring':  # the gradients that travel with the keys are f32
        per_hop = 2 * sizes.width * (2 + sizes.step.attends_twice) + 8
        seconds = sizes.network.seconds('collective-permute', 'c', c * per_hop * values * arch.mean_kv_width)
    else:
        times = 4 + 2 * sizes.step.attends_twice
        seconds = sizes.network.seconds('all-to-all', 'c', times * sizes.width * values * (heads + arch.mean_kv_width))
    seconds *= sizes.with_bubble
    return Phase('heads and columns over c', seconds, max(sizes.shares.c * seconds, seconds - attention), 'c')


def _activations_over_p(sizes: _Sizes) -> Phase:
    """Hidden states to the next stage, gradients back, and what stages gather for the embedding and the head."""
    n_bytes = 2 * sizes.step.rounds * sizes.hidden / sizes.t
    hops = sizes.with_bubble * sizes.network.seconds('collective-permute', 'p', n_bytes)
    seconds = hops + sizes.gather('p', 2 * sizes.hidden / sizes.t)
    return Phase('activations over p', seconds, sizes.shares.p * seconds, 'p')


def _gradients_over_r(sizes: _Sizes) -> Phase:
    shares = sizes.shares
    width = 4 if sizes.step.reduction == 'f32' else 2
    seconds = sizes.all_reduce('r', width * (sizes.in_tables + sizes.in_layers) / sizes.d, sizes.layers + 1)
    tables = sizes.all_reduce('r', width * sizes.in_tables / sizes.d)
    one_pass = sizes.step.all_passes == 1
    of_layers = max(shares.layer_copies, 1 / sizes.layers) if one_pass else shares.copies
    exposed = shares.copies * tables + of_layers * (seconds - tables)
    return Phase('gradients over r', seconds, exposed, 'r')


def _gradients_over_others(sizes: _Sizes) -> list[Phase]:
    """Gradients over the other axes that replicate weights."""
    replicated = {
        'e': sizes.in_tables + sizes.in_layers - sizes.in_experts,
        'c': sizes.in_tables + sizes.in_layers,
        'p': sizes.in_tables,
    }
    phases = []
    for axis, n_params in replicated.items():
        seconds = sizes.all_reduce(axis, 4 * n_params / sizes.d)
        phases.append(Phase(f'gradients over {axis}', seconds, sizes.shares.copies * seconds, axis))
    return phases


def _teacher(sizes: _Sizes) -> Iterator[Phase]:
    """The forward pass of a teacher. Layers are a third of those of training, without what these compute again."""
    attention = _attention(sizes).seconds / (4.5 if sizes.is_tpu else 3.5)  # of 2 products forward, and 5 or 7 backward
    layers = (_products(sizes).seconds + _elementwise(sizes).seconds) / 3 + attention
    logits = 2 * 2 * sizes.width * sizes.arch.padded_vocab_size * sizes.tokens_here / sizes.t  # written and read, twice
    head = sizes.products(4 * sizes.unembedding * sizes.tokens / sizes.devices) + sizes.traffic(logits)
    yield _work('teacher, forward', layers + head, 'products')
    over_d = sizes.step.passes * sizes.gather('d', sizes.width * (sizes.in_tables + sizes.in_layers))
    yield Phase('weights of the teacher over d', over_d, sizes.shares.gathers * over_d, 'd')
    over_t = sizes.gather('t', (4 * sizes.layers + 2) * sizes.hidden)
    yield Phase('activations of the teacher over t', over_t, sizes.shares.t * over_t, 't')


def _bubble(sizes: _Sizes, phases: Iterable[Phase]) -> Phase:
    """Turns in which a stage waits for others."""
    work = sum(phase.exposed for phase in phases if not phase.communicates)
    seconds = work * (sizes.p - 1) / (sizes.step.rounds * sizes.step.all_passes)
    return Phase(BUBBLE, seconds, seconds, 'p')
