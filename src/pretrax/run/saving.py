"""Saves checkpoints of a run. A failure is reported, and training continues."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pretrax import __version__
from pretrax.checkpoint import Checkpoints, Keep, Memory, SaveError, memory_directory
from pretrax.config.schema import Checkpoint
from pretrax.data.batches.share import Share
from pretrax.errors import Report, UnavailableError, UserError
from pretrax.federation.island_state import stored_state
from pretrax.run.setup import Run
from pretrax.storage import AnyPath, BucketPath
from pretrax.train.host_memory import on_device
from pretrax.train.replay import arrays_of, do_replicas_differ
from pretrax.train.state import by_weight
from pretrax.train.step import TrainState

if TYPE_CHECKING:
    from pretrax.run.directory import RunDirectory
    from pretrax.run.session import Session

NEWEST = 'newest_checkpoint'  # file in the run directory: the step of the newest checkpoint; 0: a rollback left none


def open_checkpoints(section: Checkpoint, run_dir: AnyPath, directory: 'RunDirectory') -> Checkpoints:
    """The checkpoints of a run, kept as the configuration says. Raises UserError if they cannot be written."""
    keep = Keep(section.keep, section.keep_every, section.keep_best)

    def record(step: int) -> None:
        directory.write(NEWEST, f'{step}\n'.encode())

    return Checkpoints(run_dir / 'checkpoints', keep, record, directory.upload, directory.confirm)


def open_memory(section: Checkpoint, report: Report) -> Memory:
    """The states of a run in the memory of its hosts."""
    return Memory(memory_directory(), section.memory.every, report, section.memory.copies)


def had_checkpoints(run_dir: AnyPath) -> bool:
    """Whether the run has written a checkpoint, which may be gone."""
    path = run_dir / NEWEST
    return path.is_file() and path.read_bytes().strip() not in (b'', b'0')


def save(session: 'Session', step: int, state: TrainState, description: dict[str, Any]) -> None:
    """Starts to write a checkpoint in the background, described by the run and by `description`."""
    run, checkpoints, report = session.run, session.checkpoints, session.report
    is_finite = bool(_all_finite(state.weights, state.optimizer))
    if not is_finite:
        report(f'WARNING: the weights or the optimizer state of step {step} have non-finite values')
    elif not _replicas_agree(run, state):
        report(f'WARNING: replicas of the state of step {step} differ: the checkpoint does not count as a good one')
        is_finite = False
    whole = _described(session, state) | {'finite_state': is_finite} | description
    for write in (checkpoints.wait, lambda: checkpoints.save(step, _stored(session, state), whole)):
        try:
            write()
        except SaveError as error:
            report(f'WARNING: {error}. Training continues, and tries again at the next checkpoint')


def remember(session: 'Session', step: int, state: TrainState, description: dict[str, Any]) -> None:
    """Starts to keep a state in memory, in the background, described as a checkpoint is."""
    is_finite = _all_finite(state.weights, state.optimizer) & _replicas_agree(session.run, state)
    session.memory.save(step, _stored(session, state), _described(session, state) | description, is_finite)


def _stored(session: 'Session', state: TrainState) -> Any:
    return stored_state(by_weight(state._replace(constants=None)), session.island and session.island.arrays())


def _described(session: 'Session', state: TrainState) -> dict[str, Any]:
    run = session.run
    return {
        'pretrax': __version__,
        'jax': jax.__version__,
        'config': run.written,
        'batch': int(state.batch),
        'data': run.source.fingerprint,
        'tokenizer': run.source.tokenizer_sha256,
        'begin_of_text': run.source.tokenizer_begin,
        'vocab_size': run.recipe.model.vocab_size,
        **(run.teaching.description if run.teaching else {}),
        **({'share': run.source.index} if isinstance(run.source, Share) else {}),
        **(session.island.description() if session.island else {}),
    }


def _replicas_agree(run: Run, state: TrainState) -> jax.Array | bool:
    """Whether replicas are equal, as far as `faults.replay` wants it to be known."""
    return ~do_replicas_differ(*arrays_of(state)) if run.faults.replay.every else True


@jax.jit
def _all_finite(*trees: Any) -> jax.Array:
    """Whether all arrays are finite. Scalars may be infinite by design, such as the best loss so far."""
    arrays = [x for x in jax.tree.leaves(trees) if x.ndim and jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(on_device(x))) for x in arrays]))


def wait_until_saved(checkpoints: Checkpoints, step: int, report: Report) -> None:
    """Waits for the last checkpoint to be written.

    Raises:
        UserError: it is not that of `step`. UnavailableError if it belongs into a bucket: a launcher tries again.
    """
    try:
        checkpoints.wait()
    except SaveError as error:
        report(f'WARNING: {error}')
    if checkpoints.saved != step:
        if isinstance(checkpoints.directory, BucketPath):
            raise UnavailableError(f'the state of step {step} is not saved\nrun the same command again')
        raise UserError(
            f'the state of step {step} is not saved: {checkpoints.directory}: {checkpoints.problem}\n'
            'make room, or make the disk writable again, and run the same command again: it resumes from the newest '
            'checkpoint'
        )
