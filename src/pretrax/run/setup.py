"""Prepares a run: from a configuration to its mesh, data, model and recipe."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from pretrax.config import InitFrom, RunConfig, feature, resolve_mesh, shown_prompts, written_values
from pretrax.config.batch import (
    check_batch,
    describe_batch,
    micro_batch_size,
    rows_before,
    rows_of,
    sequences_per_device,
    tokens_before,
)
from pretrax.config.batch_sizes import BatchSize
from pretrax.config.registry import DEFAULTS
from pretrax.config.schema import Batch as BatchSection
from pretrax.config.schema import Checkpoint, Compiler, Distill, Eval, Faults, Federation, Log, Optimizer, Sample
from pretrax.config.schema import Mesh as MeshSection
from pretrax.cost.eight_bits import eight_bits_of
from pretrax.cost.flops import Flops
from pretrax.cost.memory import Memory, expected_memory, with_island
from pretrax.cost.step_facts import ComputeDtype, StepFacts
from pretrax.data.batches.prefetch import Waiting, prefetch
from pretrax.data.batches.sequences import check_row_order, read_sequences
from pretrax.data.batches.share import Share
from pretrax.data.batches.source import DataRequest, HostBatch, Source
from pretrax.errors import Report, UserError
from pretrax.federation.encoding import arrays_held
from pretrax.infer.sample import check_can_sample
from pretrax.model.attention import kept_probabilities
from pretrax.model.base import AutomaticModel, Model
from pretrax.model.loss import Batch
from pretrax.model.request import ModelRequest
from pretrax.run.compiler_options import CompilerOptions, choose_compiler_options
from pretrax.run.contracts import Component, build_component, check_init, check_run, check_schedule, read_rows
from pretrax.run.devices import choose_compute, choose_mesh
from pretrax.run.placement import n_slices
from pretrax.run.program_cache import keep_programs
from pretrax.run.same_run import check_same_data, check_same_run
from pretrax.run.startup import StartupLine, StartupReport
from pretrax.run.utilization import Utilization, choose_utilization, training_flops
from pretrax.run.variables import seen_variables
from pretrax.shardlib import make_abstract, make_shardings
from pretrax.storage import AnyPath
from pretrax.storage.locate import working_directory
from pretrax.system.target import Hardware
from pretrax.train.groups import Group
from pretrax.train.host_memory import check_host_memory, has_host_memory
from pretrax.train.optimizer import describe_matrices
from pretrax.train.skipping import LossScale
from pretrax.train.state import abstract_state
from pretrax.train.step import Recipe, TrainState
from pretrax.train.update_cost import update_cost

if TYPE_CHECKING:
    from pretrax.distill.teaching import Teaching


@dataclasses.dataclass(frozen=True)
class Run:
    """A prepared run, for batches of one size: the largest. Nothing has been trained yet."""

    config: RunConfig  # for readers outside of training, which reads the sections below
    written: Mapping[str, Any]  # the values of `config` as pretrax writes them, in checkpoints and to trackers
    shown_prompts: Sequence[str]  # `sample.prompts` as pretrax shows them
    name: str
    run_dir: AnyPath
    steps: int
    init_from: str | InitFrom | None
    sizes: BatchSection  # of all batches
    log: Log
    eval: Eval
    sample: Sample
    checkpoint: Checkpoint
    faults: Faults
    federation: Federation
    compiler: Compiler
    size: BatchSize
    mesh: Mesh
    source: Source
    recipe: Recipe
    like: TrainState  # shapes, dtypes and shardings of the state
    compute: ComputeDtype  # dtype of matrix products
    flops: Flops | None  # per token; None: not known
    mfu: Utilization
    startup: list[StartupLine]
    components: Mapping[str, Component]  # what the configuration names: the model, the data, ...
    teaching: 'Teaching | None' = None  # what `distill` adds; None: the run has no teacher
    smaller: 'Sequence[Run]' = dataclasses.field(default=(), repr=False, compare=False)  # for batches of other sizes

    def at(self, number: int) -> 'Run':
        """The run for batches of the size of the batch with this number; see `config.batch`."""
        size = self.sizes.at(number)
        return self if size == self.size else next(run for run in self.smaller if run.size == size)

    def with_share(self, index: int) -> 'Run':
        """The run of an island, with its share of the data. It has not been replaced by a share yet."""
        source = Share(self.source, index, self.federation.shares)
        smaller = [dataclasses.replace(run, source=source) for run in self.smaller]
        return dataclasses.replace(self, source=source, smaller=smaller)

    def tokens_before(self, number: int) -> int:
        """Tokens of all batches before the one with this number."""
        return tokens_before(self.sizes, number)

    @property
    def first_batch(self) -> int:
        """The number of the first batch of this size."""
        return next(first for first, size in self.sizes.sizes.items() if size == self.size)

    @property
    def rows(self) -> int:
        """Sequences per step."""
        return self.size.sequences

    @property
    def n_params(self) -> int:
        """Weights of the model, over all devices, without the rows that pad its vocabulary."""
        arch = self.recipe.model.arch
        return self.n_stored_params - (arch.n_padding_params if arch is not None else 0)

    @property
    def n_stored_params(self) -> int:
        """Weights in memory, over all devices: those of the model and the rows that pad its vocabulary."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.like.weights))

    @functools.cached_property
    def compiler_options(self) -> CompilerOptions:
        """Options of XLA for the step. Raises UserError if `compiler.options` cannot be used for these devices."""
        devices = list(self.mesh.devices.flat)
        return choose_compiler_options(self.compiler.options, devices, dict(self.mesh.shape), n_slices(devices))

    def batch(self, number: int) -> Batch:
        """The training batch with this number: the same on any mesh and with any number of processes."""
        where = rows_of(self.sizes, number)
        return self.at(number).place(lambda rows: read_sequences(self.source, *where, rows), self.teaching)

    def batches(self, numbers: Iterable[int], report: Report, waiting: Waiting = nullcontext) -> Generator[Batch]:
        """The training batches with these numbers, fetched ahead. A long wait is reported with its cause.

        `waiting` is entered for each wait: see `prefetch`.
        """

        def stalled(number: int, seconds: float) -> None:
            reading = self.source.reading
            cause = f'the source is reading {reading}' if reading else 'making the batch is slow'
            report(f'batch {number}: waited {seconds:.1f} s for data; {cause}')

        return prefetch(self.batch, numbers, 2, self.log.stall_seconds, stalled, waiting)

    def validation(self, index: int, part: str = '') -> Batch:
        """A batch of held-out text from one of the source's `validation_parts`."""
        _, held_out = self.source.validation_parts[part]
        return self.place(lambda rows: held_out(index, rows, self.rows))

    def place(self, host: Callable[[slice], HostBatch], teaching: 'Teaching | None' = None) -> Batch:
        """A batch on the devices, with fields of `teaching`. `host` is asked only for this process's rows."""
        fetched: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        order = self.recipe.model.column_order
        fields = {**dict.fromkeys(HostBatch._fields, ()), **(teaching.fields if teaching else {})}

        def rows_of(index: Any) -> dict[str, np.ndarray]:
            start, stop, _ = index[0].indices(self.rows)
            if (start, stop) not in fetched:
                rows = read_rows(self, host, slice(start, stop))
                self._check_tokens(rows)
                fetched[start, stop] = rows._asdict() | dict(teaching.read(rows) if teaching else {})
            return fetched[start, stop]

        def put(field: str, sharding: Any) -> Any:
            def shard(index: Any) -> np.ndarray:
                whole: Any = rows_of(index)[field]
                ordered = whole if order is None else whole[:, order]
                return ordered[:, index[1]]

            last = [teaching.sizes[dimension] for dimension in fields[field]] if teaching else []
            shape = (self.rows, self.size.sequence_length, *last)
            return jax.make_array_from_callback(shape, sharding, shard)

        return Batch(**{field: put(field, getattr(self._shardings, field)) for field in fields})

    @functools.cached_property
    def _shardings(self) -> Batch:
        return make_shardings(Batch, self.mesh)

    def _check_tokens(self, rows: HostBatch) -> None:
        """Raises UserError if rows have a token that the model lacks: a device would read another one in its place."""
        n_tokens, largest = self.recipe.model.vocab_size, max(int(ids.max()) for ids in tuple(rows)[:2])
        if n_tokens is not None and largest >= n_tokens:
            raise UserError(
                f'the data have token {largest:,}, but the model has the tokens 0 to {n_tokens - 1:,}\n'
                f'leave out the text with this token, or use model.vocab_size={self.source.vocab_size}'
            )

    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a batch."""
        sizes = {'B': self.rows, 'L': self.size.sequence_length, **(self.teaching.sizes if self.teaching else {})}
        present = {*HostBatch._fields, *(self.teaching.fields if self.teaching else ())}
        omit = tuple(field.name for field in dataclasses.fields(Batch) if field.name not in present)
        return make_abstract(Batch, sizes, omit=omit)

    def constants(self, report: Report) -> Any:
        """The constants of the loss, on the devices; None: it needs none. The mesh of the run must be set."""
        return self.teaching.load(self, report) if self.teaching else None


# What `Run` takes over from the configuration.
_SECTIONS = (
    'name',
    'run_dir',
    'steps',
    'init_from',
    'log',
    'eval',
    'sample',
    'checkpoint',
    'faults',
    'federation',
    'compiler',
)


def prepare(
    config: RunConfig, report: Report = print, devices: Sequence[Any] | None = None, source: Source | None = None
) -> Run:
    """As `pretrax.prepare`, for a configuration without `auto`. `source` takes the place of its data."""
    if devices is None:
        check_same_run(config)
        keep_programs(report)
    mesh, facts, hardware = _choose_devices(config.mesh, config.batch, config.memory.offload, devices)
    dtype, compute, dtype_reason = _compute_dtype(config.precision.compute, hardware)
    if source is None:
        check_setup(config, hardware)  # before the text is tokenized
        source = open_source(config, report)
    if devices is None:
        check_same_data(source)
    teaching = _teaching(config.distill)
    if teaching is not None:
        teaching.open_files(config.batch, getattr(config.model.options, 'vocab_size', None), source)
    written, shown = written_values(config), shown_prompts(config.sample.prompts, config.references)
    components = {kind: Component.registered(kind, getattr(config, kind).name) for kind in DEFAULTS}

    def prepare_size(size: BatchSize) -> Run:
        model = _checked_model(config, size, source, mesh.shape, hardware, dtype)
        recipe = build_recipe(config, model, 1 if mesh.shape['p'] > 1 else _passes(size, mesh.shape))
        with jax.set_mesh(mesh), components['optimizer'].running('init'):
            check_init(config.model.name, model)
            like = abstract_state(recipe)
        flops = training_flops(model, size.sequence_length)
        return Run(
            **{name: getattr(config, name) for name in _SECTIONS},
            config=config,
            written=written,
            shown_prompts=shown,
            sizes=config.batch,
            size=size,
            mesh=mesh,
            source=source,
            recipe=recipe,
            like=like,
            compute=compute,
            flops=flops,
            mfu=choose_utilization(mesh, compute, flops, config.log.peak_tflops),
            startup=[],
            components=components,
            teaching=teaching,
        )

    offloaded = ' and '.join(config.memory.offload)
    *smaller, run = map(prepare_size, config.batch.sizes.values())
    facts |= {
        'batch': describe_batch(config.batch, mesh.shape),
        'model': f'{config.model.name}, {_parameters(run)}',
        'vocabulary': _tokens_without_rows(run),
        'tokenizer': getattr(source.tokenizer, 'bounds', ''),
        'compute': f'{compute} ({dtype_reason}); weights, optimizer, norms and loss f32',
        'offload': f'{offloaded} in host memory between steps' if offloaded else '',
        **_choices(run, smaller),
        'matrices': describe_matrices(config.optimizer.name, run.recipe, run.like.weights),
    }
    return dataclasses.replace(run, startup=[StartupLine(*fact) for fact in facts.items() if fact[1]], smaller=smaller)


def _choose_devices(
    section: MeshSection, batch: BatchSection, offload: Sequence[str], devices: Sequence[Any] | None
) -> tuple[Mesh, dict[str, str], Hardware]:
    """The mesh of a run, its part of the start-up report, and the devices. Raises UserError if one does not fit."""
    mesh, facts = choose_mesh(section, batch, devices)
    local, first = mesh.local_devices[0] if devices is None else None, mesh.devices.flat[0]
    check_host_memory(local, offload)
    hardware = Hardware(
        count=mesh.size,
        platform=first.platform,
        kind=first.device_kind,
        capability=getattr(first, 'compute_capability', ''),
        slices=n_slices(list(mesh.devices.flat)),
        host_memory=has_host_memory(local),
    )
    return mesh, facts, hardware


def check_setup(config: RunConfig, hardware: Hardware | None = None, vocab_size: int | None = None) -> None:
    """Checks the mesh, the batch, the model, the schedule and the optimizer of a run by arithmetic, without its data.

    Args:
        hardware: the devices of the run; None: those of this machine.
        vocab_size: number of token ids of the data; None: not known. Models other than the decoder may need more of
            the data, and are only built if it is known.

    Raises:
        UserError: one of them does not fit the others.
    """
    if config.batch.micro == 'auto':
        config = config.model_copy(update={'batch': config.batch.model_copy(update={'micro': None})})
    hardware = hardware or _choose_devices(config.mesh, config.batch, config.memory.offload, None)[2]
    mesh = resolve_mesh(config.mesh.plain(), hardware.count, hardware.platform, hardware.slices)
    check_batch(config.batch, mesh)
    dtype = _compute_dtype(config.precision.compute, hardware)[0]
    _build_schedule(config.schedule, config.steps, config.optimizer.learning_rate)
    build_component('optimizer', config.optimizer)
    if (config.model.name == DEFAULTS['model'] and config.distill is None) or vocab_size is not None:
        for size in config.batch.sizes.values():
            own, of_data = (getattr(section.options, 'vocab_size', None) for section in (config.model, config.data))
            known = next((n for n in (own, vocab_size, of_data) if isinstance(n, int)), 1 << 15)
            data = _AssumedData(known)
            model = _checked_model(config, size, data, mesh, hardware, dtype)
            _width_power(config.optimizer.name, model)


def _passes(size: BatchSize, mesh: Mapping[str, int]) -> int:
    return sequences_per_device(size, mesh) // micro_batch_size(size, mesh)


def _compute_dtype(choice: str, hardware: Hardware) -> tuple[Any, ComputeDtype, str]:
    """The dtype of matrix products, its name, and why it was chosen."""
    names: dict[str, ComputeDtype] = {'bfloat16': 'bf16', 'float16': 'fp16', 'float32': 'f32'}
    dtype, reason = choose_compute(choice, hardware.platform, hardware.capability)
    return dtype, names[np.dtype(dtype).name], reason


def _choices(run: Run, smaller: Sequence[Run]) -> dict[str, str]:
    """The choices of the model, the memory that they need, and the peak that MFU is relative to."""
    memory = memory_of_run(run)
    notes = [', for the largest batches'] if smaller else []
    if memory and run.mesh.devices.flat[0].platform == 'cpu':
        notes.append(f'; {memory.process_text(len(run.mesh.local_devices))}')
    return {
        **run.recipe.model.choices,
        **_choices_of_smaller(run, smaller),
        'memory': f'{memory}{"".join(notes)}' if memory else '',
        'mfu': run.mfu.source,
    }


def _choices_of_smaller(run: Run, smaller: Sequence[Run]) -> dict[str, str]:
    """What a model chooses differently for smaller batches, by topic."""
    return {
        f'{topic} from step {other.first_batch:,}': text
        for other in smaller
        for topic, text in other.recipe.model.choices.items()
        if text != run.recipe.model.choices.get(topic)
    }


def prepare_and_report(config: RunConfig, report: Report, verbose: bool) -> tuple[Run, StartupReport]:
    """`prepare` with a start-up report, for training.

    Raises:
        UserError: as `prepare`; or `sample.every` or `compiler.options` cannot be used; or batches grow, and the data
            do not support it.
    """
    for note in config.notes:
        report(note)
    startup = StartupReport(report, verbose)
    startup.extend(StartupLine(*line) for line in seen_variables())
    run = prepare(config, startup.report)
    check_run(run)
    if config.sample.every:
        check_can_sample(run.recipe.model, run.source, config.sample)
    check_row_order(run.source, config.data.name, (rows_of(config.batch, step)[:2] for step in config.batch.sizes))
    startup.extend(run.startup)
    if text := str(run.compiler_options):
        startup.add(StartupLine('compiler options', text))
    return run, startup


class _AssumedData(NamedTuple):
    """What a model needs to know of data that is not prepared yet."""

    vocab_size: int
    largest_token: int | None = None
    documents_per_row: int | None = 1


def open_source(config: RunConfig, report: Report) -> Source:
    """Opens the data, of all islands together. The first process prepares it; the others then find it prepared."""
    directory, longest = working_directory(config.run_dir) / 'data', config.batch.largest.sequence_length
    islands = config.federation.shares
    facts = {'rows_before': lambda step: islands * rows_before(config.batch, step), 'islands': islands}
    request = DataRequest(config.seed, longest, directory, report, config.steps, **facts)

    def build_source() -> Source:
        return build_component('data', config.data, request)

    if jax.process_count() == 1:
        return build_source()
    from jax.experimental.multihost_utils import sync_global_devices

    prepared = build_source() if jax.process_index() == 0 else None
    sync_global_devices('data is prepared')
    return prepared or build_source()


def _teaching(section: Distill | None) -> 'Teaching | None':
    return None if section is None else feature('distill')(section)


def build_model(config: RunConfig, request: ModelRequest) -> Model:
    """The model of a configuration.

    Raises:
        UserError: the model or its teacher does not support a setting of the configuration, or lacks tokens of the
            data.
    """
    name, teaching = config.model.name, _teaching(config.distill)
    if teaching is not None:
        model = teaching.build_model(name, config.model.options, request)
    else:
        model = build_component('model', config.model, request)
    largest = request.vocab_size - 1 if request.largest_token is None else request.largest_token
    if model.vocab_size is not None and model.vocab_size <= largest:
        raise UserError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's {request.vocab_size}, and the "
            'data can have '
            f'token {largest}\nleave it out, or use model.vocab_size={request.vocab_size}'
        )
    return model


def _checked_model(
    config: RunConfig,
    size: BatchSize,
    source: Source | _AssumedData,
    mesh: Mapping[str, int],
    hardware: Hardware,
    dtype: Any,
) -> Model:
    """The model of a run. Raises UserError if it does not support a setting of the run."""
    stages = mesh['p']
    request = ModelRequest(
        vocab_size=source.vocab_size,
        largest_token=source.largest_token,
        sequence_length=size.sequence_length,
        longest_sequence=config.batch.largest.sequence_length,
        documents_per_row=source.documents_per_row,
        dtype=dtype,
        platform=hardware.platform,
        mesh=dict(mesh),
        micro_batches=_passes(size, mesh) if stages > 1 else 1,
        device_kind=hardware.kind,
        slices=hardware.slices,
        matmul=config.precision.matmul,
        exempt=config.precision.exempt,
        reduction=config.precision.reduction,
        host_memory=hardware.host_memory,
        qk_clip=getattr(config.optimizer.options, 'qk_clip', None),
    )
    name = config.model.name
    model = build_model(config, request)
    if request.qk_clip is not None and getattr(model, 'qk_clip', None) is None:
        raise UserError(
            f'optimizer.qk_clip = {request.qk_clip:g}: model.name = {name} computes its own attention\n'
            'leave out optimizer.qk_clip, or use model.name=transformer'
        )
    if config.precision.matmul != model.plan.numerics.wanted:
        raise UserError(
            f'precision.matmul = {config.precision.matmul}: model.name = {name} computes its own matrix products\n'
            'leave out precision.matmul, or use model.name=transformer'
        )
    if config.precision.compute == 'fp16' and isinstance(model, AutomaticModel):
        raise UserError(
            f'precision.compute = fp16: model.name = {name} does not scale its loss\nuse precision.compute=bf16 or f32'
        )
    rows, parts = micro_batch_size(size, mesh), model.plan.batch_parts
    if rows % parts:
        raise UserError(
            f'model.batch_parts = {parts}: the {rows} sequences of a device and pass do not divide into {parts} parts\n'
            f'use a divisor of {rows}, or another batch.micro or batch.tokens'
        )
    if config.precision.reduction != model.plan.reduction:
        raise UserError(
            f'precision.reduction = {config.precision.reduction}: model.name = {name} sums its gradients in f32\n'
            'leave out precision.reduction, or use model.name=transformer'
        )
    if stages > 1 and model.plan.pipeline is None:
        raise UserError(f'mesh.p = {stages}: model.name = {name} does not support pipeline parallelism\nuse mesh.p=1')
    return model


def _build_schedule(section: Any, steps: int, learning_rate: float) -> Callable[[Any], Any]:
    schedule = build_component('schedule', section, steps)
    check_schedule(section.name, schedule, steps, learning_rate)
    return schedule


def build_recipe(config: RunConfig, model: Any, accumulation: int) -> Recipe:
    """The parts of a step of `accumulation` passes that a configuration chooses."""
    precision, optimizer = config.precision, config.optimizer
    schedule = _build_schedule(config.schedule, config.steps, optimizer.learning_rate)
    return Recipe(
        model=model,
        optimizer=build_component('optimizer', optimizer, model.matrix_dimensions),
        rate=lambda step: optimizer.learning_rate * schedule(step),
        weight_decay=optimizer.weight_decay,
        no_decay=optimizer.no_decay,
        clip_norm=optimizer.clip_norm,
        accumulation=accumulation,
        seed=config.seed,
        offload=(*config.memory.offload, *(['ema'] if 'optimizer' in config.memory.offload else [])),
        width_power=_width_power(optimizer.name, model),
        groups=_groups(optimizer),
        cautious_decay=optimizer.cautious_decay,
        ema_decay=optimizer.ema_decay,
        loss_scale=LossScale(precision.loss_scale, precision.loss_scale_steps) if precision.compute == 'fp16' else None,
        section=optimizer,
        spike=config.faults.spike,
    )


# By which power of the width an optimizer needs smaller learning rates under muP (model/mup.py)
_WIDTH_POWERS = {'adamw': 1.0, 'adafactor': 1.0, 'lion': 1.0, 'muon': 0.5}


def _width_power(optimizer: str, model: Model) -> float:
    if model.arch is not None and model.arch.mup is not None and optimizer not in _WIDTH_POWERS:
        raise UserError(
            f'model.mup: the learning rate of optimizer.name = {optimizer} does not follow the width by a known rule\n'
            f'use {", ".join(_WIDTH_POWERS)}, or leave out model.mup'
        )
    return _WIDTH_POWERS.get(optimizer, 1.0)


def _groups(optimizer: Optimizer) -> tuple[Group, ...]:
    frozen = Group(optimizer.freeze, learning_rate_scale=0.0, key='optimizer.freeze')
    others = [
        Group(group.match, group.learning_rate_scale, group.weight_decay, f'optimizer.groups[{i}].match')
        for i, group in enumerate(optimizer.groups)
    ]
    return frozen, *others


def _parameters(run: Run) -> str:
    arch = run.recipe.model.arch
    idle = arch.n_idle_params if arch is not None else 0
    active = f', {run.n_params - idle:,} of them per token' if idle else ''
    return f'{run.n_params:,} parameters{active}'


def _tokens_without_rows(run: Run) -> str:
    ours, theirs = run.recipe.model.vocab_size, run.source.vocab_size
    if ours is None or theirs <= ours:
        return ''
    return f'the tokenizer has {theirs:,} tokens, the model the first {ours:,}; the others are refused where they occur'


def step_facts(run: Run) -> StepFacts:
    """How the step of a run runs, as far as its memory and time depend on it."""
    plan, accumulation = run.recipe.model.plan, run.recipe.accumulation
    schedule = plan.pipeline
    rounds, micro_batches = (schedule.rounds, schedule.micro_batches) if schedule else (1, 1)
    return StepFacts(
        mesh=dict(run.mesh.shape),
        tokens=run.size.tokens // (accumulation * micro_batches),
        platform=run.mesh.devices.flat[0].platform,
        compute=run.compute,
        eight_bits=eight_bits_of(run.recipe.model, run.like.weights),
        update=update_cost(run.recipe, run.like),
        in_host=run.recipe.offload,
        saved=plan.saved,
        unrolled=plan.unrolled,
        passes=accumulation,
        rounds=rounds,
        micro_batches=micro_batches,
        inputs=schedule.inputs if schedule else None,
        loss_chunks=plan.loss_chunks,
        batch_parts=plan.batch_parts,
        reduction=plan.reduction,
        context=plan.context,
        teacher=run.recipe.model.teacher_arch,
        kept_states=run.recipe.model.kept_states,
        probabilities=kept_probabilities(plan.kernel, run.size.sequence_length),
    )


def memory_of_run(run: Run, step: StepFacts | None = None) -> Memory | None:
    """Expected memory of a run, or of another step with its weights; None for a model without an architecture."""
    arch = run.recipe.model.arch
    if arch is None:
        return None
    memory = expected_memory(arch, run.n_stored_params, step or step_facts(run))
    return in_island(memory, run.federation, run.mesh.shape, len(run.mesh.local_devices))


def in_island(memory: Memory, section: Federation, mesh: Mapping[str, int], devices_per_host: int) -> Memory:
    """The memory of a run, with what it holds as an island of a federation, if it is one."""
    arrays = arrays_held(section.encoding, section.fragments) if section.bucket is not None else 0
    return with_island(memory, arrays, mesh, devices_per_host)
