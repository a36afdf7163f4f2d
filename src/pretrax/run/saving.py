"""Saves checkpoints of a run. A failure is reported, and training continues."""

from typing import Any

import jax

from pretrax import __version__
from pretrax.checkpoint import Checkpoints, SaveError
from pretrax.errors import Report, UserError
from pretrax.run.setup import Run
from pretrax.train.step import TrainState


def save(
    run: Run, checkpoints: Checkpoints, step: int, state: TrainState, description: dict[str, Any], report: Report
) -> None:
    """Starts to write a checkpoint in the background, described by the run and by `description`."""
    whole = {
        'pretrax': __version__,
        'jax': jax.__version__,
        'config': run.config.model_dump(mode='json'),
        'tokens': step * run.config.batch.tokens,
        'data': run.source.fingerprint,
        'tokenizer': run.source.tokenizer_sha256,
        'vocab_size': run.recipe.model.vocab_size,
        **description,
    }
    for write in (checkpoints.wait, lambda: checkpoints.save(step, state, whole)):
        try:
            write()
        except SaveError as error:
            report(f'WARNING: {error}. Training continues, and tries again at the next checkpoint')


def wait_until_saved(checkpoints: Checkpoints, step: int, report: Report) -> None:
    """Waits for the last checkpoint to be written. Raises UserError if it is not that of `step`."""
    try:
        checkpoints.wait()
    except SaveError as error:
        report(f'WARNING: {error}')
    if checkpoints.saved != step:
        raise UserError(f'the state of step {step} is not saved\nmake room, and run the same command again')
