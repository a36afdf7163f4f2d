"""Rollbacks: after many skipped steps, a run returns to its last good checkpoint, and at last fails with a report."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.checkpoint import SaveError
from pretrax.errors import UserError
from pretrax.model.loss import means
from pretrax.run.seen_batch import show_batch
from pretrax.run.session import Session
from pretrax.run.setup import Run
from pretrax.run.start import Start, entered, initial_state, restore
from pretrax.storage.locate import working_directory
from pretrax.train.host_memory import on_device
from pretrax.train.step import TrainState, make_gradients, step_keys

REPORT = 'failure.txt'


def roll_back(session: Session, state: TrainState, skipped: int, rollbacks: int) -> Start:
    """Restores the last good checkpoint and removes later ones; the next batch is the one that follows `state`.

    Raises:
        UserError: there were `faults.rollbacks` rollbacks before; or no good checkpoint is readable.
    """
    run, checkpoints, report = session.run, session.checkpoints, session.report
    if rollbacks >= run.faults.rollbacks:
        raise failure(run, state, skipped, rollbacks)
    try:
        checkpoints.wait()
    except SaveError as error:
        report(f'WARNING: {error}')
    next_batch = int(state.batch)
    constants, state = state.constants, state._replace(constants=None)
    jax.tree.map(lambda x: x.delete(), state)  # frees the memory that the restored state needs
    with session.metrics.clock.paused('restore', int(next_batch)):
        good = restore(run, checkpoints.directory, report, good=True) or Start(initial_state(run, report))
    step = good.step
    report(
        f'WARNING: {skipped} steps in a row were skipped: rolling back to step {step}, continuing with batch '
        f'{next_batch}'
    )
    session.memory.roll_back_to(step)
    try:
        checkpoints.roll_back_to(step)
    except SaveError as error:
        report(f'WARNING: {error}')
    batch = jax.device_put(np.int32(next_batch), good.state.batch.sharding)
    good = dataclasses.replace(good, state=good.state._replace(batch=batch, constants=constants))
    return entered(session.island, good, again=True)


def failure(run: Run, state: TrainState, skipped: int, rollbacks: int) -> UserError:
    """The error of a run that still fails after its rollbacks.

    Computes the gradient of the last skipped batch once more, and writes to `failure.txt` which arrays are not finite,
    by layer.
    """
    # The state is one step ahead of the metrics: that step was skipped too, or it trained or had nothing to learn.
    now = int(state.skipped_in_a_row)
    batch, skipped = int(state.batch) - (1 if now > skipped else 2), max(now, skipped)
    lines = _gradient_report(run, state, batch)
    path = working_directory(run.run_dir) / REPORT
    where = f'in {path}'
    if jax.process_index() == 0:
        try:
            path.write_text('\n'.join(lines) + '\n')
        except OSError as error:  # less important than the failure
            where = f'lost: {path} cannot be written: {error.strerror}'
    message = [
        f'{skipped} steps in a row were skipped (the last with batch {batch}) after {rollbacks} rollbacks',
        *[line for line in lines if 'NOT finite' in line][:2],
        f'the norms of the gradient of the last batch are {where}; earlier checkpoints are intact',
        f'to see the last batch: {show_batch(run.run_dir, batch)}',
        'lower optimizer.learning_rate, inspect these batches, or allow more rollbacks with faults.rollbacks',
    ]
    return UserError('\n'.join(message))


def _gradient_report(run: Run, state: TrainState, batch: int) -> list[str]:
    """The loss terms of a batch, and the norm of each array of the gradient."""
    recipe = run.at(batch).recipe
    gradients = make_gradients(recipe.model, recipe.accumulation)
    compute = jax.jit(lambda weights, *more, **known: gradients(on_device(weights), *more, **known))
    key = step_keys(recipe, state.step - 1)
    known = {} if state.constants is None else {'constants': state.constants}
    gradient, terms, _ = compute(state.weights, run.batch(batch), *key, **known)
    lines = [f'{name} of batch {batch}: {float(value)}' for name, value in means(terms).items()]
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path, simple=True, separator='.')
        by_layer = leaf if name.startswith('layers.') else leaf[None]
        others = tuple(range(1, by_layer.ndim))
        norms = np.sqrt(jax.device_get(jnp.sum(jnp.square(by_layer.astype(jnp.float32)), axis=others)))
        finite = np.isfinite(norms)
        which = f', in layers {np.flatnonzero(~finite).tolist()}' if name.startswith('layers.') else ''
        state_of = 'finite' if finite.all() else f'NOT finite{which}'
        lines.append(f'{name}: {state_of}, norm {np.sqrt(np.sum(norms**2)):.4g}')
    return lines
