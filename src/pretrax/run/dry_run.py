"""`pretrax train --dry-run`: all that a training does before its first step, and nothing of what it leaves behind.

Configuration, data, mesh, model, state and step are made as `train` makes them, so that what fails there fails here.
Nothing is written in the run's directory, no tracker is started, and no other run is kept out.
"""

import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

from pretrax.checkpoint import restore_newest
from pretrax.config import RunConfig
from pretrax.errors import Report, UserError
from pretrax.infer.sample import check_can_sample
from pretrax.machine.locks import holder_of
from pretrax.run.processes import ending_at_once
from pretrax.run.program_cache import compile_or_take
from pretrax.run.resume import being_trained, check_same_data, check_unchanged
from pretrax.run.setup import Run, prepare
from pretrax.run.warm_start import start_state
from pretrax.scale.memory import memory_of, size, temporaries_of
from pretrax.train.step import TrainState, init_state, make_step


@ending_at_once
def dry_run(
    config: RunConfig,
    *,
    allow_changes: bool = False,
    say: Report = print,
    saved: Callable[[Run, Any], Any] | None = None,
) -> None:
    """Says what `train` would do, up to its first step.

    Args:
        config, allow_changes: as for `train`.
        say: told each line.
        saved: gives the step that was compiled before, as `compiled` of `train`.

    Raises:
        UserError: what `train` would raise.
    """
    if (holder := holder_of(config.run_dir)) is not None:
        raise being_trained(config.run_dir, holder)
    place = _check_writable(config.run_dir)
    check_unchanged(config, allow_changes, say)
    for note in config.notes:
        say(note)
    with tempfile.TemporaryDirectory(prefix='pretrax-dry-run-') as scratch:
        elsewhere = pathlib.Path(scratch)
        _show_data(config.run_dir / 'data', elsewhere / 'data')
        run = prepare(config.model_copy(update={'run_dir': elsewhere}), lambda text: say(text.replace(scratch, '...')))
        if config.sample.every:
            check_can_sample(run.recipe.model, run.source, config.sample)
        for line in run.startup:
            say(str(line))
        with jax.set_mesh(run.mesh):
            _without_a_step(config, run, allow_changes, say, saved, place)


def _without_a_step(
    config: RunConfig, run: Run, allow_changes: bool, say: Report, saved: Callable[[Run, Any], Any] | None, place: pathlib.Path,
) -> None:  # fmt: skip
    def check(description: dict[str, Any]) -> None:
        check_same_data(config, description, getattr(run.source, 'fingerprint', None), allow_changes)

    directory = config.run_dir / 'checkpoints'
    found = restore_newest(directory, run.like, say, check)
    if found is None:
        state: TrainState = (
            start_state(config.init_from, run, say) if config.init_from else init_state(run.recipe, config.seed)
        )
        begins = f'would begin at step {int(state.step)}' if config.init_from else 'would begin anew'
    else:
        _, state, _ = found
        begins = f'would go on from step {found[0]}, checkpoint {directory / str(found[0])}'
    began = time.perf_counter()
    batch = run.batch(int(state.batch))
    say(f'batch {int(state.batch)}: {run.rows} sequences x {config.batch.sequence_length}, read in {_since(began)}')
    began = time.perf_counter()
    lowered = make_step(run.recipe).lower(state, batch)
    step, done = (saved(run, lowered), 'loaded the compiled step') if saved else compile_or_take(lowered)
    say(f'{done} in {_since(began)}')
    if step.memory_analysis() is not None:  # a backend need not tell
        say(
            f'memory: {size(memory_of(step))} a device by the compiler, {size(temporaries_of(step))} of them temporaries'
        )
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    say(f'checkpoints: {directory}, {size(whole)} each; {size(shutil.disk_usage(place).free)} free')
    trackers = [name for name in ('tensorboard', 'wandb', 'mlflow') if getattr(config.log, name)]
    if trackers:
        say(f'trackers: {" and ".join(trackers)} would be started')
    would = 'all steps are done: it would not train' if int(state.step) >= config.steps else f'it {begins}'
    say(f'dry run: nothing is in the way of {config.steps} steps; {would}. Nothing was written in {config.run_dir}')


def _check_writable(directory: pathlib.Path) -> pathlib.Path:
    """The nearest directory that is there, which has to take new files."""
    for wanted in (directory / 'checkpoints', directory):
        place = next(p for p in (wanted.absolute(), *wanted.absolute().parents) if p.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise UserError(
                f'run_dir: {directory} cannot be written: {place} is '
                f'{"read-only for you" if place.is_dir() else "a file"}\ngive leave to write, or another one: run_dir=PATH'
            )
    return place


def _show_data(data: pathlib.Path, shown: pathlib.Path) -> None:
    """The tokens that the run has prepared, seen from another directory, where what is missing may be made."""
    kinds = ('tokens-', 'survey-')
    for path in (path for kind in kinds for path in data.rglob(f'{kind}*')):
        if any(part.startswith(('.', *kinds)) for part in path.relative_to(data).parts[:-1]):  # a part, or not finished
            continue
        mirrored = shown / path.relative_to(data)
        mirrored.parent.mkdir(parents=True, exist_ok=True)
        mirrored.symlink_to(path.absolute(), target_is_directory=True)


def _since(began: float) -> str:
    return f'{time.perf_counter() - began:.1f} s'
