"""Train a model; in an existing run directory, resume."""

import sys

import typer

from pretrax.cli._arguments import AllowChanges, Compiled, ConfigFile, DryRun, Overrides, Seeds, Verbose
from pretrax.errors import TRY_AGAIN


def train(
    config: ConfigFile,
    overrides: Overrides = (),
    allow_changes: AllowChanges = False,
    compiled: Compiled = None,
    dry_run: DryRun = False,
    seeds: Seeds = None,
    verbose: Verbose = False,
) -> None:
    from pretrax.cli._seeds import train_seeds
    from pretrax.config import load

    if seeds:
        return train_seeds(config, overrides, seeds, allow_changes=allow_changes, compiled=compiled, dry_run=dry_run)
    loaded = load(config, overrides)  # before the slow import of JAX: report mistakes at once
    from pretrax.ahead.auto import settled
    from pretrax.ahead.saved import opened
    from pretrax.cli._summary import summary
    from pretrax.observe.progress import Progress
    from pretrax.run.dry_run import dry_run as check_start
    from pretrax.run.loop import train as run_training
    from pretrax.run.watch import TIME_LIMIT

    loaded, progress = settled(loaded, print), Progress()
    step = opened(compiled, loaded) if compiled else None
    if dry_run:
        return check_start(loaded, allow_changes=allow_changes, saved=step, verbose=verbose)
    result = run_training(loaded, allow_changes=allow_changes, progress=progress, compiled=step, verbose=verbose)
    for line in summary(result, sys.argv[1:]):
        progress.message(line)
    if result.stopped == TIME_LIMIT:
        raise typer.Exit(TRY_AGAIN)
    return None
