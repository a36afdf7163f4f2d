"""`pretrax train CONFIG --seeds N`: the same run with N seeds, each in a process of its own, and their mean."""

import functools
import pathlib
import shlex
from collections.abc import Sequence

from pretrax.config import RunConfig, load
from pretrax.errors import UserError
from pretrax.experiments.training import train_all
from pretrax.system.atomic import write_file
from pretrax.view.compare.arms import arms_of, mean_metrics, summary_text
from pretrax.view.record.run_record import read_run


def train_seeds(config: str, overrides: Sequence[str], seeds: int, refused: Sequence[str] = ()) -> int:
    """Trains with seeds from `seed` on, in RUN_DIR-seed-S; their mean is in RUN_DIR-seeds.

    Returns 1 if a run has failed, else 0. Raises UserError if there are `refused` options.
    """
    if refused:
        raise UserError(f'--seeds starts processes of its own, which take no {" and no ".join(refused)}\nleave one out')
    loaded = load(config, overrides)
    if not isinstance(loaded.run_dir, pathlib.Path):
        raise UserError(f'run_dir={loaded.run_dir}: --seeds needs a directory on a disk')
    configs = [_with_seed(config, overrides, loaded, loaded.seed + number) for number in range(seeds)]
    place = loaded.run_dir.with_name(f'{loaded.run_dir.name}-seeds')
    say = functools.partial(print, flush=True)
    say(f'{seeds} runs, one after another; their output is in {place}/output')
    runs = train_all(configs, place, say=say)
    if failed := [run.config.name for run in runs if run.why]:
        say(f'{len(failed)} of {seeds} runs failed; the same command tries again')
        return 1
    arm, *changed = arms_of([read_run(str(run.run_dir)) for run in runs])
    if changed:
        left_out = ', '.join(str(seed) for one in changed for seed in one.seeds)
        say(
            f'WARNING: seed {left_out}: not in the mean, since its code is not that of seed {loaded.seed}; remove its '
            'run'
        )
    text = summary_text(arm)
    write_file(place / 'summary.txt', ('\n'.join(text) + '\n').encode())
    write_file(place / 'metrics.jsonl', mean_metrics(arm).encode())
    say('\n' + '\n'.join(text))
    own = ' '.join(shlex.quote(str(run.run_dir)) for run in runs)
    say(f'\nwrote {place}/summary.txt and metrics.jsonl; with another arm: pretrax compare {own} RUN...')
    return 0


def _with_seed(config: str, overrides: Sequence[str], loaded: RunConfig, seed: int) -> RunConfig:
    assert isinstance(loaded.run_dir, pathlib.Path)
    kept = [word for word in overrides if word.partition('=')[0] not in ('name', 'run_dir', 'seed')]
    run_dir = loaded.run_dir.with_name(f'{loaded.run_dir.name}-seed-{seed}')
    return load(config, [*kept, f'name={loaded.name}-seed-{seed}', f'run_dir={run_dir}', f'seed={seed}'])
