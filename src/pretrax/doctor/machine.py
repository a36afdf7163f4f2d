"""The machine: its name, its cores and their clock, and the time since its start."""

import socket
from collections.abc import Iterator

from pretrax.doctor.findings import Context, Finding, failure, warning
from pretrax.system.cores import cpu_name, usable_cores


def own_name(context: Context) -> Iterator[Finding]:
    """Whether the host name has an address: gloo and MPI give it to the other nodes to connect to."""
    name, fix = context.host, 'add the name and the address of the network card to /etc/hosts, or to the DNS'
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError as error:
        status = failure if context.processes > 1 else warning
        yield status('host name', f'{name} cannot be resolved: {error.strerror}', fix)
        return
    yield Finding('host name', f'{name} is {", ".join(addresses[:2])}')


def cores(context: Context) -> Iterator[Finding]:
    """Cores that the process may use: a job that was given fewer on one node feeds its devices more slowly."""
    usable, idle = usable_cores(), f'{cpu_name()}'
    yield Finding(
        'cores',
        f'{usable} x {idle}',
        same=f'{usable} x {idle}',
        differs='warning',
        fix='give all nodes the same: --cpus-per-task, taskset, limits of the container',
    )


def governor(context: Context) -> Iterator[Finding]:
    """Cores that stay at their lowest clock."""
    directory = 'sys/devices/system/cpu/cpu0/cpufreq'
    chosen, driver = context.read(f'{directory}/scaling_governor'), context.read(f'{directory}/scaling_driver')
    if chosen == 'powersave' and 'pstate' not in driver:  # the drivers of that name raise the clock in this mode too
        yield warning('CPU clock', f'governor {chosen}', 'sudo cpupower frequency-set --governor performance')
    elif chosen:
        yield Finding('CPU clock', f'governor {chosen}')


def uptime(context: Context) -> Iterator[Finding]:
    """Time since boot. A machine that has just booted was made by an autoscaler, or crashed during the previous run."""
    text = context.read('proc/uptime').partition(' ')[0]
    if text:
        minutes = float(text) / 60
        length = f'{minutes:.0f} min' if minutes < 120 else f'{minutes / 60:.0f} h'
        yield Finding('time since boot', length if minutes < 72 * 60 else f'{minutes / 60 / 24:.0f} days')
