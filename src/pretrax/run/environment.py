"""`environment.json` of a run: versions, hardware, command and sizes, to compare runs and to repeat them."""

import contextlib
import functools
import json
import pathlib
import platform
import socket
import subprocess
import sys
import time
from typing import Any

from pretrax.amounts import size
from pretrax.cost.memory import memory_of
from pretrax.cost.roofline import predict
from pretrax.cost.topology import topology_of
from pretrax.errors import Report
from pretrax.run.compiled_step import CompiledStep
from pretrax.run.devices import memory_limit, peak_memory
from pretrax.run.setup import Run, memory_of_run, step_facts
from pretrax.system.atomic import write_file
from pretrax.system.command_line import without_secrets
from pretrax.system.cores import cpu_name, total_memory, usable_cores
from pretrax.system.software import flags, versions

FILE = 'environment.json'
_MORE_PACKAGES = ('numpy', 'optax', 'tensorstore', 'tokenizers')
_MOST_DEVICES = 4096  # whose places in the mesh are written


class Environment:
    """Writes `environment.json`, and adds to it what is known later. A failure is a warning."""

    def __init__(self, run: Run, directory: pathlib.Path, report: Report):
        self._run, self._path, self._report = run, directory / FILE, report
        self._facts = {**_software(), **_hardware(run), **_sizes(run)}
        if self._facts['platform'] == 'cpu':  # those of other devices count no Python and no compiler
            self._facts['memory']['before'] = peak_memory(run.mesh.local_devices)
        self._write()

    def compiled(self, step: CompiledStep) -> None:
        """Adds how the step was compiled, and the memory that it needs."""
        self._facts['step'] = {'how': step.how, 'seconds': step.seconds, 'is_new': step.is_new}
        if 'before' in self._facts['memory']:
            self._facts['memory'].setdefault('compiling', peak_memory(self._run.mesh.local_devices))
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
            self._facts['memory']['compiled'] = memory_of(step.call)  # not every backend analyzes a loaded program
        self._write()

    def ended(self) -> str:
        """Adds the memory that was used. Returns a line that compares it with what was expected."""
        self._facts['memory']['peak'] = peak_memory(self._run.mesh.local_devices)
        self._write()
        return memory_line(self._facts['memory'])

    def _write(self) -> None:
        try:
            write_file(self._path, json.dumps(self._facts, indent=1).encode())
        except OSError as error:
            self._report(f'WARNING: cannot write {self._path}: {error.strerror}. Training continues')


def memory_line(memory: dict[str, Any]) -> str:
    """The measured memory beside what was compiled and planned; `view/definitions.yaml` says what each contains."""
    where = 'one device'
    if 'before' in memory:
        earlier = [('before', 'before compiling'), ('compiling', 'before the first step')]
        parts = [f'{size(memory[key])} of it {text}' for key, text in earlier if key in memory]
        where = f'the whole process, {", ".join(parts)}'
    expected = [f'{size(memory["compiled"])} compiled for the step'] if 'compiled' in memory else []
    expected += [f'{size(sum(memory["planned"].values()))} planned by formula'] if memory['planned'] else []
    also = f'; per device {", ".join(expected)}' if expected else ''
    return f'memory: {size(memory["peak"])} at most in {where}{also}'


def _software() -> dict[str, Any]:
    return {
        'time': round(time.time(), 3),
        'versions': {'python': platform.python_version(), **versions(_MORE_PACKAGES)},
        'git': git_state(pathlib.Path(__file__).parent),
        'command': without_secrets([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        'flags': flags(),
    }


def _hardware(run: Run) -> dict[str, Any]:
    devices = list(run.mesh.devices.flat)
    places = [[device.id, device.process_index] for device in devices[:_MOST_DEVICES]]
    return {
        'host': socket.gethostname(),
        'system': platform.platform(),
        'processor': cpu_name(),
        'cores': usable_cores(),
        'host_memory': total_memory(),
        'platform': devices[0].platform,
        'device_kind': devices[0].device_kind,
        'devices': len(devices),
        'processes': len({device.process_index for device in devices}),
        'mesh': {axis: int(size) for axis, size in run.mesh.shape.items()},
        'mesh_devices': places,
        'compiler_options': run.compiler_options.values,
    }


def _sizes(run: Run) -> dict[str, Any]:
    planned = memory_of_run(run)
    flops = run.flops
    return {
        'parameters': run.n_params,
        'batch_tokens': run.size.tokens,
        'sizes': [  # of the batches, by the step from which they have them
            {
                'step': one.first_batch,
                'batch_tokens': one.size.tokens,
                'flops_per_token': one.flops and one.flops.causal,
            }
            for one in (*run.smaller, run)
        ],
        'compute': run.compute,
        'flops_per_token': flops.causal if flops else None,
        'flops_per_token_full': flops.full if flops else None,
        'peak_flops': run.mfu.peak,
        'memory': {
            'planned': planned.parts() if planned else None,
            'phase': planned.phase if planned else None,
            'limit': memory_limit(run.mesh.local_devices),
        },
        'predicted': _predicted(run),
    }


def _predicted(run: Run) -> dict[str, Any] | None:
    """The time of a step by phases, from `cost.roofline`; None for hardware or a model that it does not know."""
    arch, topology = run.recipe.model.arch, topology_of(list(run.mesh.devices.flat))
    if arch is None or topology is None:
        return None
    found = predict(arch, run.n_stored_params, run.size.sequence_length, step_facts(run), topology)
    phases = [
        {'name': phase.name, 'seconds': phase.seconds, 'exposed': phase.exposed, 'bound': phase.bound}
        for phase in found.phases
    ]
    return {'phases': phases, 'seconds': found.seconds, 'mfu': found.mfu, 'bound': found.bound}


@functools.cache
def git_state(directory: pathlib.Path) -> dict[str, Any] | None:
    """The commit of the repository that a directory is in, and whether files differ from it; None: no repository."""
    if not any((parent / '.git').exists() for parent in directory.parents):
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(['git', '-C', str(directory), *arguments], capture_output=True, timeout=10, check=True)
        return done.stdout.decode(errors='replace').strip()

    try:
        return {'commit': git('rev-parse', 'HEAD'), 'changed': bool(git('status', '--porcelain', '-uno'))}
    except (OSError, subprocess.SubprocessError):
        return None
