"""Fit scaling laws: the best sizes of model and data for a budget of FLOPs.

Reads a table or finished runs, or trains a grid of sizes and budgets first; the same command continues such a grid.
"""

import functools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from pretrax.errors import UserError
from pretrax.option import argument, option

if TYPE_CHECKING:
    import pathlib

    from pretrax.experiments.scaling_file import Scaling

# Prints the number of parameters of a configuration, on a CPU: this process must not occupy the devices of the runs.
_COUNT = """
import sys
from pretrax.config import load
from pretrax.errors import UserError
from pretrax.run.setup import prepare
try:
    print(prepare(load(sys.argv[1]), lambda text: None).n_params)
except UserError as error:
    sys.exit(error.short_text())
"""


def scaling(
    fit: str = argument('A YAML file, such as configs/scaling-points.yaml.', metavar='FIT'),
    out: str | None = option('Directory for runs and results. [default: scaling/NAME]', '-o', metavar='DIR'),
) -> None:
    import pathlib

    from pretrax.cost.scaling_laws import fit as fitted
    from pretrax.experiments.scaling_file import read_scaling
    from pretrax.storage import BucketPath, locate
    from pretrax.system.atomic import write_file
    from pretrax.view.record.run_record import read_run
    from pretrax.view.scaling.report import as_json, as_text, matching, picture, point_of, read_table

    file, directory = locate(fit), locate(out or f'scaling/{pathlib.PurePath(fit).stem}')
    if isinstance(directory, BucketPath) or isinstance(file, BucketPath):
        raise UserError(f'{fit}: the file and --out must be on a disk')
    asked = read_scaling(file)
    if asked.points:
        points = read_table(locate(asked.points, file.parent))
    else:
        runs = _train(file, asked, directory) if asked.base else matching(file.parent, asked.runs)
        points = [point_of(read_run(str(run), exact=[asked.metric]), asked.metric) for run in runs]
    if not points:
        raise UserError(f'{fit}: there are no points')
    fits, problems = [], []
    for approach in asked.approaches:
        try:
            fits.append(fitted(points, approach, asked.bootstrap, asked.seed))
        except UserError as error:
            problems.append(str(error))
    if not fits:
        raise UserError('\n'.join(problems))
    targets = asked.optimal_for or [10 * max(point.flops for point in points)]
    print('\n'.join(as_text(points, fits, targets)))
    for problem in problems:
        print(f'WARNING: {" ".join(problem.split())}', file=sys.stderr)
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / 'fit.json', as_json(points, fits, targets).encode())
    try:
        write_file(directory / 'fit.svg', picture(points, fits, targets, '.svg'))
    except UserError as error:  # Matplotlib is not installed
        print(f'wrote {directory}/fit.json\n{error}')
    else:
        print(f'wrote {directory}/fit.svg and fit.json')


def _train(file: 'pathlib.Path', asked: 'Scaling', directory: 'pathlib.Path') -> list['pathlib.Path']:
    """Trains the grid, and returns the run directories."""
    from pretrax.config import resolved_yaml
    from pretrax.experiments.scaling_file import size_config, steps_of
    from pretrax.experiments.training import train_all

    say = functools.partial(print, flush=True)
    configs = []
    for number in range(len(asked.sizes)):
        first = size_config(file, asked, number, {'name': 'count', 'run_dir': str(directory / 'count')})
        directory.mkdir(parents=True, exist_ok=True)
        (directory / 'count.yaml').write_text(resolved_yaml(first))
        done = subprocess.run(
            [sys.executable, '-c', _COUNT, str(directory / 'count.yaml')],
            capture_output=True,
            text=True,
            env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ['no output'])[-5:]
            raise UserError(f'{file}: the parameters of sizes[{number}] cannot be counted:\n' + '\n'.join(last))
        params = int(done.stdout.split()[-1])
        tokens = first.batch.largest.tokens
        for flops in asked.budgets:
            steps = steps_of(flops, params, tokens)
            name = f'{file.stem}-{params}-{flops:.3g}'.replace('+', '')
            own = {'name': name, 'run_dir': str(directory / 'runs' / name), 'steps': steps}
            if 'eval.every' not in asked.change and 'eval' not in asked.change:
                own |= {'eval.every': max(1, steps // 20)}
            configs.append(size_config(file, asked, number, own))
            say(f'{name}: {params:,} parameters, {steps} steps, {steps * tokens:,} tokens')
    runs = train_all(configs, directory, asked, say)
    failed = [run.config.name for run in runs if run.why]
    if failed:
        raise UserError(
            f'{len(failed)} of {len(runs)} runs failed: {", ".join(failed[:5])}\nthe same command tries again'
        )
    return [run.run_dir for run in runs]
