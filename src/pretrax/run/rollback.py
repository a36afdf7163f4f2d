"""Rollbacks: after many skipped steps in a row, a run returns to its last good checkpoint, and at last fails with a report."""

import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.checkpoint import Checkpoints, DamagedError, read_description, restore, steps_in
from pretrax.errors import Report, UserError
from pretrax.run.setup import Run
from pretrax.run.start import Start, initial_state
from pretrax.train.host_memory import on_device
from pretrax.train.step import TrainState, make_gradients, step_keys

REPORT = 'failure.txt'


def roll_back(run: Run, state: TrainState, skipped: int, checkpoints: Checkpoints, report: Report) -> Start:
    """Restores the last good checkpoint and removes later ones; the next batch is the one that follows `state`."""
    step, next_batch = _last_good(checkpoints.directory), int(state.batch)
    report(
        f'WARNING: {skipped} steps in a row were skipped: rolling back to step {step}, continuing with batch {next_batch}'
    )
    checkpoints.remove_after(step)
    if step:
        restored = restore(checkpoints.directory, step, run.like)
        description = read_description(checkpoints.directory, step)
    else:
        restored, description = initial_state(run, report), {}
    batch = jax.device_put(np.int32(next_batch), restored.batch.sharding)
    return Start(restored._replace(batch=batch), step, description)


def failure(run: Run, state: TrainState, rollbacks: int) -> UserError:
    """The error of a run that still fails after its rollbacks.

    Computes the gradient of the last batch once more, and writes to `failure.txt` which arrays are not finite, by layer.
    """
    batch, skipped = int(state.batch) - 1, int(state.skipped_in_a_row)
    lines = _gradient_report(run, state, batch)
    path = run.config.run_dir / REPORT
    if jax.process_index() == 0:
        path.write_text('\n'.join(lines) + '\n')
    message = [
        f'{skipped} steps in a row were skipped (batches {batch + 1 - skipped} to {batch}) after {rollbacks} rollbacks',
        *[line for line in lines if 'NOT finite' in line][:2],
        f'the report is in {path}; earlier checkpoints are intact',
        'lower optimizer.learning_rate, inspect these batches, or allow more rollbacks with faults.rollbacks',
    ]
    return UserError('\n'.join(message))


def _last_good(directory: pathlib.Path) -> int:
    """The newest checkpoint that was saved while no step was being skipped; 0: none."""
    for step in reversed(steps_in(directory)):
        with contextlib.suppress(DamagedError):  # reported when it is restored
            if not read_description(directory, step)['skipped_in_a_row']:
                return step
    return 0


def _gradient_report(run: Run, state: TrainState, batch: int) -> list[str]:
    """The loss terms of a batch, and the norm of each array of the gradient."""
    gradients = make_gradients(run.recipe.model, run.recipe.accumulation)
    compute = jax.jit(lambda weights, *more: gradients(on_device(weights), *more))
    key = step_keys(run.recipe, state.step - 1)
    gradient, terms, _ = compute(state.weights, run.batch(batch), *key)
    lines = [f'{name} of batch {batch}: {float(value)}' for name, value in terms.items()]
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
