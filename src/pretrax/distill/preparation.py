"""Offline distillation: `pretrax distill prepare` writes a teacher's output for a run; `distill.cache` reads it."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from pretrax.checkpoint.agreement import together
from pretrax.config import RunConfig
from pretrax.config.batch import rows_of
from pretrax.data.batches.sequences import read_sequences
from pretrax.data.batches.source import HostBatch
from pretrax.distill.files import Description, HostTopK, TeacherFiles, create, digests
from pretrax.distill.student import DistilledTransformer, Teacher, fingerprint
from pretrax.distill.top_k import TopK
from pretrax.errors import Report, UserError
from pretrax.model.loss import Batch
from pretrax.run.processes import is_first_process, join_processes
from pretrax.run.setup import Run, prepare
from pretrax.shardlib import scope, typed_shard_map
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.lease import held_for
from pretrax.storage.locate import working_directory
from pretrax.system.locks import LockedError, lock_directory

PART_BYTES = 256 << 20  # of log probabilities; a run that is killed loses at most one part


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A summary of the rows that `prepare_cache` wrote."""

    rows: int  # in the directory
    new_rows: int  # rows that were missing
    bytes_per_token: float  # on the disk
    tail: float  # the mean probability of the tokens that are not kept, over the new rows; nan: there are none
    tokens_per_second: float  # tokens per second of the new rows


def prepare_cache(config: RunConfig, out: AnyPath, top_k: int, report: Report) -> Prepared | None:
    """Computes with a run's teacher what the run needs to train without it. Rows that are there already are skipped.

    Several processes compute together, and process 0 writes. The others return None.

    Raises UserError if the run has no teacher, its sequences grow, or the directory is of another teacher.
    """
    if config.distill is None or config.distill.teacher is None:
        raise UserError('pretrax distill prepare needs a teacher\nadd distill.teacher=RUN and distill.cache=null')
    lengths = {size.sequence_length for size in config.batch.sizes.values()}
    if len(lengths) > 1:
        raise UserError(
            f'batch.sequence_length grows: {sorted(lengths)}, but a prepared teacher has rows of one length\n'
            'use one batch.sequence_length, or train with distill.teacher, without preparing it'
        )
    join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
    run = prepare(config, report)
    if not is_first_process():
        report = lambda text: None  # noqa: E731 - only process 0 reports
    model = run.recipe.model
    assert isinstance(model, DistilledTransformer)
    vocab_size = model.arch.vocab_size
    if top_k > vocab_size:
        raise UserError(f'--top-k {top_k}: the vocabulary has {vocab_size:,} tokens\nuse --top-k {vocab_size} or less')
    with jax.set_mesh(run.mesh):
        teacher = run.constants(report)
        assert teacher is not None
        weights = fingerprint(teacher)
        assert weights is not None
        description = Description(
            teacher=weights,
            place=config.distill.teacher,
            temperature=config.distill.temperature,
            top_k=top_k,
            vocab_size=vocab_size,
            sequence_length=run.size.sequence_length,
            tokens=run.source.fingerprint,
            tokenizer=run.source.tokenizer_sha256,
        )
        with contextlib.ExitStack() as stack:
            files = None
            with together('distill', UserError):
                if is_first_process():
                    confirm = _lock(out, config.faults.lease_seconds, stack, report)
                    files = create(out, description, report, confirm)
            return _write_rows(run, files, teacher, top_k, report)


def _lock(out: AnyPath, lease_seconds: float, stack: contextlib.ExitStack, report: Report) -> Callable[[], None]:
    """Locks a directory until the stack is closed.

    Returns:
        A function that raises UserError if another process has taken over the directory.

    Raises:
        UserError: another process writes the directory.
    """
    try:
        lock = stack.enter_context(lock_directory(working_directory(out), report))
        confirm = lock.confirm
        if isinstance(out, BucketPath):
            confirm = stack.enter_context(held_for(out, lease_seconds, report))
    except LockedError as error:
        raise _locked(out, error) from error
    except OSError as error:
        raise UserError(f'--out {out}: {error.strerror}\nrun the same command again') from error

    def confirm_or_refuse() -> None:
        try:
            confirm()
        except LockedError as error:
            raise _locked(out, error) from error

    return confirm_or_refuse


def _locked(out: AnyPath, error: LockedError) -> UserError:
    return UserError(f'--out {out}: {error.holder} writes it\nuse another directory, or wait for it')


def _write_rows(run: Run, files: TeacherFiles | None, teacher: Teacher, k: int, report: Report) -> Prepared | None:
    """Computes the rows that are missing. Process 0 has the files and writes them; all know which rows there are."""
    config, length = run.config, run.size.sequence_length
    waiting: dict[int, tuple[np.ndarray, ...]] = {}  # digest -> what the teacher says
    known = _known_to_all(files)
    began, new, tail, before = time.perf_counter(), 0, 0.0, len(known)

    def write() -> None:
        if waiting and files is not None:
            rows = np.fromiter(waiting, np.uint64, len(waiting))
            files.write(rows, HostTopK(*(np.stack(arrays) for arrays in zip(*waiting.values(), strict=True))))
            speed = new * length / (time.perf_counter() - began)
            report(f'{files.place}: {len(files):,} rows, {speed:,.0f} tokens/s')
        waiting.clear()

    if files is not None and before:
        report(f'{files.place}: continues after {before:,} rows')
    for number in range(config.steps * config.federation.shares):
        host = read_sequences(run.source, *rows_of(config.batch, number), slice(None))
        missing = {digest: row for row, digest in enumerate(digests(host).tolist()) if digest not in known}
        if not missing:
            continue
        at = run.at(number)
        found = top_k_of_batch(
            at, teacher, at.place(lambda rows, host=host: HostBatch(*(array[rows] for array in host))), k
        )
        for digest, row in missing.items():
            waiting[digest] = tuple(array[row] for array in found)
            tail += float(np.exp(found.log_tail[row]).mean())
        known.update(missing)
        new += len(missing)
        if len(waiting) * length * k * 4 >= PART_BYTES:
            write()
    write()
    seconds = time.perf_counter() - began
    if files is None:
        return None
    size = sum(path.stat().st_size for path in files.directory.glob('part-*/*.npy'))
    rate = size / max(1, len(files) * length)
    return Prepared(len(files), len(files) - before, rate, tail / new if new else float('nan'), new * length / seconds)


def _known_to_all(files: TeacherFiles | None) -> set[int]:
    """The digests of the rows that process 0 has, in every process."""
    rows = np.empty(0, np.uint64) if files is None else files.rows
    if jax.process_count() > 1:
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(rows))))
        if not count:
            return set()
        own = rows if files is not None else np.zeros(count, np.uint64)
        halves = multihost_utils.broadcast_one_to_all(own.view(np.uint32))  # JAX has no 64 bits by default
        rows = np.asarray(halves).view(np.uint64)
    return set(rows.tolist())


def top_k_of_batch(run: Run, teacher: Teacher, batch: Batch, k: int) -> HostTopK:
    """What a teacher says about a batch, its columns in the order of the tokens. The mesh of the run must be set."""
    top = _finder(run.recipe.model, run.recipe.accumulation, k)(teacher, batch)
    top = jax.device_get(top) if jax.process_count() == 1 else multihost_utils.process_allgather(top, tiled=True)
    order = run.recipe.model.column_order
    arrays = (top.top_ids, top.top_log_probs, top.log_tail)
    return HostTopK(*(array if order is None else array[:, np.argsort(order)] for array in arrays))


@functools.cache
def _finder(model: DistilledTransformer, passes: int, k: int) -> Callable[[Teacher, Batch], TopK]:
    """The jitted `top_k` of a model, in as many passes as a step has."""

    @typed_shard_map
    def find(teacher: Teacher, batch: Batch) -> TopK:
        if passes == 1:
            return model.top_k(teacher, batch, k)
        micros = jax.tree.map(lambda x: x.reshape(passes, -1, *x.shape[1:]), batch)

        def one(micro: Batch) -> TopK:
            with scope():  # B is a micro-batch here
                return model.top_k(teacher, micro, k)

        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(one, micros))

    return jax.jit(find)
