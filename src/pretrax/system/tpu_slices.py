"""Identity of a process on slices of TPUs, from the environment that GKE sets. Without JAX, and without libtpu.

On a TPU VM outside Kubernetes these variables are not set; there JAX asks the metadata server.
"""

import os
from collections.abc import Mapping

from pretrax.errors import UserError

PORT = 8482  # of the coordinator, as JAX chooses it on TPUs


def slice_identity(variables: Mapping[str, str] = os.environ) -> tuple[int, int, str] | None:
    """(number of processes, index of this one, address of the first); None: not on slices of TPUs.

    Processes are numbered by slice, and in a slice by worker, as JAX numbers them.

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
