"""`pretrax plan`: predicts the memory and time of a step from sizes, and searches for the fastest mesh, micro-batch and
recomputation that fit. Only `--verify` compiles, and needs a plugin.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from pretrax.amounts import size
from pretrax.config import RunConfig, from_values, resolve_mesh, written_values
from pretrax.config.batch import (
    common_sequences,
    micro_batch_size,
    micro_batch_sizes,
    sequence_shards,
    sequences_per_device,
)
from pretrax.cost.eight_bits import eight_bits_of
from pretrax.cost.exposed import exposed_by_default
from pretrax.cost.memory import Memory, expected_memory
from pretrax.cost.roofline import Prediction, predict
from pretrax.cost.step_facts import StepFacts, UpdateCost
from pretrax.cost.topology import Topology
from pretrax.errors import Report, UserError
from pretrax.hlo.compiler_options import CompilerOption, Situation, by_reason, choose_options
from pretrax.model.axes import AXES, along
from pretrax.model.pipeline_schedule import PipelineSchedule, choose_schedule
from pretrax.model.plan import choose_saved
from pretrax.model.request import ModelRequest
from pretrax.plan.keys import keys_left_out, left_out_lines
from pretrax.plan.layouts import layouts, sizes_of
from pretrax.plan.step import compile_ahead
from pretrax.run.setup import build_model, build_recipe, open_source
from pretrax.train.state import abstract_state
from pretrax.train.update_cost import axes_of_cost, update_cost
from pretrax.view.tables import terminal_width, text_table

BEST = 3  # candidates that are compiled to verify a plan
MARGIN = 0.95  # share of the memory that a plan may fill, since the formula is not exact


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a configuration.

    Attributes:
        mesh: size of each axis.
        micro: sequences per device and pass.
        save: what the backward pass keeps, as in `model.save`.
    """

    mesh: dict[str, int]
    micro: int
    save: Any
    memory: Memory
    prediction: Prediction

    def values(self) -> dict[str, dict[str, Any]]:
        """Its configuration values, by section."""
        axes = {axis: n for axis, n in self.mesh.items() if n > 1 or axis == 'd'}
        return {'mesh': axes, 'batch': {'micro': self.micro}, 'model': {'save': self.save}}

    def written(self) -> str:
        """Its key=value arguments for the command line."""
        pairs = [f'{section}.{key}={value}' for section, keys in self.values().items() for key, value in keys.items()]
        return _plain(' '.join(pairs))


@dataclasses.dataclass(frozen=True)
class Search:
    """The candidates that a search tried.

    Attributes:
        found: those that fit, fastest first.
        tried: the mesh, `batch.micro` and `model.save` of each.
        least: the candidate that needs the least memory; None: no mesh is possible.
        room: bytes per device that a candidate may fill.
    """

    found: list[Candidate]
    tried: list[tuple[dict[str, int], int, Any]]
    least: Candidate | None
    room: float

    def why_none(self) -> list[str]:
        """The lines that say that nothing fits, and what was tried."""
        if self.least is None:
            return ['nothing was tried: no mesh shards the batch evenly and is possible for the model']
        micros = ','.join(map(str, sorted({micro for _, micro, _ in self.tried})))
        saves = ','.join(dict.fromkeys(_plain(str(save)) for _, _, save in self.tried))
        return [
            f'none of {len(self.tried)} candidates fits',
            f'tried: {sizes_of([mesh for mesh, _, _ in self.tried])} batch.micro={micros} model.save={saves}',
            f'the smallest needs {size(self.least.memory.total)} of {size(self.room)}: {self.least.written()}',
        ]


def _plain(text: str) -> str:
    """Python values as the command line has them."""
    return text.replace("'", '').replace(': ', ':')


@dataclasses.dataclass(frozen=True)
class Plan:
    """The configuration itself (None if its mesh or batch is impossible, for the reason `why`), and the candidates that
    fit.

    Attributes:
        options: compiler options that the configuration sets by itself.
        by_default: its prediction without them; None: not known, or there are none.
        in_halves: its prediction if layers run on two halves of the batch; None: impossible, or not better.
        is_looped: its layers run in a loop on several GPUs, where unrolled ones are faster.
        left_out: the keys that it sets, and that all predictions leave out or count as free.
        slow_attention: the kernel of its attention and the reason, if it is not fused; '': it is.
        search: the candidates.
    """

    hardware: Topology
    now: Candidate | None
    options: list[CompilerOption]
    by_default: Prediction | None
    in_halves: Prediction | None
    is_looped: bool
    left_out: list[str]
    slow_attention: str
    why: str
    search: Search
    n_params: int

    @property
    def found(self) -> list[Candidate]:
        """The candidates that fit, fastest first."""
        return self.search.found


class Planner:
    """Predicts how a configuration runs on some hardware.

    Raises:
        UserError: the model has no architecture, or the configuration is impossible on any mesh.
    """

    def __init__(self, config: RunConfig, hardware: Topology, say: Report):
        self.config, self.hardware = config, hardware
        self.size, self.rows = config.batch.largest, common_sequences(config.batch)
        if len(config.batch.sizes) > 1:
            say(f'batch: planned for the largest, {self.size.sequences} sequences x {self.size.sequence_length}')
        self._source = open_source(config, say)
        self._models: dict[tuple[int, ...], Any] = {}
        whole = self._model(dict.fromkeys(AXES, 1))
        if isinstance(whole, UserError):
            raise whole
        if whole.arch is None:
            raise UserError(f'model.name={config.model.name} has no architecture, which a plan needs')
        one = jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=jax.devices()[:1])
        recipe = build_recipe(config, whole, 1)
        self._axes_of_cost = axes_of_cost(recipe)
        with jax.set_mesh(one):
            self._state = abstract_state(recipe)
        self._weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), self._state.weights)
        self.arch, self.n_stored_params = whole.arch, sum(w.size for w in jax.tree.leaves(self._state.weights))
        self._updates: dict[tuple[int, ...], UpdateCost] = {}

    def as_configured(self) -> Candidate:
        """The configuration itself.

        Raises:
            UserError: its mesh or batch is impossible.
        """
        mesh = resolve_mesh(self.config.mesh, self.hardware.n_devices, self.hardware.platform, self.hardware.slices)
        problem = self._model(mesh)
        if isinstance(problem, UserError):
            raise problem
        return self.candidate(mesh, micro_batch_size(self.size, mesh), self.save)

    @property
    def save(self) -> Any:
        """The configured `model.save`."""
        return getattr(self.config.model.options, 'save', 'all')

    def options(self, mesh: Mapping[str, int]) -> list[CompilerOption]:
        """The compiler options that a run sets on a mesh, besides those in the configuration."""
        return [option for option in self._table(mesh) if option.name not in self.config.compiler.options]

    def _table(self, mesh: Mapping[str, int]) -> list[CompilerOption]:
        is_gpu = self.hardware.platform == 'cuda'
        hardware = 'gpu' if is_gpu else self.hardware.version
        return choose_options(Situation(hardware, mesh, self.hardware.slices))

    def _removes_options(self, mesh: Mapping[str, int]) -> bool:
        """Whether the configuration removes all compiler options that a run sets by itself."""
        table, given = self._table(mesh), self.config.compiler.options
        return bool(table) and all(option.name in given and given[option.name] is None for option in table)

    def left_out(self, mesh: Mapping[str, int]) -> list[str]:
        """The keys that the configuration sets, and that its prediction on a mesh leaves out."""
        keys = keys_left_out(self.config)
        is_modelled = self._removes_options(mesh) and not any(self.config.compiler.options.values())
        return [key for key in keys if key != 'compiler.options' or not is_modelled]

    def slow_attention(self, mesh: dict[str, int]) -> str:
        """The kernel of attention that is not the fused one of the hardware, and the reason; '' if there is none."""
        plan = self._model(mesh).plan
        kernels = [plan.kernel, plan.global_kernel] if self.arch.n_attention_layers else []
        return next((str(kernel) for kernel in kernels if kernel is not None and kernel.name == 'blockwise'), '')

    def is_looped(self, mesh: dict[str, int]) -> bool:
        """Whether the program loops over layers on GPUs that share their weights."""
        return self.hardware.platform == 'cuda' and mesh['d'] > 1 and not self._model(mesh).plan.unrolled

    def in_halves(self, one: Candidate) -> Prediction | None:
        """A candidate whose layers run on two halves of the batch; None: that is impossible, or hides nothing more."""
        is_whole = self._model(one.mesh).plan.batch_parts == 1 and self.config.precision.matmul == 'compute'
        if one.mesh['t'] == 1 or one.micro % 2 or self.arch.experts.n_experts or not is_whole:
            return None
        halves = self.candidate(one.mesh, one.micro, one.save, parts=2).prediction
        return halves if halves.exposed < one.prediction.exposed else None

    def candidate(
        self, mesh: dict[str, int], micro: int, save: Any, by_default: bool = False, parts: int | None = None
    ) -> Candidate:
        """Predicts one candidate, whose mesh must be possible for the model.

        Args:
            mesh, micro, save: see `Candidate`.
            by_default: without compiler options, as if the configuration removed them all.
            parts: instead of `model.batch_parts`.
        """
        step = self._facts(mesh, micro, save, parts)
        memory = expected_memory(self.arch, self.n_stored_params, step)
        topology, by_default = self.hardware, by_default or self._removes_options(mesh)
        shares = exposed_by_default(topology.device) if by_default else None
        prediction = predict(self.arch, self.n_stored_params, self.size.sequence_length, step, topology, shares)
        return Candidate(mesh, micro, save, memory, prediction)

    def _facts(self, mesh: dict[str, int], micro: int, save: Any, parts: int | None = None) -> StepFacts:
        model = self._model(mesh)
        saved = choose_saved(save, mesh, True)[0]
        passes = sequences_per_device(self.size, mesh) // micro
        schedule = self._schedule(mesh, passes, saved, model.plan.loss_chunks)
        return StepFacts(
            mesh=mesh,
            tokens=self.size.tokens // passes,
            platform=self.hardware.platform,
            compute='f32' if self.config.precision.compute == 'f32' else 'bf16',
            eight_bits=eight_bits_of(model, self._state.weights),
            update=self.update_cost(mesh),
            in_host=self.config.memory.offload,
            saved=saved,
            unrolled=model.plan.unrolled,
            passes=1 if schedule else passes,
            rounds=schedule.rounds if schedule else 1,
            micro_batches=passes if schedule else 1,
            inputs=schedule.inputs if schedule else None,
            loss_chunks=model.plan.loss_chunks,
            batch_parts=math.gcd(parts or model.plan.batch_parts, micro),
            reduction=self.config.precision.reduction,
            context=model.plan.context,
            teacher=model.teacher_arch,
            kept_states=model.kept_states,
            clips_logits=getattr(self.config.optimizer.options, 'qk_clip', None) is not None,
        )

    def update_cost(self, mesh: dict[str, int]) -> UpdateCost:
        """The cost of the update on a mesh."""
        key = tuple(mesh[axis] for axis in self._axes_of_cost)
        if key not in self._updates:
            recipe = build_recipe(self.config, self._model(mesh), 1)
            sizes = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
            with jax.sharding.use_abstract_mesh(sizes):
                self._updates[key] = update_cost(recipe, abstract_state(recipe, weights=self._weights))
        return self._updates[key]

    def _schedule(
        self, mesh: dict[str, int], micro_batches: int, saved: Any, loss_chunks: int
    ) -> PipelineSchedule | None:
        if mesh['p'] == 1:
            return None
        options: Any = self.config.model.options
        sizes = PipelineSchedule(mesh['p'], options.pipeline.rounds, micro_batches)
        tokens = self.size.sequence_length // along('c t', mesh) // loss_chunks
        return choose_schedule(options.pipeline.schedule, sizes, self.arch, saved, tokens)[0]

    def search(
        self, saves: Sequence[Any] = ('all', 'none'), only: Mapping[str, int] | None = None, micro: int | None = None
    ) -> Search:
        """Predicts the candidates that fit.

        A network between slices is slow, so `r` is their number, and `d` stays inside a slice. If nothing fits, smaller
        `r` are tried too, and `d` crosses slices.

        Args:
            saves: values of `model.save`.
            only: the sizes of some axes.
            micro: the micro-batch; None: each that is possible.
        """
        slices, only, tried = self.hardware.slices, only or {}, []
        fewer = [] if 'r' in only else [r for r in range(1, slices) if slices % r == 0]
        for replicas in [only.get('r', slices)], fewer:
            for mesh in layouts(self.hardware, self.arch, self.size.sequence_length, self.rows, replicas, only):
                if not isinstance(self._model(mesh), UserError):
                    sizes = micro_batch_sizes(self.rows // sequence_shards(mesh), mesh['p'])
                    tried += [(mesh, n, save) for n in sizes if micro in (None, n) for save in saves]
            needed = [expected_memory(self.arch, self.n_stored_params, self._facts(*one)).total for one in tried]
            fits = [one for one, n_bytes in zip(tried, needed, strict=True) if n_bytes <= self.room]
            if fits:
                break
        found = sorted((self.candidate(*one) for one in fits), key=lambda one: one.prediction.seconds)
        least = self.candidate(*tried[needed.index(min(needed))]) if tried else None
        return Search(found, tried, least, self.room)

    @property
    def room(self) -> float:
        """Bytes per device that a candidate may fill."""
        return MARGIN * self.hardware.memory

    def _model(self, mesh: dict[str, int]) -> Any:
        """The model on a mesh, or the reason why it is impossible."""
        key = tuple(mesh.values())
        if key not in self._models:
            try:
                request = ModelRequest(
                    vocab_size=self._source.vocab_size,
                    sequence_length=self.size.sequence_length,
                    dtype=jax.numpy.bfloat16,
                    platform=self.hardware.platform,
                    mesh=mesh,
                    largest_token=self._source.largest_token,
                    slices=self.hardware.slices,
                    documents_per_row=self._source.documents_per_row,
                    device_kind=self.hardware.target.kind,
                    matmul=self.config.precision.matmul,
                    exempt=self.config.precision.exempt,
                    micro_batches=mesh['p'],
                    host_memory=True,
                )
                self._models[key] = build_model(self.config, request)
            except UserError as error:
                self._models[key] = error
        return self._models[key]


def make_plan(config: RunConfig, hardware: Topology, say: Report) -> Plan:
    """Predicts a run on some hardware, and searches for faster candidates.

    Raises:
        UserError: the model has no architecture, or the configuration is impossible on any mesh.
    """
    planner = Planner(config, hardware, say)
    now, why, options, by_default, in_halves, is_looped, slow_attention = None, '', [], None, None, False, ''
    left_out = keys_left_out(config)
    try:
        now = planner.as_configured()
        options, left_out = planner.options(now.mesh), planner.left_out(now.mesh)
        slow_attention = planner.slow_attention(now.mesh)
        is_looped, in_halves = planner.is_looped(now.mesh), planner.in_halves(now)
        if options and exposed_by_default(hardware.device):
            by_default = planner.candidate(now.mesh, now.micro, now.save, by_default=True).prediction
    except UserError as error:
        why = str(error).splitlines()[0]
    return Plan(
        hardware=hardware,
        now=now,
        options=options,
        by_default=by_default,
        in_halves=in_halves,
        is_looped=is_looped,
        left_out=left_out,
        slow_attention=slow_attention,
        why=why,
        search=planner.search(['all', 'none', *[planner.save] * (planner.save not in ('all', 'none'))]),
        n_params=planner.n_stored_params - planner.arch.n_padding_params,
    )


def report(plan: Plan, shown: int = 5) -> list[str]:
    """The output of `pretrax plan`."""
    hardware = plan.hardware
    lines = [
        f'{hardware}: {hardware.n_devices} x {hardware.device.name}, {size(hardware.memory)} and '
        f'{hardware.device.bf16 / 1e12:,.4g} TFLOP/s each; {plan.n_params:,} parameters',
        '',
    ]
    if plan.now is None:
        lines.append(f'as configured: impossible: {plan.why}')
    else:
        fits = plan.now.memory.total <= hardware.memory
        lines += [f'as configured ({plan.now.written()}):', *_details(plan.now, fits), *_options(plan)]
    if plan.slow_attention:
        lines.append(f'    attention: {plan.slow_attention}; predicted as if the fused kernel ran')
    lines += left_out_lines(plan.left_out)
    fit = [f'{len(plan.found)} of {len(plan.search.tried)} candidates fit; the fastest:']
    why, *tried = fit if plan.found else plan.search.why_none()
    lines += ['', why, *(f'    {line}' for line in tried)]
    rows = [
        [
            f'{one.prediction.seconds:.3g}s',
            f'{one.prediction.mfu:.1%}',
            size(one.memory.total),
            one.prediction.bound,
            one.written(),
        ]
        for one in plan.found[:shown]
    ]
    if rows:
        width = terminal_width()
        table = text_table(
            [['step', 'MFU', 'memory', 'limited by', 'change'], *rows], (3, 4), width=width and width - 4
        )
        lines += [f'    {line}' for line in table]
    if not plan.found:
        lines.append(
            '    use more devices (--topology, --slices), a smaller batch.sequence_length, or optimizer.name=lion'
        )
    return lines


def _details(one: Candidate, fits: bool) -> Iterator[str]:
    yield f'    memory: {one.memory} -> {"fits" if fits else "DOES NOT FIT"}'
    for phase in one.prediction.phases:
        hidden = '' if phase.exposed >= phase.seconds else f', {phase.exposed:.3g} s not overlapped'
        yield f'    {phase.name:<32}{phase.seconds:>9.3g} s  {phase.bound}{hidden}'
    yield f'    step {one.prediction.seconds:.3g} s, MFU {one.prediction.mfu:.1%}, limited by {one.prediction.bound}'


def _options(plan: Plan) -> Iterator[str]:
    """The compiler options, and what they change."""
    for group in by_reason(plan.options):
        yield f'    compiler options: {group[0].reason}'
        yield from (f'        {option}' for option in group)
    if plan.by_default and plan.now:
        now, other = plan.now.prediction, plan.by_default
        yield (
            f'    with these options, {now.exposed:.3g} s of communication are not overlapped; with the defaults of '
            'XLA, '
            f'{other.exposed:.3g} s, and the step takes {other.seconds:.3g} s'
        )
    if plan.in_halves:
        yield (
            f'    model.batch_parts=2: {plan.in_halves.exposed:.3g} s of communication are not overlapped, and the '
            'step takes '
            f'{plan.in_halves.seconds:.3g} s'
        )
    if plan.is_looped:
        yield '    model.layers=unroll: 2 to 4 % faster in compiled steps on GPUs, and compiles longer'


def verified(config: RunConfig, topology: Topology, plan: Plan) -> Iterator[str]:
    """Compiles the best candidates. A line for each compares the compiler's memory with the predicted one.

    Raises:
        UserError: the plugin that compiles for the topology is not installed.
    """
    if not plan.found:
        yield 'nothing to verify: no candidate fits'
        return
    yield f'compiled{"":<16}{"predicted":>10}  error  change'
    for one in plan.found[:BEST]:
        planned = compile_ahead(having(config, one), topology, lambda text: None)
        error = one.memory.total / planned.needed - 1
        fits = 'fits' if planned.fits else 'DOES NOT FIT'
        yield f'{size(planned.needed):>8}, {fits:<14}{size(one.memory.total):>10}  {error:+5.0%}  {one.written()}'


def having(config: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration with the values of a candidate."""
    values = written_values(config)
    chosen = candidate.values()
    sections = {section: values[section] | chosen[section] for section in ('batch', 'model')}
    return from_values(values | sections | {'mesh': chosen['mesh']})
