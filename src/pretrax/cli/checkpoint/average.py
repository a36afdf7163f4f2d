"""Write the mean of several checkpoints as a new run."""

from typing import Annotated

import typer

from pretrax.option import REQUIRED, option


def average(
    paths: Annotated[
        tuple[str, ...],
        typer.Argument(metavar='RUN_OR_CHECKPOINT...', help='Runs or checkpoints of the same model.'),
    ],
    out: str = option('A new directory, such as runs/average.', '-o', default=REQUIRED, metavar='RUN'),
    last: int = option('Take the last N checkpoints of each run.', default=1, min=1, metavar='N'),
    ema: bool = option('Take the moving average of the weights that a checkpoint has. One is enough.', default=False),
) -> None:
    from pretrax.weights.averaged import write_average

    write_average(paths, out, last, ema)
