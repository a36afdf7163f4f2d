"""Checks before a run is submitted to an engine, so that mistakes are found before it waits in a queue."""

from pathlib import Path

from pretrax.config import RunConfig
from pretrax.errors import UserError
from pretrax.launch.sizes import misfit
from pretrax.storage import BucketPath

_OF_ONE_MACHINE = ('/tmp', '/var/tmp', '/dev/shm', '/scratch/local', '/run')


def check_request(config: RunConfig, nodes: int, devices_per_node: int) -> None:
    """Checks that a run fits the machines that are asked for.

    Args:
        nodes: number of machines, with one process each.

    Raises:
        UserError: its mesh or batch does not fit them, or it sets what the launcher sets.
    """
    section = config.processes
    if section.index is not None or section.coordinator is not None:
        raise UserError('the launcher sets processes.index and processes.coordinator; leave them out')
    if section.count is not None and section.count != nodes:
        raise UserError(f'processes.count is {section.count}, but there are {nodes} nodes\nleave processes.count out')
    if (problem := misfit(config, nodes * devices_per_node)) is not None:
        raise UserError(
            f'{_count(nodes, "node")} with {_count(devices_per_node, "device")} each, '
            f'{nodes * devices_per_node} in all: {problem}'
        )


def is_on_one_machine(run_dir: object) -> bool:
    """Whether other machines certainly do not see this directory: it is below /tmp or the like."""
    if isinstance(run_dir, BucketPath) or not isinstance(run_dir, Path):
        return False
    whole = run_dir.absolute()
    return any(whole.is_relative_to(place) for place in _OF_ONE_MACHINE)


def _count(number: int, what: str) -> str:
    return f'{number} {what}{"" if number == 1 else "s"}'
