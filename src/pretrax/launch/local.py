"""Processes of `pretrax train` on one machine.

Process 0 writes to the terminal. The others write to `<run_dir>/output/process-<i>.txt`. If one of them causes a
failure, the end of its output is shown.
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pretrax.config import RunConfig
from pretrax.errors import Report
from pretrax.launch.elastic import Slots
from pretrax.launch.group import Group, free_port, identity, last_lines, output_file
from pretrax.launch.host_memory import HostMemory
from pretrax.launch.restarts import RestartOptions
from pretrax.launch.sizes import misfit
from pretrax.launch.supervisor import Supervisor
from pretrax.storage.locate import working_directory
from pretrax.system.children import Child
from pretrax.system.standby import Training, Trainings

_PATIENCE = 60.0  # seconds for Linux to end a process that was killed
# Ends with its standard input, which is when the launcher ends. A stopped process then runs again, and handles the
# SIGTERM that Linux sends to each process of a launcher that was killed.
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.read()
for process in sys.argv[1:]:
    try:
        os.kill(int(process), signal.SIGCONT)
    except OSError:  # it has ended
        pass
"""
_COUNT_FLAG = re.compile(r'--xla_force_host_platform_device_count=\d+\s*')


def local_launch(
    config: RunConfig,
    command: Sequence[str],
    options: RestartOptions,
    *,
    processes: int,
    devices: int,
    standbys: bool = True,
    say: Report,
) -> Supervisor:
    """A run in several processes of this machine. For `options` and `say` see `Supervisor`.

    `standbys`: a standby waits for the end of each process.
    """
    directory = working_directory(config.run_dir)
    slots = Slots(processes, lambda count: misfit(config, count * devices) is None)
    memory = HostMemory()
    trainings = Trainings(command, lambda slot: os.environ | devices_of(slot, devices) | memory.environment, standbys)

    def start(used: Sequence[int], label: str) -> LocalGroup:
        del label
        return LocalGroup(trainings, used, directory)

    def at_end(code: int) -> None:
        del code
        trainings.close()

    return Supervisor(config, start, slots, options, memory=memory, at_end=at_end, say=say)


class LocalGroup(Group):
    """Processes of this machine."""

    def __init__(self, trainings: Trainings, slots: Sequence[int], directory: pathlib.Path):
        self._directory, self._trainings, self._slots = directory, trainings, slots
        self._has_stepped = False
        self._processes: list[Training] = []
        self._guard: Child | None = None
        self._begins: list[int] = []  # offset at which the output of this attempt begins, per process
        address = f'127.0.0.1:{free_port("127.0.0.1")}'
        try:
            for index, slot in enumerate(slots):
                bind = {'JAX_COORDINATOR_BIND_ADDRESS': address}
                self._start(index, slot, identity(index, [''] * len(slots), address) | bind)
            guard = [sys.executable, '-c', _GUARD, *map(str, self.processes())]
            self._guard = Child(guard, stdin=subprocess.PIPE)
        except BaseException:
            self.end()
            raise

    def _start(self, index: int, slot: int, variables: Mapping[str, str]) -> None:
        if index == 0:
            self._begins.append(0)
            self._processes.append(self._trainings.start(slot, variables, 1, 2))  # writes to the terminal
            return
        with output_file(self._directory, index).open('ab') as output:
            self._begins.append(output.tell())
            self._processes.append(self._trainings.start(slot, variables, output.fileno(), output.fileno()))

    def __len__(self) -> int:
        return len(self._processes)

    def processes(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes]

    def codes(self) -> dict[int, int]:
        found = {number: process.poll() for number, process in enumerate(self._processes)}
        return {number: code for number, code in found.items() if code is not None}

    def prepare(self) -> None:
        if not self._has_stepped and all(process.has_stepped() for process in self._processes):
            self._has_stepped = True
            self._trainings.prepare(self._slots)

    def send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def end(self) -> None:
        """Kills all processes, stopped ones too, and the processes that they have started."""
        for process in self._processes:
            process.kill_all()
        for process in self._processes:
            process.end(_PATIENCE)
        if self._guard is not None:
            self._guard.communicate()

    def tail(self, number: int) -> list[str]:
        """The last lines that a process wrote in this attempt; process 0 writes to the terminal."""
        return last_lines(output_file(self._directory, number), self._begins[number]) if number else []


def devices_of(slot: int, count: int) -> dict[str, str]:
    """Environment that restricts a process to the devices of its slot: GPUs, or simulated devices of the CPU."""
    flags = _COUNT_FLAG.sub('', os.environ.get('XLA_FLAGS', ''))
    numbers = range(slot * count, (slot + 1) * count)
    return {
        'JAX_NUM_CPU_DEVICES': str(count),
        'JAX_LOCAL_DEVICE_IDS': ','.join(map(str, numbers)),
        'XLA_FLAGS': flags,
    }


def share_of(slot: int, devices: int | None) -> dict[str, str]:
    """Environment of a process with the devices of a slot: GPUs, or simulated devices of the CPU. None: all."""
    if devices is None:
        return {}
    numbers = range(slot * devices, (slot + 1) * devices)
    seen = [name for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if name] or list(
        map(str, range(numbers.stop))
    )
    return devices_of(0, devices) | {'CUDA_VISIBLE_DEVICES': ','.join(seen[numbers.start : numbers.stop])}


def pretrax_command(*arguments: str) -> list[str]:
    """Command that runs pretrax with this Python: `pretrax_command('train', 'run.yaml')`."""
    return [sys.executable, '-m', 'pretrax', *arguments]
