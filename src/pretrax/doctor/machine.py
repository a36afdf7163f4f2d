"""The machine and its limits: name, cores, clock, open files, locked memory, processes, memory and shared memory."""

import resource
import shutil
import socket
from collections.abc import Iterator

from pretrax.amounts import size
from pretrax.doctor.findings import Context, Finding, failure, warning
from pretrax.system.cores import available_memory, cgroup_memory, cpu_name, total_memory, usable_cores


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


GIB = 2**30
_FILES, _FILES_PER_PROCESS = 512, 16  # libraries, data and checkpoints; connections to each other process of the run
_ENOUGH = 65_536
_PROCESSES = 1024  # threads count: XLA, TensorStore and the loaders start hundreds
_UNLIMITED = resource.RLIM_INFINITY


def open_files(context: Context) -> Iterator[Finding]:
    """Connections to all other processes need file descriptors, or training ends with `Too many open files`."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # `pretrax launch node` raises the soft limit to the hard one
    needed = _FILES + _FILES_PER_PROCESS * context.processes
    if limit != _UNLIMITED and limit < needed:
        yield failure(
            'open files',
            f'hard limit {limit}; training needs about {needed}',
            f'LimitNOFILE={max(needed, _ENOUGH)} of the service that starts it; in a container: --ulimit nofile={
                _ENOUGH
            }',
        )
    else:
        yield Finding('open files', f'hard limit {"none" if limit == _UNLIMITED else limit}')


def locked_memory(context: Context) -> Iterator[Finding]:
    """RDMA cards read and write memory that the system must not move: NCCL fails to register it beyond the limit."""
    cards = sorted(path.name for path in (context.root / 'sys/class/infiniband').glob('*'))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if cards and soft != _UNLIMITED:
        yield failure(
            'locked memory',
            f'limit {size(soft)}, and the machine has RDMA ({", ".join(cards[:3])})',
            'ulimit -l unlimited; in Slurm: LimitMEMLOCK=infinity of slurmd; in Docker: --ulimit memlock=-1',
        )
    elif cards:
        yield Finding('locked memory', f'no limit, for RDMA ({", ".join(cards[:3])})')


def threads(context: Context) -> Iterator[Finding]:
    """Each thread counts as a process: beyond the limit libraries abort when they start one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    pids = context.read('sys/fs/cgroup/pids.max')
    limits = [limit for limit in (soft, int(pids) if pids.isdecimal() else _UNLIMITED) if limit != _UNLIMITED]
    if limits and min(limits) < _PROCESSES:
        yield failure(
            'threads',
            f'limit {min(limits)}; training needs about {_PROCESSES}',
            f'ulimit -u {4 * _PROCESSES}; in a container: --pids-limit -1',
        )
    else:
        yield Finding('threads', f'limit {min(limits) if limits else "none"}')


def core_files(context: Context) -> Iterator[Finding]:
    """A crash would write the memory of the process, possibly hundreds of gigabytes, to the working directory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    pattern = context.read('proc/sys/kernel/core_pattern')
    if soft == _UNLIMITED and pattern and not pattern.startswith('|'):
        yield warning(
            'core files',
            f'no limit: a crash writes all memory of the process to {pattern}',
            'ulimit -c 0; stacks are written in any case',
        )


def memory(context: Context) -> Iterator[Finding]:
    """Free memory of the machine, or of its cgroup: beyond it the kernel kills the process."""
    limit = cgroup_memory(context.root)
    free = min(available_memory(), limit[0] - limit[1]) if limit else available_memory()
    of = f'cgroup limit {size(limit[0])}' if limit and limit[0] <= total_memory() else f'of {size(total_memory())}'
    if free < GIB:
        yield failure(
            'memory', f'{size(free)} free ({of})', 'ps aux --sort=-rss | head: end what uses it, or raise --mem'
        )
    else:
        yield Finding('memory', f'{size(free)} free ({of})', amount=free)


def swap(context: Context) -> Iterator[Finding]:
    """A machine that swaps is slow by orders of magnitude."""
    lines = (line.split() for line in context.read('proc/meminfo').splitlines())
    values = {words[0].rstrip(':'): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdecimal()}
    used = values.get('SwapTotal', 0) - values.get('SwapFree', 0)
    if used > GIB and used > values.get('MemTotal', 0) / 20:
        yield warning('swap', f'{size(used)} in use', 'end what fills the memory; then swapoff -a && swapon -a')


def shared_memory(context: Context) -> Iterator[Finding]:
    """NCCL and the workers of data loaders exchange data in /dev/shm. Docker gives it 64 MB, which NCCL exceeds."""
    path = context.root / 'dev/shm'
    if not path.is_dir():
        return
    usage = shutil.disk_usage(path)
    gpus = len(list((context.root / 'dev').glob('nvidia[0-9]*')))
    if usage.free < (GIB if gpus > 1 else GIB // 16):
        fix = 'docker run --shm-size=16g; in Kubernetes an emptyDir with medium: Memory at /dev/shm; else rm old files'
        status = failure if gpus > 1 else warning
        yield status('shared memory', f'/dev/shm has {size(usage.free)} free of {size(usage.total)}', fix)
    else:
        yield Finding('shared memory', f'{size(usage.free)} free in /dev/shm', amount=usage.free)


def huge_pages(context: Context) -> Iterator[Finding]:
    """Transparent huge pages: libtpu starts minutes faster with them, and steps on CPUs are faster."""
    enabled = context.read('sys/kernel/mm/transparent_hugepage/enabled')
    if not enabled:
        return
    chosen = enabled.partition('[')[2].partition(']')[0]
    has_tpu = any(any((context.root / 'dev').glob(pattern)) for pattern in ('accel*', 'vfio/[0-9]*'))
    if chosen == 'never' or (has_tpu and chosen != 'always'):
        yield warning(
            'huge pages',
            f'transparent huge pages: {chosen}',
            "sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'",
        )
    else:
        yield Finding('huge pages', f'transparent huge pages: {chosen}')
