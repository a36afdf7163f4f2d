"""When steps fail again and again: where to go back to, and at last a report of which batches and weights are to blame."""

import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.checkpoint import DamagedError, read_description, steps_in
from pretrax.errors import UserError
from pretrax.run.setup import Run
from pretrax.train.host_memory import on_device
from pretrax.train.step import TrainState, draws, make_gradients

REPORT = 'failure.txt'


def last_good(directory: pathlib.Path) -> int:
    """The newest checkpoint that was saved while no step was being skipped; 0, the beginning, where there is none."""
    for step in reversed(steps_in(directory)):
        with contextlib.suppress(DamagedError):  # told where it is read
            if not read_description(directory, step)['skipped_in_a_row']:
                return step
    return 0


def with_next_batch(state: TrainState, batch: int) -> TrainState:
    """The state, to go on with another batch."""
    return state._replace(batch=jax.device_put(np.int32(batch), state.batch.sharding))


def give_up(run: Run, state: TrainState, rollbacks: int) -> UserError:
    """Computes the gradient of the last batches once more, and tells which of its arrays are not finite, by layer."""
    newest = int(state.batch) - 1
    in_a_row = int(state.skipped_in_a_row)
    gradients = make_gradients(run.recipe.model, run.recipe.accumulation)
    gradient, terms, _ = jax.jit(lambda weights, *more: gradients(on_device(weights), *more))(
        state.weights, run.batch(newest), *draws(run.recipe, state.step - 1)
    )
    lines = [f'{name} of batch {newest}: {float(value)}' for name, value in terms.items()]
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path, simple=True, separator='.')
        stacked = leaf if name.startswith('layers.') else leaf[None]
        rest = tuple(range(1, stacked.ndim))
        norms = np.sqrt(jax.device_get(jnp.sum(jnp.square(stacked.astype(jnp.float32)), axis=rest)))
        finite = np.isfinite(norms)
        which = (
            f', in layers {np.flatnonzero(~finite).tolist()}' if name.startswith('layers.') and not finite.all() else ''
        )
        lines.append(
            f'{name}: {"finite" if finite.all() else "NOT finite" + which}, norm {np.sqrt(np.sum(norms**2)):.4g}'
        )
    path = run.config.run_dir / REPORT
    if jax.process_index() == 0:
        path.write_text('\n'.join(lines) + '\n')
    bad = [line for line in lines if 'NOT finite' in line][:2]
    return UserError(
        '\n'.join([
            f'{in_a_row} steps in a row were skipped (batches {newest + 1 - in_a_row} to {newest}), after {rollbacks} rollbacks',
            *bad,
            f'the report is in {path}; checkpoints before them are whole',
            'lower optimizer.learning_rate, look at these batches, or allow more with faults.rollbacks',
        ])
    )  # fmt: skip
