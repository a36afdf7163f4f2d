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
from pretrax.cost.memory import expected_memory
from pretrax.cost.roofline import Prediction, predict
from pretrax.cost.step_facts import StepFacts, UpdateCost
from pretrax.cost.topology import Topology
from pretrax.errors import Report, UserError
from pretrax.hlo.compiler_options import CompilerOption, Situation, by_reason, choose_options
from pretrax.model.attention import kept_probabilities
from pretrax.model.axes import AXES, along
from pretrax.model.families import SAVE_PRESETS
from pretrax.model.pipeline_schedule import PipelineSchedule, choose_schedule
from pretrax.model.plan import choose_saved
from pretrax.model.request import ModelRequest
from pretrax.plan.candidate import Candidate, Choice, Search
from pretrax.plan.compiled_facts import CompiledFact, CompiledFacts
from pretrax.plan.keys import keys_left_out, left_out_lines
from pretrax.plan.layouts import layouts
from pretrax.plan.step import compile_ahead, schedule_of
from pretrax.run.setup import build_model, build_recipe, in_island, open_source
from pretrax.train.state import abstract_state
from pretrax.train.update_cost import axes_of_cost, update_cost
from pretrax.view.tables import terminal_width, text_table

# Values of `model.save` that a search tries, and those that use the memory of the host: as in MaxText's recipes
SAVES = ('all', *reversed(SAVE_PRESETS))
OFFLOADED = [dict.fromkeys(names, 'offload') for names in (SAVE_PRESETS['dots'], ('input', 'q', 'k', 'v'), ['input'])]
BEST = 3  # candidates that are compiled to verify a plan
MARGIN = 0.95  # share of the memory that a plan may fill, since the formula is not exact


@dataclasses.dataclass(frozen=True)
class Plan:
    """The configuration itself (None if its mesh or batch is impossible, for the reason `why`), and the candidates that
    fit.
    """

    hardware: Topology
    search: Search
    n_params: int
    now: Candidate | None = None
    options: Sequence[CompilerOption] = ()  # compiler options that the configuration sets by itself
    by_default: Prediction | None = None  # its prediction without them; None: not known, or there are none
    # The configuration with layers on two halves of the batch; None: impossible, or not better
    in_halves: Candidate | None = None
    is_looped: bool = False  # its layers run in a loop on several GPUs, where unrolled ones are faster
    # The keys that it sets, and that all predictions leave out or count as free
    left_out: list[str] = dataclasses.field(default_factory=list)
    slow_attention: str = ''  # the kernel of its attention and the reason, if it is not fused; '': it is
    why: str = ''

    @property
    def found(self) -> list[Candidate]:
        """The candidates that fit, fastest first."""
        return self.search.found


class Planner:
    """Predicts how a configuration runs on some hardware.

    Args:
        compiled: facts of steps that were compiled before; None: only the formula.

    Raises:
        UserError: the model has no architecture, or the configuration is impossible on any mesh.
    """

    def __init__(self, config: RunConfig, hardware: Topology, say: Report, compiled: CompiledFacts | None = None):
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
        self.arch, self.n_stored_params = whole.arch, sum(w.size for w in jax.tree.leaves(self._state.weights))
        self._updates: dict[tuple[int, ...], UpdateCost] = {}
        self._known = compiled
        self.save = getattr(config.model.options, 'save', 'all')
        self.room = MARGIN * hardware.memory  # bytes per device that a candidate may fill

    def as_configured(self) -> Candidate:
        """The configuration itself. Raises UserError if its mesh or batch is impossible."""
        mesh = resolve_mesh(self.config.mesh, self.hardware.n_devices, self.hardware.platform, self.hardware.slices)
        problem = self._model(mesh)
        if isinstance(problem, UserError):
            raise problem
        return self.candidate(self.choice(mesh, micro_batch_size(self.size, mesh), self.save))

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

    def in_halves(self, one: Candidate) -> Candidate | None:
        """A candidate whose layers run on two halves of the batch; None: that is impossible, or hides nothing more."""
        is_whole = one.parts == 1 and self.config.precision.matmul == 'compute'
        if one.mesh['t'] == 1 or one.micro % 2 or self.arch.experts.n_experts or not is_whole:
            return None
        halves = self.candidate(Choice(one.mesh, one.micro, one.save, 2, one.offload))
        return halves if halves.prediction.exposed < one.prediction.exposed else None

    def choice(self, mesh: dict[str, int], micro: int, save: Any, offload: tuple[str, ...] | None = None) -> Choice:
        """A choice with the configured number of parts, and the configured `memory.offload` if it is None."""
        parts = math.gcd(self._model(mesh).plan.batch_parts, micro)
        return Choice(mesh, micro, save, parts, self.config.memory.offload if offload is None else offload)

    def candidate(self, choice: Choice, by_default: bool = False) -> Candidate:
        """Predicts a choice, whose mesh must be possible for the model.

        Args:
            choice: what to predict.
            by_default: without compiler options, as if the configuration removed them all.
        """
        step = self._facts(choice)
        memory = expected_memory(self.arch, self.n_stored_params, step)
        memory = in_island(memory, self.config.federation, choice.mesh, self.hardware.devices_per_host)
        topology, by_default = self.hardware, by_default or self._removes_options(choice.mesh)
        shares = exposed_by_default(topology.device) if by_default else None
        prediction = predict(self.arch, self.n_stored_params, self.size.sequence_length, step, topology, shares)
        chosen = {field.name: getattr(choice, field.name) for field in dataclasses.fields(Choice)}
        return Candidate(**chosen, memory=memory, prediction=prediction, compiled=self._compiled(choice))

    def fits(self, choice: Choice) -> bool:
        """Whether a choice fits, as the compiler says, or else as the formula says with some room."""
        limit = self.room if self._compiled(choice) is None else self.hardware.memory
        return self.needed(choice) <= limit

    def needed(self, choice: Choice) -> int:
        """Bytes per device: the compiler's, or else those of the formula."""
        if compiled := self._compiled(choice):
            return compiled.needed
        return expected_memory(self.arch, self.n_stored_params, self._facts(choice)).total

    def _compiled(self, choice: Choice) -> CompiledFact | None:
        return self._known.get(choice.written()) if self._known else None

    def _facts(self, choice: Choice) -> StepFacts:
        mesh, micro = choice.mesh, choice.micro
        model = self._model(mesh)
        saved = choose_saved(choice.save, mesh, True)[0]
        passes = sequences_per_device(self.size, mesh) // micro
        schedule = self._schedule(mesh, passes, saved, model.plan.loss_chunks)
        return StepFacts(
            mesh=mesh,
            tokens=self.size.tokens // passes,
            platform=self.hardware.platform,
            compute='f32' if self.config.precision.compute == 'f32' else 'bf16',
            eight_bits=eight_bits_of(model, self._state.weights),
            update=self.update_cost(mesh),
            in_host=choice.offload,
            saved=saved,
            unrolled=model.plan.unrolled,
            passes=1 if schedule else passes,
            rounds=schedule.rounds if schedule else 1,
            micro_batches=passes if schedule else 1,
            inputs=schedule.inputs if schedule else None,
            loss_chunks=model.plan.loss_chunks,
            batch_parts=choice.parts,
            reduction=self.config.precision.reduction,
            context=model.plan.context,
            teacher=model.teacher_arch,
            kept_states=model.kept_states,
            probabilities=kept_probabilities(model.plan.kernel, self.size.sequence_length),
            clips_logits=getattr(self.config.optimizer.options, 'qk_clip', None) is not None,
        )

    def update_cost(self, mesh: dict[str, int]) -> UpdateCost:
        """The cost of the update on a mesh."""
        key = tuple(mesh[axis] for axis in self._axes_of_cost)
        if key not in self._updates:
            recipe = build_recipe(self.config, self._model(mesh), 1)
            sizes = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
            with jax.sharding.use_abstract_mesh(sizes):
                self._updates[key] = update_cost(recipe, abstract_state(recipe, other=self._state))
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
        self, saves: Sequence[Any] | None = None, only: Mapping[str, int] | None = None, micro: int | None = None
    ) -> Search:
        """Predicts the candidates that fit. Each mesh and micro-batch has the fastest way to save memory that fits.

        Args:
            saves: values of `model.save`, with the configured `memory.offload`; None: several.
            only: the sizes of some axes.
            micro: the micro-batch; None: each that is possible.
        """
        found: list[Candidate] = []
        tried: list[tuple[dict[str, int], int]] = []
        ways: list[tuple[Any, tuple[str, ...]]] = []
        smallest: dict[int, Choice] = {}
        for mesh in layouts(self.hardware, self.arch, self.size.sequence_length, self.rows, only or {}):
            if isinstance(self._model(mesh), UserError):
                continue
            every = saves is not None or mesh['d'] * mesh['p'] == 1  # otherwise 'full' and 'all' are the same
            sizes = micro_batch_sizes(self.rows // sequence_shards(mesh), mesh['p'])
            for n in sizes:
                if micro not in (None, n):
                    continue
                ways = ways or self._ways(mesh, sizes[-1], saves)
                choices = [self.choice(mesh, n, *way) for way in ways if way[0] != 'full' or every]
                tried.append((mesh, n))
                leanest = self.needed(choices[-1])
                smallest.setdefault(leanest, choices[-1])
                if leanest <= self.hardware.memory and (fits := next(filter(self.fits, choices), None)):
                    one = self.candidate(fits)
                    halves = self.in_halves(one)
                    found.append(halves if halves and self.fits(halves) else one)
        found.sort(key=lambda one: one.rank)
        return Search(found, tried, ways, self.candidate(smallest[min(smallest)]) if tried else None, self.room)

    def _ways(self, mesh: dict[str, int], micro: int, saves: Sequence[Any] | None) -> list[tuple[Any, tuple[str, ...]]]:
        """Values of `model.save` and `memory.offload`: the fastest first, as predicted for one mesh and micro-batch.

        The optimizer is in host memory only if nothing else fits, since the step waits for it. The last needs the least
        memory.
        """
        configured, has_host = self.config.memory.offload, self.hardware.device.host is not None
        offloads = [configured]
        if saves is None:
            saves = [*SAVES, *(OFFLOADED if has_host else ())]
            saves += [self.save] * (self.save not in saves)
            offloads += [(*configured, 'optimizer')] * (has_host and 'optimizer' not in configured)
        ordered = sorted((self.candidate(self.choice(mesh, micro, save)) for save in saves), key=lambda one: one.rank)
        leanest = min(ordered, key=lambda one: one.memory.total)
        return [*((one.save, offload) for offload in offloads for one in ordered), (leanest.save, offloads[-1])]

    def _model(self, mesh: dict[str, int]) -> Any:
        """The model on a mesh, or the reason why it is impossible."""
        key = tuple(mesh.values())
        if key not in self._models:
            try:
                request = ModelRequest(
                    vocab_size=self._source.vocab_size,
                    sequence_length=self.size.sequence_length,
                    dtype=jax.numpy.float32 if self.config.precision.compute == 'f32' else jax.numpy.bfloat16,
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


def make_plan(config: RunConfig, hardware: Topology, say: Report, compiled: CompiledFacts | None = None) -> Plan:
    """Predicts a run on some hardware, and searches for faster candidates. For `compiled` see `Planner`.

    Raises:
        UserError: the model has no architecture, or the configuration is impossible on any mesh.
    """
    planner = Planner(config, hardware, say, compiled)
    try:
        now = planner.as_configured()
        options = planner.options(now.mesh)
        facts = {'now': now, 'options': options, 'left_out': planner.left_out(now.mesh)}
        facts |= {'in_halves': planner.in_halves(now), 'is_looped': planner.is_looped(now.mesh)}
        facts['slow_attention'] = planner.slow_attention(now.mesh)
        if options and exposed_by_default(hardware.device):
            facts['by_default'] = planner.candidate(now, by_default=True).prediction
    except UserError as error:
        why = '; '.join(line.strip() for line in str(error).splitlines()[:2])
        facts = {'why': why, 'left_out': keys_left_out(config)}
    n_params = planner.n_stored_params - planner.arch.n_padding_params
    return Plan(hardware, planner.search(), n_params, **facts)


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
        room = hardware.memory - plan.now.needed
        lines += [f'as configured ({plan.now.written()}):', *_details(plan.now, room), *_options(plan)]
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
            size(one.needed) + ' compiled' * (one.compiled is not None),
            size(one.memory.host) if one.memory.host else '-',
            one.prediction.bound,
            one.written(),
        ]
        for one in plan.found[:shown]
    ]
    if rows:
        width = terminal_width()
        table = text_table(
            [['step', 'MFU', 'memory', 'host', 'limited by', 'change'], *rows], (4, 5), width=width and width - 4
        )
        lines += [f'    {line}' for line in table]
    return lines


def _details(one: Candidate, room: float) -> Iterator[str]:
    fits = 'fits' if room >= 0 else 'DOES NOT FIT'
    if 0 <= room < (1 - MARGIN) * (room + one.needed):
        fits += ', so closely that XLA may hide little communication'
    yield f'    memory: {one.memory} -> {fits}'
    if one.compiled:
        exposed = one.compiled.exposed
        waits = '' if exposed is None else f'; {exposed:.3g} s of communication not overlapped'
        yield f'    compiled earlier: {size(one.needed)} per device{waits}'
    for phase in one.prediction.phases:
        hidden = '' if phase.exposed >= phase.seconds else f', {phase.exposed:.3g} s not overlapped'
        yield f'    {phase.name:<32}{phase.seconds:>9.3g} s  {phase.bound}{hidden}'
    step = one.prediction
    interval = f' ({step.published.interval(step.seconds)})' if step.published else ''
    yield f'    step {step.seconds:.3g} s{interval}, MFU {step.mfu:.1%}, limited by {step.bound}'


def _options(plan: Plan) -> Iterator[str]:
    """The compiler options, and what they change."""
    for group in by_reason(plan.options):
        yield f'    compiler options: {group[0].reason}'
        yield from (f'        {option}' for option in group)
    if plan.by_default and plan.now:
        now, other = plan.now.prediction, plan.by_default
        yield (
            f'    with these options, {now.exposed:.3g} s of communication are not overlapped; with the defaults of '
            f'XLA, {other.exposed:.3g} s, and the step takes {other.seconds:.3g} s'
        )
    if plan.in_halves:
        halves = plan.in_halves.prediction
        yield (
            f'    model.batch_parts=2: {halves.exposed:.3g} s of communication are not overlapped, and the step takes '
            f'{halves.seconds:.3g} s'
        )
    if plan.is_looped:
        yield '    model.layers=unroll: 2 to 4 % faster in compiled steps on GPUs, and compiles longer'


def verified(config: RunConfig, topology: Topology, plan: Plan, compiled: CompiledFacts) -> Iterator[str]:
    """Compiles the best candidates that were not compiled before. A line for each compares the compiler's memory and
    exposed communication with the predicted ones.

    Raises:
        UserError: the plugin that compiles for the topology is not installed.
    """
    if not plan.found:
        yield 'nothing to verify: no candidate fits'
        return
    yield f'compiled{"":<16}{"predicted":>10}  error  not overlapped{"":<10}change'
    for one in plan.found[:BEST]:
        fact = one.compiled
        if fact is None:
            planned = compile_ahead(having(config, one), topology, lambda text: None)
            schedule = schedule_of(planned)
            fact = compiled.add(one.written(), CompiledFact(planned.needed, schedule and schedule.exposed))
        fits = 'fits' if fact.needed <= topology.memory else 'DOES NOT FIT'
        memory = f'{size(one.memory.total):>10}  {one.memory.total / fact.needed - 1:+5.0%}'
        waits = '' if fact.exposed is None else f'{fact.exposed:.3g} s, {one.prediction.exposed:.3g} s'
        yield f'{size(fact.needed):>8}, {fits:<14}{memory}  {waits:<24}{one.written()}'


def having(config: RunConfig, choice: Choice) -> RunConfig:
    """The configuration with the values of a choice."""
    values = written_values(config)
    chosen = choice.values()
    sections = {name: values.get(name, {}) | keys for name, keys in chosen.items() if name != 'mesh'}
    return from_values(values | sections | {'mesh': chosen['mesh']})
