"""`pretrax train CONFIG [key=value ...]`: trains, then says where everything is and what to try next."""

import sys

from ..config import RunConfig
from ..observe.progress import Progress
from ..train.loop import train as run_training
from .summary import summary


def train(config: RunConfig, allow_changes: bool) -> None:
    """Runs the training loop and prints the summary."""
    progress = Progress()
    result = run_training(config, allow_changes=allow_changes, progress=progress)
    for line in summary(result, sys.argv[1:]):
        progress.message(line)
