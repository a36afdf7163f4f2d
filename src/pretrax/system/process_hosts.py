"""The machines of a run's processes, from the environment: known before any of them has answered."""

import os
import re
import socket
from collections.abc import Iterable, Mapping

VARIABLE = 'PRETRAX_HOSTS'  # set by `pretrax launch`: the machine of each process, in their order
_MOST = 8  # processes that a text names


def expected_hosts(count: int, index: int, coordinator: str, variables: Mapping[str, str] = os.environ) -> list[str]:
    """The machine of each process; [] if the environment does not say it.

    `pretrax launch` names them, Slurm a step's nodes with the tasks of each, and GKE the workers of a TPU slice.
    Kubernetes numbers the pods of a job: if the first is `base-0` and this one, number 3, is `base-3`, then number 2 is
    `base-2`.

    Args:
        coordinator: HOST:PORT of the first.
    """
    pod, own = coordinator.rpartition(':')[0].partition('.')[0], socket.gethostname().partition('.')[0]
    prefix, dash, zero = pod.rpartition('-')
    found = [
        variables.get(VARIABLE, '').split(','),
        _slurm_hosts(variables),
        variables.get('TPU_WORKER_HOSTNAMES', '').split(','),
        [f'{prefix}-{number}' for number in range(count)]
        if dash and zero == '0' and own == f'{prefix}-{index}'
        else [],
    ]
    return next((hosts for hosts in found if len(hosts) == count and all(hosts)), [])


def described(processes: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Processes with their machines, as a part of a sentence: 'processes 2 (node7) and 5 (node9)'."""
    numbers = sorted(processes)
    named = [f'{number} ({hosts[number]})' if hosts.get(number) else str(number) for number in numbers[:_MOST]]
    if len(numbers) > _MOST:
        named.append(f'{len(numbers) - _MOST} more')
    *most, last = named
    return f'process{"es" if most else ""} {", ".join(most)}{" and " if most else ""}{last}'


def _slurm_hosts(variables: Mapping[str, str]) -> list[str]:
    """The node of each task of a step, with the tasks in blocks, as Slurm distributes them by default."""
    if not variables.get('SLURM_DISTRIBUTION', 'block').startswith('block'):
        return []
    nodes = _node_names(variables.get('SLURM_STEP_NODELIST', ''))
    tasks: list[int] = []
    for part in variables.get('SLURM_STEP_TASKS_PER_NODE', '').split(','):  # such as 2(x3),1
        if not (match := re.fullmatch(r'(\d+)(?:\(x(\d+)\))?', part)):
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    return [node for node, n in zip(nodes, tasks, strict=True) for _ in range(n)] if len(nodes) == len(tasks) else []


def _node_names(nodes: str) -> list[str]:
    """Slurm's short form of a list, such as node[01-03,7],login, in full; a name may have one pair of brackets."""
    found = []
    for before, ranges, after in re.findall(r'([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)', nodes):
        for part in ranges.split(','):
            first, _, last = part.partition('-')
            numbers = range(int(first), int(last or first) + 1) if first else ['']
            found += [f'{before}{str(number).zfill(len(first))}{after}' for number in numbers]
    return found
