"""`pretrax train CONFIG [key=value ...]`: trains, then says where everything is and what to try next."""

import pathlib
import sys

import typer

from pretrax.ahead.saved import opened
from pretrax.cli.summary import summary
from pretrax.config import RunConfig
from pretrax.errors import TRY_AGAIN
from pretrax.observe.progress import Progress
from pretrax.run.loop import train as run_training
from pretrax.run.watch import TIME_LIMIT


def train(config: RunConfig, allow_changes: bool, compiled: str | None = None) -> None:
    """Runs the training loop and prints the summary; exits with 75 if the time limit ended it."""
    progress = Progress()
    step = opened(pathlib.Path(compiled), config) if compiled else None
    result = run_training(config, allow_changes=allow_changes, progress=progress, compiled=step)
    for line in summary(result, sys.argv[1:]):
        progress.message(line)
    if result.stopped == TIME_LIMIT:
        raise typer.Exit(TRY_AGAIN)
