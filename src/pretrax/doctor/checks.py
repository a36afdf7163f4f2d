"""The list of checks.

To add a check, write a function that takes a `Context` and yields findings, and add it here. It belongs here if its
failure breaks or slows real training, and if the fix fits in a line. A check of the machine runs without JAX. A check
of the devices runs in a process of its own (`probe`), so that a device which hangs or crashes is a line of the table;
it also has the name of the line, and the fix, for that case.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pretrax.doctor import disk, machine, nvidia, software
from pretrax.doctor.findings import Context, Finding

type Check = Callable[[Context], Iterable[Finding]]

MACHINE: tuple[Check, ...] = (
    machine.own_name,
    machine.uptime,
    machine.cores,
    machine.governor,
    machine.memory,
    machine.swap,
    machine.shared_memory,
    machine.huge_pages,
    machine.open_files,
    machine.locked_memory,
    machine.threads,
    machine.core_files,
    nvidia.gpus,
    nvidia.xids,
    software.software,
    software.checkout,
    software.configuration,
    software.variables,
    disk.run_directory,
    disk.bucket,
    disk.cache,
)


class DeviceCheck(NamedTuple):
    """A check of the devices, by the place of its function: `module:function` below `pretrax.doctor`."""

    name: str
    function: str
    fix: str  # if it fails as a whole, or does not end


_HANGS = 'run it alone on this node: pretrax doctor; then drain the node'
_NETWORK = 'see `connections`; NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME name the network card'
# In the order in which all processes run them.
DEVICES = (
    DeviceCheck('devices', 'devices:present', _HANGS),
    DeviceCheck('device memory', 'devices:memory_in_use', _HANGS),
    DeviceCheck('mesh', 'devices:mesh', 'pretrax train CONFIG --dry-run shows the mistake'),
    DeviceCheck('checkpoints', 'state:checkpoint_size', 'pretrax train CONFIG --dry-run shows the mistake'),
    DeviceCheck('known product', 'devices:products', _HANGS),
    DeviceCheck('products', 'devices:rates', _HANGS),
    DeviceCheck('all-reduce', 'interconnect:all_reduce', _NETWORK),
    DeviceCheck('node to node', 'interconnect:pairs', _NETWORK),
)
JOIN = 'JAX'
JOIN_FIX = 'see `connections` and the versions; remove proxies: unset http_proxy https_proxy'
