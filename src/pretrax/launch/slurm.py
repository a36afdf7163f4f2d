"""Submits runs and sweeps to Slurm, after every check that is possible before; reports and stops them."""

import collections
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrax.errors import Report, UnavailableError, UserError
from pretrax.launch.engine import Engine
from pretrax.launch.options import Resources
from pretrax.launch.record import LaunchRecord
from pretrax.launch.slurm_client import ask, ask_both, job_facts, partitions
from pretrax.launch.slurm_script import clock_text
from pretrax.storage import AnyPath, BucketPath

# States of a job that runs, waits to run, or is being requeued.
_UNFINISHED = {
    'PENDING',
    'CONFIGURING',
    'RUNNING',
    'SUSPENDED',
    'STOPPED',
    'RESIZING',
    'SIGNALING',
    'COMPLETING',
    'STAGE_OUT',
    'REQUEUED',
    'REQUEUE_FED',
    'REQUEUE_HOLD',
    'SPECIAL_EXIT',
    'RESV_DEL_HOLD',
}

# `sbatch --test-only` says this of what no node has, and also while nodes are down. `sbatch` accepts a job that waits
# for them.
_NOT_NOW = 'Requested node configuration is not available'
_OF_ONE_MACHINE = ('/tmp', '/var/tmp', '/dev/shm', '/scratch/local', '/run')


def check_cluster(resources: Resources) -> None:
    """Checks that the partition exists and can give what a job asks for.

    Raises:
        UserError: it cannot, or there is no Slurm.
    """
    known, name = partitions(), resources.partition
    found = [one for one in known if (one.is_default if name is None else one.name == name)]
    names = sorted({one.name for one in known})
    if not found:
        near = difflib.get_close_matches(name or '', names, n=1)
        what = 'there is no default partition' if name is None else f'there is no partition {name!r}'
        hint = f'\n  did you mean: --partition {near[0]}' if near else ''
        raise UserError(f'{what} in this Slurm{hint}\n  partitions: {", ".join(names)}')
    name = found[0].name
    if not any(one.is_up for one in found):
        raise UserError(f'partition {name} takes no jobs now (sinfo: not up)\n  partitions: {", ".join(names)}')
    most = [*(one.most_nodes for one in found if one.most_nodes is not None), sum(one.nodes for one in found)]
    if resources.nodes > min(most):
        raise UserError(f'--nodes {resources.nodes}: a job in partition {name} can have {min(most)}')
    for option, wanted, have in (
        ('gpus', resources.gpus_per_node, [one.gpus for one in found]),
        ('cpus', resources.cpus_per_node, [one.cpus for one in found]),
    ):
        if wanted and wanted > max(have):
            raise UserError(f'--{option}-per-node {wanted}: the nodes of partition {name} have {max(have)}')
    limit = next((one.most_minutes for one in found if one.most_minutes is not None), None)
    if resources.minutes and limit is not None and resources.minutes > limit:
        raise UserError(
            f'--time {clock_text(resources.minutes)}: the limit of partition {name} is {clock_text(limit)}\n'
            'give that: the run continues in the next allocation'
        )


def warn_of_local_files(run_dir: AnyPath, report: Report) -> None:
    """Warns of a run directory, and of a Python, that other nodes certainly do not see."""
    if is_on_one_machine(run_dir):
        report(
            f'WARNING: {run_dir} is on a local disk of this machine; all nodes must see it: run_dir=PATH or a bucket'
        )
    if any(sys.executable.startswith(place) for place in ('/tmp/', '/var/tmp/', '/dev/shm/')):
        report(f'WARNING: the nodes start {sys.executable}, which is on a local disk of this machine')


def is_on_one_machine(run_dir: object) -> bool:
    """Whether other machines certainly do not see this directory: it is below /tmp or the like."""
    if isinstance(run_dir, BucketPath) or not isinstance(run_dir, Path):
        return False
    whole = run_dir.absolute()
    return any(whole.is_relative_to(place) for place in _OF_ONE_MACHINE)


def submit(script: str) -> tuple[str, str]:
    """Submits a script, which Slurm checks once more before that. Returns the job's number, and what Slurm expects.

    Raises:
        UserError: Slurm refuses it: for example the account, the quality of service or the constraint.
    """
    try:
        start = re.search(r'to start at (\S+)', _sbatch('--test-only', script)[1])
        expected = f'Slurm expects it to start at {start[1]}' if start else ''
    except UserError as error:
        if _NOT_NOW not in str(error):
            raise
        expected = 'it may wait: Slurm cannot start it with the nodes that are up now'
    return _sbatch('--parsable', script)[0].strip().partition(';')[0], expected


def _sbatch(option: str, script: str) -> tuple[str, str]:
    """Runs sbatch. Returns its standard output and its standard error. Raises UserError if Slurm refuses the script."""
    try:
        return ask_both('sbatch', option, stdin=script)
    except UnavailableError:
        raise
    except UserError as error:
        if not str(error).startswith('sbatch refuses'):
            raise
        lines = [line.removeprefix('sbatch: ').removeprefix('error: ') for line in str(error).splitlines()[1:]]
        raise UserError('\n'.join(['Slurm refuses the job:', *lines])) from None


class Slurm(Engine):
    """Jobs and arrays of jobs."""

    def status(self, record: LaunchRecord) -> str:
        if 'rows' in record.facts:
            return self._array(record)
        facts = job_facts(record.job)
        name = f'Slurm job {record.job}'
        state = facts.get('JobState')
        if state is None:
            return f'{name}: {_accounted(record.job) or "it has ended; Slurm does not know it any more"}'
        again = f', requeued {facts["Restarts"]} times' if facts.get('Restarts', '0') != '0' else ''
        if state == 'PENDING':
            reason = facts.get('Reason', 'None')
            start = facts.get('StartTime', 'Unknown')
            return f'{name}: PENDING ({reason}){f", expected to start at {start}" if start != "Unknown" else ""}{again}'
        time = f'{facts.get("RunTime", "?")} of {facts.get("TimeLimit", "?")}'
        code = (
            f', exit code {facts["ExitCode"]}' if state not in ('RUNNING', 'COMPLETING') and 'ExitCode' in facts else ''
        )
        return f'{name}: {state} on {facts.get("NodeList", "no node")}, {time}{code}{again}'

    def is_running(self, record: LaunchRecord) -> bool:
        return not _UNFINISHED.isdisjoint(_states(record.job))

    def _array(self, record: LaunchRecord) -> str:
        states = collections.Counter(_states(record.job))
        forgotten = record.facts['rows'] - states.total()
        counts = [f'{count} {state}' for state, count in states.items()] + ([f'{forgotten} ended'] if forgotten else [])
        return f'Slurm array {record.job} of {record.facts["rows"]} rows: {", ".join(counts)}'

    def log_command(
        self, record: LaunchRecord, run_dir: AnyPath, process: int | None, lines: int, follow: bool
    ) -> Sequence[str]:
        if process is None and 'rows' in record.facts:
            raise UserError(f'give a row of the sweep: --process ROW, from 1 to {record.facts["rows"]}')
        if process is None:
            file = record.facts['log']
        elif 'rows' in record.facts:
            file = record.facts['log'].replace('%a', str(process))
        elif isinstance(run_dir, BucketPath):
            raise UserError(
                f'{run_dir} has the output of processes only after the job has ended: leave out --process\n'
                'the output of process 0 is in the log of the job'
            )
        else:
            file = str(run_dir / 'output' / f'process-{process}.txt')
        if not Path(file).is_file():
            raise UserError(f'there is no {file}\n{self.status(record)}')
        return ['tail', '-n', str(lines), *(['-F'] if follow else []), file]

    def stop(self, record: LaunchRecord) -> str:
        state = job_facts(record.job).get('JobState')
        if 'rows' in record.facts:
            ask('scancel', record.job)
            return f'canceled the array {record.job}; rows that are done keep their results'
        if state == 'RUNNING':
            ask('scancel', '--batch', '--signal=INT', record.job)
            return f'asked job {record.job} to save and to end; to end it at once: scancel {record.job}'
        if state in (None, 'COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL', 'OUT_OF_MEMORY'):
            return f'job {record.job} has ended already'
        ask('scancel', record.job)
        return f'canceled job {record.job}, which was {state}'


def _states(job: str) -> list[str]:
    """States of a job, or of the jobs of an array, that Slurm still knows."""
    if not job_facts(job):
        return []
    return ask('squeue', '--noheader', '--array', '--states=all', f'--job={job}', '--format=%T').split()


def _accounted(job: str) -> str | None:
    """What the accounting of Slurm says of a job that the controller has forgotten; None: there is none."""
    try:
        lines = ask(
            'sacct', '--noheader', '--allocations', '--parsable2', f'--jobs={job}', '--format=State,Elapsed,ExitCode'
        )
    except UserError:  # no accounting, as on small clusters
        return None
    fields = (lines.splitlines() or [''])[-1].split('|')
    return f'{fields[0]} after {fields[1]}, exit code {fields[2]}' if len(fields) == 3 else None


ENGINE = Slurm()
