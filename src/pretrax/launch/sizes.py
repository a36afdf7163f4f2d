"""How many processes a run can have, and how many devices each of them has. Checked before a run waits in a queue."""

import math

from pretrax.config import RunConfig, resolve_mesh
from pretrax.config.batch import check_batch
from pretrax.errors import UserError
from pretrax.system.accelerators import gpus_here
from pretrax.system.cores import usable_cores

_FASTEST_CPU = 50.0  # TFLOP/s of a device: more than processors do


def devices_per_process(config: RunConfig, processes: int, wanted: int | None) -> tuple[int, str]:
    """Devices per process, and the reason. Raises UserError if the mesh does not fit that many processes or devices."""
    axes = config.mesh.plain().model_dump()
    fixed = math.prod(size for size in axes.values() if size != 'auto')
    if wanted is not None:
        count, why = wanted, 'as requested'
    elif 'auto' not in axes.values():
        if fixed % processes:
            near = [n for n in range(1, fixed + 1) if fixed % n == 0]
            raise UserError(
                f'mesh: {_written(axes)} has {fixed} devices, which cannot be divided among {processes} processes\n'
                f'give --processes {min(near, key=lambda n: abs(n - processes))}, or set an axis of the mesh to auto'
            )
        count, why = fixed // processes, 'as the mesh requires'
    else:
        here, name = _devices_here()
        most = max(here // processes, -(-fixed // processes))
        fits = [n for n in range(most, 0, -1) if misfit(config, processes * n) is None]
        count, why = (fits or [most])[0], f'{here} {name} in this machine'
    if (problem := misfit(config, processes * count)) is not None:
        raise UserError(f'{processes} processes with {count} device{"" if count == 1 else "s"} each: {problem}')
    return count, why


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


def misfit(config: RunConfig, devices: int) -> str | None:
    """The reason why this configuration cannot be trained on `devices` devices; None: it can."""
    try:
        check_batch(config.batch, resolve_mesh(config.mesh.plain(), devices, platform=''))
    except UserError as error:
        return error.short_text()
    return None


def gpu_key(config: RunConfig) -> str | None:
    """A key of the configuration, with its value, that only makes sense on GPUs; None: there is none."""
    attention = getattr(config.model.options, 'attention', None)
    peak = config.log.peak_tflops
    keys = {
        'model.attention.kernel=cudnn': getattr(attention, 'kernel', None) == 'cudnn',
        'precision.compute=fp16': config.precision.compute == 'fp16',
        f'log.peak_tflops={peak}': peak is not None and peak >= _FASTEST_CPU,
        **{f'compiler.options.{name}': name.startswith('xla_gpu') for name in config.compiler.options},
    }
    return next((key for key, is_one in keys.items() if is_one), None)


def restricted_to(devices: int | None) -> dict[str, str]:
    """Environment of a process with this number of devices: the first GPUs, or simulated devices of the CPU."""
    if devices is None:
        return {}
    return {'JAX_NUM_CPU_DEVICES': str(devices), 'JAX_LOCAL_DEVICE_IDS': ','.join(map(str, range(devices)))}


def _devices_here() -> tuple[int, str]:
    """Number and name of the devices of this machine, without JAX, which would occupy them."""
    gpus = gpus_here()
    return (gpus, 'GPUs') if gpus else (usable_cores(), 'cores')


def _written(axes: dict[str, int]) -> str:
    return ' '.join(f'{axis}={size}' for axis, size in axes.items() if size != 1)


def _count(number: int, what: str) -> str:
    return f'{number} {what}{"" if number == 1 else "s"}'
