"""Write the mean of several checkpoints as a new run."""

from pretrax.option import REQUIRED, argument, option


def average(
    paths: tuple[str, ...] = argument('Runs or checkpoints of the same model.', metavar='RUN_OR_CHECKPOINT...'),
    out: str = option('A new directory, such as runs/average.', '-o', default=REQUIRED, metavar='RUN'),
    last: int = option('Take the last N checkpoints of each run.', default=1, min=1, metavar='N'),
    ema: bool = option('Take the moving average of the weights that a checkpoint has. One is enough.', default=False),
) -> None:
    from pretrax.weights.averaged import write_average

    write_average(paths, out, last, ema)
