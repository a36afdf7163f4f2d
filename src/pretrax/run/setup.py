"""From a configuration to all that a run needs: mesh, data, model, recipe. Each derivation is a line of the report."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pretrax.config import RunConfig, build
from pretrax.data.batches.source import DataRequest, HostBatch, Source
from pretrax.errors import UserError
from pretrax.machine.cpu import measured_cpu
from pretrax.model.axes import ROWS, along
from pretrax.model.loss import Batch
from pretrax.model.request import ModelRequest
from pretrax.run.devices import choose_compute, choose_mesh
from pretrax.run.processes import join_processes
from pretrax.run.program_cache import keep_programs
from pretrax.scale.devices import lookup
from pretrax.scale.flops import FORMULA_VERSION, Flops, flops_per_token, mfu
from pretrax.scale.memory import Memory, expected_memory
from pretrax.shardlib import make_abstract, make_shardings
from pretrax.train.host_memory import check_host_memory, has_host_memory
from pretrax.train.step import Recipe, TrainState, abstract_state

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train, and the report of how it came about."""

    config: RunConfig
    mesh: Mesh
    source: Any
    recipe: Recipe
    like: TrainState  # shapes, dtypes and shardings of the state
    rows: int  # sequences a step
    compute: str  # dtype of matrix products
    flops: Flops | None  # of a token; None where the model does not tell
    mfu: Callable[[float], dict[str, float]]  # tokens/s -> the MFU metrics, none for an unknown device
    report: list[str]

    def place(self, host: Callable[[slice], HostBatch]) -> Batch:
        """A batch on the devices; each process asks `host` only for the rows that its own devices hold."""
        fetched: dict[tuple[int, int], HostBatch] = {}
        order = getattr(self.recipe.model, 'column_order', None)

        def rows_of(index: Any) -> HostBatch:
            start, stop, _ = index[0].indices(self.rows)
            if (start, stop) not in fetched:
                fetched[start, stop] = host(slice(start, stop))
            return fetched[start, stop]

        def put(position: int, sharding: Any) -> Any:
            def part(index: Any) -> Any:
                every: Any = rows_of(index)[position]
                ordered = every if order is None else every[:, order]
                return ordered[:, index[1]]  # of whole sequences those columns that the device has

            return jax.make_array_from_callback((self.rows, self.config.batch.sequence_length), sharding, part)

        shardings = make_shardings(Batch, self.mesh)
        return Batch(*(put(i, getattr(shardings, name)) for i, name in enumerate(HostBatch._fields)))

    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a batch."""
        return make_abstract(Batch, {'B': self.rows, 'L': self.config.batch.sequence_length})

    def batch(self, step: int) -> Batch:
        """The training batch of a step: the same for any mesh and number of processes."""
        return self.place(lambda rows: self.source.batch(step, rows, self.rows))

    def validation(self, index: int, part: str = '') -> Batch:
        """A batch of held-out text, of one of `validation_parts` or of all."""
        held_out = self.validation_parts[part][1]
        return self.place(lambda rows: held_out(index, rows, self.rows))

    @property
    def validation_parts(self) -> Mapping[str, tuple[float, Callable[[int, slice, int], HostBatch]]]:
        """{name: (weight in the validation loss, batches)}; the name is '' where the data is one source."""
        parts = getattr(self.source, 'validation_parts', None)
        whole = getattr(self.source, 'validation', None)
        return parts if parts is not None else {'': (1.0, whole)} if whole else {}


def prepare(config: RunConfig, say: Say = print, devices: Sequence[Any] | None = None) -> Run:
    """Builds a run; prepares its data if need be, which may take a while.

    Args:
        config: the run.
        say: told what takes a while.
        devices: to run on, which need not exist if nothing is run; None: those that are here.

    Raises:
        UserError: something in the configuration does not fit the data, the model or the devices.
    """
    if devices is None:
        join_processes(config)
        keep_programs(say)
    length = config.batch.sequence_length
    rows = config.batch.tokens // length
    mesh, sizes, lines = choose_mesh(config.mesh, rows, length, devices)
    device = mesh.devices.flat[0]
    platform = device.platform
    memory = None if devices is not None else mesh.local_devices[0]  # devices that are only described do not tell
    check_host_memory(memory, config.memory.offload)
    dtype, why_dtype = choose_compute(config.precision.compute, platform)
    source = open_source(config, rows, say)

    passes, line = choose_passes(config, rows, sizes)
    request = ModelRequest(
        vocab_size=source.vocab_size, sequence_length=length, dtype=dtype, platform=platform, mesh=sizes,
        documents_per_row=getattr(source, 'documents_per_row', None), micro_batches=passes if sizes['p'] > 1 else 1,
        device_kind=device.device_kind, matmul=config.precision.matmul, exempt=config.precision.exempt,
        host_memory=has_host_memory(memory),
    )  # fmt: skip
    model = build('model', config.model, request)
    if config.precision.matmul != 'compute' and not hasattr(model, 'numerics'):
        raise UserError(
            f'precision.matmul={config.precision.matmul}: the products of model.name={config.model.name} are its own\n'
            'leave it out, or use model.name=transformer'
        )
    if sizes['p'] > 1 and getattr(model, 'schedule', None) is None:
        raise UserError(
            f'mesh.p = {sizes["p"]}: model.name = {config.model.name} does not come in stages\nuse mesh.p=1'
        )
    schedule = build('schedule', config.schedule, config.steps)
    recipe = Recipe(
        model=model,
        optimizer=build('optimizer', config.optimizer),
        rate=lambda step: config.optimizer.learning_rate * schedule(step),
        weight_decay=config.optimizer.weight_decay,
        no_decay=config.optimizer.no_decay,
        clip_norm=config.optimizer.clip_norm,
        accumulation=1 if sizes['p'] > 1 else passes,
        seed=config.seed,
        offload=config.memory.offload,
        spike=config.faults.spike,
    )
    with jax.set_mesh(mesh):
        like = abstract_state(recipe)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(like.weights))
    compute = {2: 'bf16', 4: 'f32'}[np.dtype(dtype).itemsize]
    lines += [
        f'batch: {line}',
        f'model: {config.model.name}, {_count(model, n_params)}',
        f'compute: {compute} ({why_dtype}); weights, optimizer, norms and loss f32',
        *[f'offload: {" and ".join(config.memory.offload)} in host memory between steps'] * bool(config.memory.offload),
        *(f'{name}: {choice}' for name, choice in getattr(model, 'choices', {}).items()),
    ]
    flops = _flops(model, length)
    rate, why_rate = _utilisation(mesh, compute, flops)
    run = Run(config, mesh, source, recipe, like, rows, compute, flops, rate, lines)
    memory = memory_with(run)
    lines += [*([f'memory: {memory}'] if memory else []), why_rate]
    return run


def open_source(config: RunConfig, rows: int, say: Say) -> Source:
    """The data. One process prepares it, the others then find it ready."""
    request = DataRequest(config.seed, config.batch.sequence_length, config.run_dir / 'data', say, config.steps, rows)
    if jax.process_count() == 1:
        return build('data', config.data, request)
    from jax.experimental.multihost_utils import sync_global_devices

    prepared = build('data', config.data, request) if jax.process_index() == 0 else None
    sync_global_devices('data is prepared')
    return prepared or build('data', config.data, request)


def choose_passes(config: RunConfig, rows: int, sizes: dict[str, int]) -> tuple[int, str]:
    """In how many parts each device takes its sequences: one after the other, or through the stages of a pipeline."""
    a_device, stages = rows // along(ROWS, sizes), sizes['p']
    fits = [n for n in range(stages, a_device + 1, stages) if a_device % n == 0]
    if not fits:
        more = -(-a_device // stages) * stages * along(ROWS, sizes)
        raise UserError(
            f'batch: the {a_device} sequences of each device are too few micro-batches for mesh.p = {stages} stages, which '
            f'take {stages} at a time\ngive batch.tokens={more * config.batch.sequence_length} for {more} sequences, or '
            'a smaller mesh.p'
        )
    micro = config.batch.micro
    if micro == 'auto':
        raise UserError(
            'batch.micro: auto is measured by `pretrax train`\n'
            'in a program: config = pretrax.ahead.auto.settled(config, print)'
        )
    if micro is None:  # with a pipeline large micro-batches, but so many that its bubble is below a fifth
        passes = 1 if stages == 1 else next((n for n in fits if n >= 4 * stages), fits[-1])
        micro = a_device // passes
    if a_device % micro or (a_device // micro) % stages:
        nearest = min((a_device // n for n in fits), key=lambda n: abs(n - micro))
        why = f'does not divide the {a_device} sequences of each device'
        if a_device % micro == 0:
            why = f'makes {a_device // micro} micro-batches a device; mesh.p = {stages} stages take {stages} at a time'
        raise UserError(f'batch.micro = {micro} {why}\nuse batch.micro={nearest}')
    passes = a_device // micro
    called = 'micro-batches' if stages > 1 else 'pass' if passes == 1 else 'passes'
    line = (
        f'{config.batch.tokens:,} tokens = {rows} sequences x {config.batch.sequence_length}; '
        f'{a_device} a device, {passes} {called} of {micro}'
    )
    return passes, line


def _count(model: Any, n_params: int) -> str:
    idle = model.arch.n_idle_params if hasattr(model, 'arch') else 0
    return f'{n_params:,} parameters' + (f', {n_params - idle:,} of them for each token' if idle else '')


def _flops(model: Any, length: int) -> Flops | None:
    """Training FLOPs for a token; None where the model does not tell its architecture."""
    arch = getattr(model, 'arch', None)
    if arch is None:
        own: Any = getattr(model, 'flops_per_token', None)
        return None if own is None else Flops(own, own)
    return flops_per_token(
        n_matmul_params=arch.n_matmul_params, n_layers=arch.n_layers, n_heads=arch.n_heads, d_head=arch.d_head,
        sequence_length=length, windows=arch.windows,
    )  # fmt: skip


def _utilisation(mesh: Mesh, compute: Any, per_token: Flops | None) -> tuple[Callable[[float], dict[str, float]], str]:
    """MFU as a function of tokens/s, and what the report says of it."""
    if per_token is None:
        return lambda _: {}, 'mfu: none, since the model does not tell its architecture'
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    device = measured_cpu(jax.local_devices()) if devices[0].platform == 'cpu' else lookup(kind)
    if device is None:
        return lambda _: {}, f"mfu: none, since the peak of a '{kind}' is not known"
    peak = device.peak(compute)

    def metrics(tokens_per_second: float) -> dict[str, float]:
        return {
            'mfu': mfu(tokens_per_second, per_token.causal, peak, len(devices)),
            'mfu_full': mfu(tokens_per_second, per_token.full, peak, len(devices)),
        }

    return metrics, f'mfu: of {peak / 1e12:,.3g} TFLOP/s a device, {device.name}, formula {FORMULA_VERSION}, causal'


def memory_with(
    run: Run,
    mesh: Mapping[str, int] | None = None,
    accumulation: int | None = None,
    recompute: bool = False,
    moments: float | None = None,
    loss_chunks: int | None = None,
) -> Memory | None:
    """Expected memory of a run, as it is or with something changed; None for a model without an architecture."""
    model: Any = run.recipe.model
    arch = getattr(model, 'arch', None)
    if arch is None:
        return None
    n_params = sum(leaf.size for leaf in jax.tree.leaves(run.like.weights))
    n_moments = sum(leaf.size for leaf in jax.tree.leaves(run.like.optimizer)) / n_params
    compute: Any = run.compute
    schedule = getattr(model, 'schedule', None)
    parts = (accumulation or run.recipe.accumulation) * (schedule.micro_batches if schedule else 1)
    return expected_memory(
        **memory_sizes(arch, n_params), mesh=mesh or dict(run.mesh.shape), compute=compute,
        moments=n_moments if moments is None else moments,
        tokens=run.config.batch.tokens // parts,
        saved={} if recompute else getattr(model, 'saved', None), unrolled=getattr(model, 'unrolled', False),
        platform=run.mesh.devices.flat[0].platform, passes=accumulation or run.recipe.accumulation,
        loss_chunks=loss_chunks or model.loss_chunks,
        **({'rounds': schedule.rounds, 'micro_batches': schedule.micro_batches} if schedule else {}),
    )  # fmt: skip


def memory_sizes(arch: Any, n_params: int) -> dict[str, Any]:
    """What `expected_memory` has to know of an architecture."""
    return {
        'n_params': n_params, 'n_layers': arch.n_layers, 'd_model': arch.d_model, 'n_heads': arch.n_heads,
        'n_kv_heads': arch.n_kv_heads, 'd_head': arch.d_head, 'd_ff': arch.d_ff, 'vocab_size': arch.padded_vocab_size,
        'gated': arch.gated, 'n_experts': max(1, arch.n_experts), 'd_shared': arch.d_shared,
        'experts_per_token': arch.experts_per_token if arch.n_experts else 1,
        'n_norms': arch.n_norms, 'qk_norm': arch.qk_norm != 'none',
    }  # fmt: skip
