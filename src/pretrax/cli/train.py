"""Train a model; in an existing run directory, resume."""

import pathlib
import sys
from typing import Annotated

import typer

from pretrax.cli._arguments import AllowChanges, ConfigFile, Overrides, Verbose
from pretrax.errors import TRY_AGAIN


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    allow_changes: AllowChanges = False,
    compiled: Annotated[
        pathlib.Path | None, typer.Option(metavar='FILE', help='Run the step that `pretrax compile --save FILE` wrote.')
    ] = None,
    dry_run: Annotated[bool, typer.Option('--dry-run', help='Do all but train: check and compile everything.')] = False,
    verbose: Verbose = False,
) -> None:
    from pretrax.config import load

    loaded = load(config, overrides or [])  # before the slow import of JAX: report mistakes at once
    if loaded.mesh.is_planned or loaded.batch.micro == 'auto':
        from pretrax.ahead.auto import settled

        loaded = settled(loaded, print)
    from pretrax.ahead.saved import opened

    step = opened(compiled, loaded) if compiled else None
    if dry_run:
        from pretrax.run.dry_run import dry_run as check_start

        check_start(loaded, allow_changes=allow_changes, saved=step)
        return
    from pretrax.cli._summary import summary
    from pretrax.observe.progress import Progress
    from pretrax.run.loop import train as run_training
    from pretrax.run.watch import TIME_LIMIT

    progress = Progress()
    result = run_training(loaded, allow_changes=allow_changes, progress=progress, compiled=step)
    for line in summary(result, sys.argv[1:]):
        progress.message(line)
    if result.stopped == TIME_LIMIT:
        raise typer.Exit(TRY_AGAIN)
