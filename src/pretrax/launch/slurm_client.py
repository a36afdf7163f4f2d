"""Asks Slurm through its commands: `scontrol`, `sinfo`, `squeue`, `sacct`."""

import dataclasses
import re
import shutil
from collections.abc import Sequence

from pretrax.errors import UnavailableError, UserError
from pretrax.launch.options import minutes_of
from pretrax.system.children import NO_ANSWER, run_tool

_PATIENCE = 60.0  # seconds for an answer of a busy controller
_GONE = {'DOWN', 'FAIL', 'ERROR', 'INVAL', 'NOT_RESPONDING', 'POWERED_DOWN', 'POWERING_DOWN', 'UNKNOWN'}


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition, or those of its nodes that are alike."""

    name: str  # name of the partition
    is_default: bool  # whether jobs that name no partition go there
    is_up: bool  # whether it takes jobs
    most_minutes: int | None  # longest time limit; None: none
    most_nodes: int | None  # largest number of nodes of a job; None: no limit
    # nodes, cpus, gpus: number of nodes, and what each of them has
    nodes: int
    cpus: int
    gpus: int


def ask(*words: str, stdin: str = '') -> str:
    """What a command of Slurm prints on standard output. Raises what `ask_both` raises."""
    return ask_both(*words, stdin=stdin)[0]


def ask_both(*words: str, stdin: str = '') -> tuple[str, str]:
    """What a command of Slurm prints on standard output and on standard error.

    Raises:
        UserError: there is no such command, or Slurm refuses.
        UnavailableError: the controller does not answer.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f'there is no {words[0]} on this machine\nuse a machine of the cluster, such as its login node')
    done = run_tool(words, _PATIENCE, stdin)
    if done.returncode == NO_ANSWER:
        raise UnavailableError(f'{words[0]} does not answer within {_PATIENCE:.0f} s')
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        text = '\n'.join(said[-5:]) or f'exit code {done.returncode}'
        if re.search('Unable to contact|Connection refused|timed out|configuration source', text):
            raise UnavailableError(f'{words[0]}: Slurm does not answer:\n{text}')
        raise UserError(f'{words[0]} refuses:\n{text}')
    return done.stdout, done.stderr


def job_facts(job: str) -> dict[str, str]:
    """What Slurm knows of a job: {'JobState': 'RUNNING', 'Restarts': '0', ...}; {} minutes after its end."""
    try:
        return dict(re.findall(r'([\w:/]+)=(\S*)', ask('scontrol', '--oneliner', 'show', 'job', job).splitlines()[0]))
    except UnavailableError:
        raise
    except UserError:  # Invalid job id specified
        return {}


def host_names(nodes: str) -> list[str]:
    """Names of nodes: 'node[1-2]' is node1, node2."""
    return ask('scontrol', 'show', 'hostnames', nodes).split()


def nodes_down(nodes: Sequence[str]) -> set[str]:
    """The nodes among these that Slurm reports as down; none if it does not answer."""
    try:
        lines = ask('scontrol', '--oneliner', 'show', 'node', ','.join(nodes)).splitlines()
    except UserError:
        return set()
    found = {line.split()[0].partition('=')[2]: re.search(r' State=(\S*)', line) for line in lines if line.strip()}
    return {node for node, state in found.items() if state and _is_gone(state[1])}


def _is_gone(state: str) -> bool:
    """Whether a state such as 'DOWN*+DRAIN' or 'MIXED+NOT_RESPONDING' is that of a lost node; `*`: no answer."""
    return '*' in state or not _GONE.isdisjoint(re.split(r'\W+', state))


def partitions() -> list[Partition]:
    """The partitions that this user sees."""
    lines = ask('sinfo', '--noheader', '--noconvert', '--format=%P|%a|%l|%s|%D|%c|%G').splitlines()
    return [_partition(*line.split('|')) for line in lines if line.count('|') == 6]


def _partition(name: str, up: str, limit: str, size: str, nodes: str, cpus: str, gres: str) -> Partition:
    most = size.rpartition('-')[2]
    gpus = sum(int(count) for count in re.findall(r'gpu(?::[^:,(]+)?:(\d+)', gres))
    return Partition(
        name=name.rstrip('*'),
        is_default=name.endswith('*'),
        is_up=up == 'up',
        most_minutes=minutes_of(limit) if limit[:1].isdigit() else None,  # 'infinite', 'n/a'
        most_nodes=int(most) if most.isdecimal() else None,
        nodes=int(nodes),
        cpus=int(cpus.rstrip('+')),
        gpus=gpus,
    )
