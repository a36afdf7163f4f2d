"""Scripts for `sbatch`: one for a run on several nodes, one for the rows of a sweep. Runs no program of Slurm."""

import pathlib
import re
import shlex
from collections.abc import Sequence

from pretrax.errors import UserError
from pretrax.launch.options import Resources
from pretrax.launch.shipped import fill_template

_BEFORE_LIMIT = 300  # seconds before the time limit at which Slurm asks a job to save and end
_SPARE = 30  # seconds of these for what follows the end of the processes


def run_script(
    name: str,
    resources: Resources,
    command: Sequence[str],
    *,
    directory: pathlib.Path,
    output: pathlib.Path,
    elastic: bool,
) -> str:
    """The script of a run.

    Args:
        command: supervises the run on the first node.
        directory: in which the job runs.
        output: file for its output; `%j` is the number of the job.
        elastic: a lost node does not end the job.
    """
    own = {'signal': f'B:TERM@{_before_limit(resources.minutes)}', **({'no-kill': None} if elastic else {})}
    body = fill_template('slurm_run.sh', command=shlex.join(command))
    return _script(name, resources, directory, output, own, '\n' + body)


def rows_script(
    name: str,
    resources: Resources,
    command: Sequence[str],
    *,
    directory: pathlib.Path,
    output: pathlib.Path,
    array: str,
) -> str:
    """The script of an array of jobs, one for each row of a sweep.

    Args:
        name, resources, directory: as for a run.
        command: `pretrax bench` of the sweep, to which the number of the row is appended.
        output: file for the output of a row; `%a` is its number.
        array: the rows, as sbatch writes them: '1-8%3' are eight, of which at most three run at the same time.
    """
    body = f'\nexec {shlex.join(command)} --row $SLURM_ARRAY_TASK_ID\n'
    return _script(name, resources, directory, output, {'array': array}, body)


def stop_within(resources: Resources) -> int:
    """Seconds for the processes of a run to save and end after Slurm's signal before the time limit."""
    given = dict(_option(text) for text in resources.sbatch).get('signal')
    if given is None:
        before = _before_limit(resources.minutes)
    else:
        found = re.search(r'@(\d+)$', given)
        before = int(found[1]) if found else 60  # the default of sbatch
    return max(before - _SPARE, before // 2)


def _before_limit(minutes: int | None) -> int:
    """Seconds before the time limit at which Slurm asks a job to save and end: at most a quarter of the time."""
    return _BEFORE_LIMIT if minutes is None else min(_BEFORE_LIMIT, 60 * minutes // 4)


def clock_text(minutes: int) -> str:
    """Minutes as Slurm writes a time limit: '1-12:00:00'."""
    days, hours, left = minutes // 1440, minutes // 60 % 24, minutes % 60
    return (f'{days}-' if days else '') + f'{hours:02}:{left:02}:00'


def _resources(resources: Resources) -> dict[str, str | None]:
    """Options of sbatch, {name: value}; the value of a flag is None."""
    shared = resources.cpus_per_node is not None
    wanted = {
        'partition': resources.partition,
        'account': resources.account,
        'qos': resources.qos,
        'constraint': resources.constraint,
        'nodes': str(resources.nodes),
        'ntasks-per-node': '1',
        'gpus-per-node': resources.gpus_per_node or None,
        'cpus-per-task': resources.cpus_per_node,
        'mem': None if shared else '0',
        'time': resources.minutes and clock_text(resources.minutes),
    }
    return ({} if shared else {'exclusive': None}) | {name: str(value) for name, value in wanted.items() if value}


def _script(
    name: str,
    resources: Resources,
    directory: pathlib.Path,
    output: pathlib.Path,
    own: dict[str, str | None],
    body: str,
) -> str:
    """A script with the options that all jobs have, and its own."""
    places = {'chdir': str(directory), 'output': str(output), 'open-mode': 'append'}
    options = {'job-name': name} | _resources(resources) | places | own | {'requeue': None}
    given = dict(_option(text) for text in resources.sbatch)
    names = {_OPPOSITES.get(name, name) for name in given}
    kept = {name: value for name, value in options.items() if name not in names}
    lines = [
        f'#SBATCH --{name}' + ('' if value is None else f'={_quoted(value)}') for name, value in (kept | given).items()
    ]
    return '\n'.join(['#!/bin/bash', *lines]) + '\n' + body


_OPPOSITES = {'no-requeue': 'requeue'}


def _option(text: str) -> tuple[str, str | None]:
    """Name and value of an option of sbatch: 'mem=64G', '--comment=my run', 'hold'. Raises UserError."""
    found = re.fullmatch(r'(?:--)?([a-z][a-z-]+)(?:=([^\n]+))?', text.strip())
    if found is None:
        raise UserError(f'--sbatch {text!r}: expected a long option of sbatch, such as --sbatch mem=64G')
    return found[1], found[2]


def _quoted(value: str) -> str:
    """A value in a line of options, which sbatch splits as a shell does. Raises UserError if it has a line break."""
    if '\n' in value or '\r' in value:
        raise UserError(f'{value!r} has a line break, which no option of sbatch can have\ngive it another name')
    return value if re.fullmatch(r'[\w@%+=:,./~&|*\[\]-]+', value) else '"' + re.sub(r'(["\\])', r'\\\1', value) + '"'
