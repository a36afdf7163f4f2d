"""Runs `pretrax doctor` in several processes of this machine, with faults injected into some of them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from side_by_side import coordinator_address

# Changes to pretrax in one process, by the variable HURT. Python imports `sitecustomize` when it starts, also in the
# process that checks the devices.
SITE = """
import os, sys
faults = os.environ.get('HURT', '').split(',')

def when_imported(name, change):
    import importlib.abc, importlib.util
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, wanted, path, target=None):
            if wanted != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            def exec_module(module):
                run(module)
                change(module)
            spec.loader.exec_module = exec_module
            return spec
    sys.meta_path.insert(0, Finder())

if 'version' in faults:
    def change(module):
        found = module.versions
        module.versions = lambda: found() | {'jax': '0.0.1'}
    when_imported('pretrax.system.software', change)
for fault in faults:
  if fault.startswith('clock:'):
    import time
    ahead, now = float(fault.partition(':')[2]), time.time
    time.time = lambda: now() + ahead
if 'product' in faults:
    def change(module):
        product = module.jnp.matmul
        module.jnp.matmul = lambda *a, **b: product(*a, **b) + 1
    when_imported('pretrax.doctor.devices', change)
if 'hang' in faults:
    def change(module):
        import time
        module.all_reduce = lambda context: time.sleep(1000)
    when_imported('pretrax.doctor.interconnect', change)
if 'crash' in faults:
    def change(module):
        import signal
        module.present = lambda context: os.kill(os.getpid(), signal.SIGSEGV)
    when_imported('pretrax.doctor.devices', change)
if 'end' in faults:
    def change(module):
        module.connections = lambda context, others: os._exit(3)
    when_imported('pretrax.doctor.network', change)
if 'host' in faults:
    import socket
    name = socket.gethostname()
    socket.gethostname = lambda: 'no-such-host.invalid'
if 'door' in faults:
    def change(module):
        module.Door.port = property(lambda door: 9)  # the port 'discard', where nobody listens
    when_imported('pretrax.doctor.network', change)
if 'slow' in faults:
    # While products are measured, this process shares a core with a program that the system prefers.
    def change(module):
        wait = module.wait_for_all
        def slow(name, context):
            import subprocess
            wait(name, context)
            core = {max(os.sched_getaffinity(0))}
            program = 'import time; end = time.monotonic() + 4\\nwhile time.monotonic() < end: pass'
            busy = subprocess.Popen([sys.executable, '-S', '-c', program])
            os.sched_setaffinity(busy.pid, core)
            for thread in map(int, os.listdir('/proc/self/task')):
                os.sched_setaffinity(thread, core)
                os.setpriority(os.PRIO_PROCESS, thread, 15)
        module.wait_for_all = slow
    when_imported('pretrax.doctor.devices', change)
if 'pair' in faults:
    def change(module):
        import jax, time
        reduce = module._reduce
        def slow(devices, n_bytes):
            seconds, right = reduce(devices, n_bytes)
            return seconds * (20 if len({d.process_index for d in devices}) == 2 else 1), right
        module._reduce = slow
    when_imported('pretrax.doctor.interconnect', change)
"""


@dataclass
class Doctored:
    """What `pretrax doctor` of several processes printed, and how they ended."""

    codes: list[int]
    outputs: list[str]

    @property
    def checks(self) -> list[dict]:
        """The rows of the table of process 0, which was asked for JSON."""
        return json.loads(self.outputs[0])['checks']

    def bad(self, check: str) -> list[dict]:
        """The rows of a check that are not 'ok'."""
        return [row for row in self.checks if row['check'] == check and row['status'] != 'ok']

    def good(self) -> dict[str, str]:
        """{check: result} of the rows that are 'ok'."""
        return {row['check']: row['result'] for row in self.checks if row['status'] == 'ok'}


def environment(directory: Path, **changes: str) -> dict[str, str]:
    """Of a user, with a `sitecustomize` that injects the faults in HURT into the process."""
    (directory / 'sitecustomize.py').write_text(SITE)
    return dict(os.environ) | {'PYTHONPATH': str(directory), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''} | changes


def doctored(
    directory: Path, *arguments: str, processes: int = 1, limit: int = 120, absent=(), hurt=None, before=None, cwd=None,
    options=('--json',),
) -> Doctored:  # fmt: skip
    """Runs `pretrax doctor` to its end.

    Args:
        directory: for what the test needs.
        arguments: CONFIG and KEY=VALUE.
        processes: how many there are, each with one CPU device.
        limit: --limit.
        absent: processes that are not started.
        hurt: {process: variables of its environment}; HURT is a fault of SITE.
        before: {process: words before the command, such as `nice`}.
        cwd: {process: directory}.
        options: more options.
    """
    address = coordinator_address()
    started = []
    for index in range(processes):
        if index in absent:
            continue
        identity = {
            'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(processes), 'JAX_PROCESS_ID': str(index),
            'JAX_NUM_CPU_DEVICES': '1',
        } if processes > 1 else {}  # fmt: skip
        started.append(
            subprocess.Popen(
                [*(before or {}).get(index, ()), sys.executable, '-m', 'pretrax', 'doctor', *arguments, *options,
                 '--limit', str(limit)],
                env=environment(directory, **identity, **(hurt or {}).get(index, {})),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=(cwd or {}).get(index),
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=300) for process in started]
    for _, error in outputs:
        assert 'Traceback' not in error, error
    return Doctored([process.returncode for process in started], [out for out, _ in outputs])
