"""`pretrax train CONFIG --dry-run`: what would happen, up to the first step."""

import pathlib

from pretrax.ahead.saved import opened
from pretrax.config import RunConfig
from pretrax.run.dry_run import dry_run as run_dry


def dry_run(config: RunConfig, allow_changes: bool, compiled: str | None = None) -> None:
    """Prints the report of a start; nothing is written."""
    run_dry(config, allow_changes=allow_changes, saved=opened(pathlib.Path(compiled), config) if compiled else None)
