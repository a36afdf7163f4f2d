"""Train a model; in an existing run directory, resume."""

import dataclasses
import sys

from pretrax.cli._arguments import AllowChanges, Configuration, Verbose
from pretrax.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Configuration):
    allow_changes: AllowChanges = False
    compiled: str | None = option('Run the step that `pretrax compile --save FILE` wrote.', metavar='FILE')
    dry_run: bool = option('Do all but train: check and compile everything.', default=False)
    seeds: int | None = option(
        'Train with N seeds, and show their mean and its interval.', min=2, max=1000, metavar='N'
    )
    verbose: Verbose = False


def train(options: Options) -> int:
    changes, verbose = options.allow_changes, options.verbose
    if options.seeds:
        from pretrax.experiments.training import train_seeds

        refused = options.flags('allow_changes', 'compiled', 'dry_run')
        return train_seeds(options.config, options.overrides, options.seeds, refused)
    loaded = options.load()  # before the slow import of JAX: report mistakes at once
    from pretrax.cli._summary import conclude
    from pretrax.observe.progress import Progress
    from pretrax.plan.auto import settled
    from pretrax.plan.saved import opened
    from pretrax.run.dry_run import dry_run
    from pretrax.run.loop import train as run_training

    loaded, progress = settled(loaded, print), Progress()
    step = opened(options.compiled, loaded) if options.compiled else None
    if options.dry_run:
        dry_run(loaded, allow_changes=changes, saved=step, verbose=verbose)
        return 0
    result = run_training(loaded, allow_changes=changes, progress=progress, compiled=step, verbose=verbose)
    return conclude(result, sys.argv[1:], progress.message)
