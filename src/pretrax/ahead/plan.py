"""`pretrax plan`: memory and time of a step from sizes alone, and a search for the mesh, micro-batch and recomputation
that are fastest among those that fit. Nothing is compiled, and no plugin is needed."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType

from ..config import RunConfig, build, resolve_mesh
from ..errors import UserError
from ..model.axes import AXES, ROWS, along
from ..model.request import ModelRequest
from ..scale.flops import causal_keys
from ..scale.memory import Memory, expected_memory, size
from ..scale.roofline import Prediction, Sizes, predict
from ..scale.topology import Topology
from ..train.setup import Say, memory_sizes, open_source

MARGIN = 0.95  # of the memory that a plan may fill: the formula is not the compiler


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a configuration: axis sizes, sequences of a device and pass, whether layers are computed again."""

    mesh: dict[str, int]
    micro: int
    recompute: bool
    memory: Memory
    prediction: Prediction

    def written(self) -> str:
        """As it is given on the command line."""
        axes = [f'mesh.{axis}={n}' for axis, n in self.mesh.items() if n > 1 or axis == 'd']
        return ' '.join([*axes, f'batch.micro={self.micro}', f'model.save={"none" if self.recompute else "all"}'])


@dataclasses.dataclass(frozen=True)
class Plan:
    """The configuration as it is (None: its mesh or batch is impossible, and `why` says how), and better ones."""

    topology: Topology
    now: Choice | None
    why: str
    found: list[Choice]
    tried: int
    n_params: int


def make_plan(config: RunConfig, topology: Topology, say: Say) -> Plan:
    """Predicts a run on a topology, and searches.

    Raises:
        UserError: the model does not tell its sizes, or the configuration cannot be on any mesh.
    """
    length, rows = config.batch.sequence_length, config.batch.tokens // config.batch.sequence_length
    vocab_size = open_source(config, rows, say).vocab_size
    known: dict[tuple[int, ...], Any] = {}

    def model_on(mesh: dict[str, int]) -> Any:
        key = tuple(mesh.values())
        if key not in known:
            dtype = jax.numpy.bfloat16
            try:
                request = ModelRequest(
                    vocab_size=vocab_size, sequence_length=length, dtype=dtype, platform=topology.platform, mesh=mesh,
                    documents_per_row=None, micro_batches=mesh['p'],
                )  # fmt: skip
                known[key] = build('model', config.model, request)
            except UserError as error:
                known[key] = error
        return known[key]

    whole = model_on(dict.fromkeys(AXES, 1))
    if isinstance(whole, UserError):
        raise whole
    if getattr(whole, 'arch', None) is None:
        raise UserError(
            f'model.name={config.model.name} does not tell its sizes, so that there is nothing to plan with'
        )
    one = jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=jax.devices()[:1])
    with jax.set_mesh(one):
        n_params = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(whole.init, jax.random.key(0))))
    sizes, shape = _sizes(whole.arch, n_params, length), memory_sizes(whole.arch, n_params)
    moments = _moments(config)

    def choice(mesh: dict[str, int], micro: int, recompute: bool) -> Choice:
        passes = rows // along(ROWS, mesh) // micro
        memory = expected_memory(
            **shape, tokens=config.batch.tokens // passes, mesh=mesh, moments=moments, recompute=recompute,
            micro_batches=passes if mesh['p'] > 1 else 1,
        )  # fmt: skip
        prediction = predict(sizes, topology.device, mesh, config.batch.tokens, passes, recompute)
        assert prediction is not None
        return Choice(mesh, micro, recompute, memory, prediction)

    now, why = None, ''
    try:
        mesh = resolve_mesh(config.mesh, topology.n_devices, topology.platform)
        problem = model_on(mesh)
        if isinstance(problem, UserError):
            raise problem
        if rows % along(ROWS, mesh):
            raise UserError(f'batch: {rows} sequences a step cannot be shared by {along(ROWS, mesh)} devices')
        micro = config.batch.micro or max(1, rows // along(ROWS, mesh) // mesh['p'])
        now = choice(mesh, micro, getattr(problem, 'saved', None) == {})
    except UserError as error:
        why = str(error).splitlines()[0]
    every = [
        choice(mesh, micro, recompute)
        for mesh in _meshes(topology, whole.arch, rows)
        if not isinstance(model_on(mesh), UserError)
        for micro in _divisors(rows // along(ROWS, mesh))
        if rows // along(ROWS, mesh) // micro % mesh['p'] == 0  # so many micro-batches at a time as there are stages
        for recompute in (False, True)
    ]
    fitting = [one for one in every if one.memory.total <= MARGIN * topology.memory]
    return Plan(topology, now, why, sorted(fitting, key=lambda one: one.prediction.seconds), len(every), n_params)


def _sizes(arch: Any, n_params: int, length: int) -> Sizes:
    head = arch.padded_vocab_size * arch.d_model
    return Sizes(
        n_layers=arch.n_layers, d_model=arch.d_model, n_heads=arch.n_heads, n_kv_heads=arch.n_kv_heads,
        d_head=arch.d_head, d_ff=arch.d_ff, vocab_size=arch.padded_vocab_size,
        matmul_params=arch.n_matmul_params - head, params=n_params,
        keys=sum(causal_keys(window, length) for window in arch.windows) / arch.n_layers,
        experts_per_token=arch.experts_per_token if arch.n_experts else 0,
    )  # fmt: skip


def _moments(config: RunConfig) -> float:
    """Values of optimizer state for each weight, of a large square one."""
    like = jax.ShapeDtypeStruct((1024, 1024), jax.numpy.float32)
    state = jax.eval_shape(build('optimizer', config.optimizer).init, like)
    return sum(leaf.size for leaf in jax.tree.leaves(state)) / like.size


def _meshes(topology: Topology, arch: Any, rows: int) -> Iterator[dict[str, int]]:
    """Meshes worth a look: powers of two, slices along r, tensor parallelism inside a node or a side of a slice."""
    n = topology.n_devices // topology.slices
    widest = min(n, 8 if topology.platform == 'cuda' else 16)
    powers = [2**i for i in range(int(math.log2(max(1, n))) + 1)]
    for t, e, p in itertools.product(powers, powers, powers):
        if t > widest or (e > 1 and not arch.n_experts) or n % (t * e * p) or p > 16:
            continue
        d = n // (t * e * p)
        mesh = {'r': topology.slices, 'd': d, 'e': e, 'c': 1, 't': t, 'p': p}
        if rows % along(ROWS, mesh) == 0:
            yield mesh


def _divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def report(plan: Plan, shown: int = 5) -> list[str]:
    """The lines of `pretrax plan`."""
    topology = plan.topology
    lines = [
        f'{topology}: {topology.n_devices} x {topology.device.name}, {size(topology.memory)} and '
        f'{topology.device.bf16 / 1e12:,.4g} TFLOP/s each; {plan.n_params:,} parameters',
        '',
    ]
    if plan.now is None:
        lines.append(f'as configured: impossible: {plan.why}')
    else:
        fits = plan.now.memory.total <= topology.memory
        lines += [f'as configured ({plan.now.written()}):', *_details(plan.now, fits)]
    lines += [
        '',
        f'{len(plan.found)} of {plan.tried} other ways fit; the fastest:'
        if plan.found
        else f'none of {plan.tried} ways fits',
    ]
    lines += [f'    {"step":>8}{"MFU":>7}{"memory":>10}  limited by  change' for _ in plan.found[:1]]
    for one in plan.found[:shown]:
        seconds = one.prediction.seconds
        lines.append(
            f'    {seconds:7.3g}s{one.prediction.mfu:7.1%}{size(one.memory.total):>10}  {one.prediction.bound:<10}  {one.written()}'
        )
    if not plan.found:
        lines.append('    more devices (topology=, slices=), a smaller batch.sequence_length, or optimizer.name=lion')
    return lines


def _details(one: Choice, fits: bool) -> Iterator[str]:
    yield f'    memory: {one.memory} -> {"fits" if fits else "DOES NOT FIT"}'
    for phase in one.prediction.phases:
        hidden = '' if phase.exposed >= phase.seconds else f', of which {phase.exposed:.3g} s are not hidden'
        yield f'    {phase.name:<32}{phase.seconds:>9.3g} s  {phase.bound}{hidden}'
    yield f'    step {one.prediction.seconds:.3g} s, MFU {one.prediction.mfu:.1%}, limited by {one.prediction.bound}'
