"""Identity of a process: among others, from the variables of Open MPI's `mpirun` or of GKE, without JAX, `mpi4py` and
libtpu; and across machines, to find out whether another process of this machine has ended.
"""

import os
import re
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path

from pretrax.errors import UserError

_SIZE, _RANK, _LOCAL_SIZE, _LOCAL_RANK = (
    f'OMPI_COMM_WORLD_{name}' for name in ('SIZE', 'RANK', 'LOCAL_SIZE', 'LOCAL_RANK')
)
_LAUNCHER_4 = 'OMPI_MCA_orte_hnp_uri'  # 1314521088.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::b9b]:43370
_JOB_5 = 'PMIX_NAMESPACE'  # prterun-HOST-PID@1


def mpi_identity(
    coordinator: str | None = None, variables: Mapping[str, str] = os.environ
) -> tuple[int, int, str, int] | None:
    """(number of processes, index of this one, address of the first, its index on this host); None: one process or no
    Open MPI.

    Open MPI does not say where process 0 runs. If the processes are on several hosts, it is expected on that of
    `mpirun`, where `mpirun` starts it unless a list of hosts says otherwise.

    Args:
        coordinator: the address of process 0, if it is known.

    Raises:
        UserError: the address is not known, and process 0 runs on another host than `mpirun`.
    """
    if not all(variables.get(name, '').isdecimal() for name in (_SIZE, _RANK, _LOCAL_RANK)):
        return None
    count, index = int(variables[_SIZE]), int(variables[_RANK])
    if count == 1:
        return None
    local_rank = int(variables[_LOCAL_RANK])
    if coordinator is not None:
        return count, index, coordinator, local_rank
    host = 'localhost' if variables.get(_LOCAL_SIZE) == variables[_SIZE] else _host_of_mpirun(variables)
    own = variables.get('PMIX_HOSTNAME') or socket.gethostname()
    if index == 0 and _JOB_5 in variables and host not in ('localhost', own):
        raise UserError(
            f'mpirun runs on {host}, but has started process 0 on {own}\n'
            f'tell all processes its address: mpirun -x JAX_COORDINATOR_ADDRESS={own}:8476'
        )
    job = variables.get(_JOB_5) or variables.get(_LAUNCHER_4, '').partition('.')[0]
    port = variables.get('JAX_COORDINATOR_PORT') or 61440 + zlib.crc32(job.encode()) % 4096  # as JAX's: one per job
    return count, index, f'{host}:{port}', local_rank


def _host_of_mpirun(variables: Mapping[str, str]) -> str:
    for name, pattern in (
        (_LAUNCHER_4, r'tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]'),
        (_JOB_5, r'(?:prterun|prte)-(.+)-\d+@\d+'),
    ):
        if found := re.search(pattern, variables.get(name, '')):
            return next(group for group in found.groups() if group)
    raise UserError(
        'Open MPI does not say on which host mpirun runs\n'
        'tell all processes the address of process 0: mpirun -x JAX_COORDINATOR_ADDRESS=HOST:8476'
    )


PORT = 8482  # of the coordinator, as JAX chooses it on TPUs


def slice_identity(variables: Mapping[str, str] = os.environ) -> tuple[int, int, str] | None:
    """(number of processes, index of this one, address of the first); None: not on slices of TPUs.

    Processes are numbered by slice, and in a slice by worker, as JAX numbers them. On a TPU VM outside
    Kubernetes these variables are not set; there JAX asks the metadata server.

    Raises:
        UserError: a variable is not a number or out of range, or one is missing.
    """
    hosts = [name for name in variables.get('TPU_WORKER_HOSTNAMES', '').split(',') if name]
    slices = _number(variables, 'MEGASCALE_NUM_SLICES', 1, at_least=1)
    if not hosts or len(hosts) * slices == 1:
        return None
    worker = _number(variables, 'TPU_WORKER_ID', 0 if len(hosts) == 1 else None, below=len(hosts))
    this = _number(variables, 'MEGASCALE_SLICE_ID', 0 if slices == 1 else None, below=slices)
    first = variables.get('MEGASCALE_COORDINATOR_ADDRESS') or (hosts[0] if slices == 1 else '')
    if not first:
        raise UserError(f'MEGASCALE_NUM_SLICES={slices}, but MEGASCALE_COORDINATOR_ADDRESS is not set\n{_FIX}')
    port = variables.get('JAX_COORDINATOR_PORT', PORT)
    return len(hosts) * slices, this * len(hosts) + worker, f'{first.split(":")[0]}:{port}'


_FIX = 'set the host of the first worker of slice 0 on all workers; GKE does so for a JobSet'


def _number(
    variables: Mapping[str, str], name: str, default: int | None, at_least: int = 0, below: int | None = None
) -> int:
    text = variables.get(name) or (None if default is None else str(default))
    if text is not None and text.isdecimal() and int(text) >= at_least and (below is None or int(text) < below):
        return int(text)
    expected = f'a number from {at_least}' if below is None else f'0 to {below - 1}'
    raise UserError(f'{name}={"(not set)" if text is None else repr(text)}: expected {expected}')


def identity() -> dict[str, str]:
    """This process. Another process with its number, later or in another container, has another identity."""
    return {
        'host': socket.gethostname(),
        'pid': str(os.getpid()),
        'started': _started(os.getpid()),
        **_place(),
    }


def has_ended(other: dict[str, str]) -> bool:
    """Whether a process has ended; False if it runs, or runs where this process cannot see it."""
    place = _place()
    if not place['boot'] or any(other.get(key) != value for key, value in place.items()):
        return False
    pid = other.get('pid', '')
    return pid.isdecimal() and _started(int(pid)) != other.get('started')


def is_here(other: dict[str, str]) -> bool:
    """Whether a process runs where this one can see it, so that a signal to its id reaches no other process."""
    place = _place()
    return bool(place['boot']) and all(other.get(key) == value for key, value in place.items()) and not has_ended(other)


def _place() -> dict[str, str]:
    """The boot of the system, and the processes that this container can see; '' if the system is not Linux."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        return {'boot': boot, 'container': os.readlink('/proc/self/ns/pid')}
    except OSError:
        return {'boot': '', 'container': ''}


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; '' if it has ended, or is not known."""
    try:
        state, *fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return ''
    return '' if state in 'ZX' else fields[18]
