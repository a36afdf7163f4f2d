"""Write the mean of several checkpoints as a new run."""

from typing import Annotated

import typer


def average(
    paths: Annotated[
        tuple[str, ...],
        typer.Argument(metavar='RUN_OR_CHECKPOINT...', help='Runs or checkpoints of the same model.'),
    ],
    out: Annotated[str, typer.Option('--out', '-o', metavar='RUN', help='A new directory, such as runs/average.')],
    last: Annotated[int, typer.Option(min=1, help='Take the last N checkpoints of each run.', metavar='N')] = 1,
    ema: Annotated[
        bool, typer.Option('--ema', help='Take the moving average of the weights that a checkpoint has. One is enough.')
    ] = False,
) -> None:
    from pretrax.weights.averaged import write_average

    write_average(paths, out, last, ema)
