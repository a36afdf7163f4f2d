"""One row of `pretrax bench`, in a process of its own: prepares a run as `train` does, and times some of its steps.

    python -c 'from pretrax.run.measure import main; main()' CONFIG RESULT STEPS WARMUP

writes RESULT, a JSON object with a `status`. Nothing is saved, logged or evaluated.
"""

import contextlib
import itertools
import json
import pathlib
import resource
import statistics
import sys
import time
import traceback
from typing import Any

import jax

from pretrax.config import RunConfig, load
from pretrax.data.batches.prefetch import prefetch
from pretrax.errors import UserError
from pretrax.machine.atomic import write_file
from pretrax.machine.cores import total_memory
from pretrax.run.compiled_step import compile_step
from pretrax.run.devices import device_memory
from pretrax.run.setup import Run, memory_of_run, prepare
from pretrax.scale.devices import lookup
from pretrax.scale.memory import size
from pretrax.train.step import init_state

DONE, TOO_LARGE, OUT_OF_MEMORY, REFUSED, FAILED = 'done', 'too large', 'out of memory', 'refused', 'failed'


def main() -> None:
    """Measures a configuration, and writes the result or the reason of a failure."""
    config, result, steps, warmup = sys.argv[1:]
    try:
        measured = measure(load(config), int(steps), int(warmup))
    except UserError as error:
        print(error.short_text(), file=sys.stderr)
        measured = {'status': REFUSED, 'why': error.short_text().splitlines()[0]}
    except Exception as error:  # the result names it; the output has the traceback
        ran_out = isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)
        measured = {'status': OUT_OF_MEMORY if ran_out else FAILED, 'why': _first_line(error)}
        traceback.print_exc()
    write_file(pathlib.Path(result), json.dumps(measured).encode())


def measure(config: RunConfig, steps: int, warmup: int) -> dict[str, Any]:
    """Times `steps` steps after `warmup` others, with batches fetched ahead, as in training.

    Returns:
        `status` and the sizes of the run. If it ran, also `step_seconds` (the median), `tokens_per_second`, `mfu` (if
        the peak of the device is known), `memory` (bytes: the peak of the fullest device; on a CPU, of the process),
        `loss` of the last step, and `compile_seconds` if the step was not in the program cache.

    Raises:
        UserError: the configuration does not fit the data or the devices.
    """
    run = prepare(config)
    for line in run.startup:
        print(line, flush=True)
    expected, limit = memory_of_run(run), _memory_of_device(run)
    sizes: dict[str, Any] = {
        'n_params': run.n_params,
        'batch_tokens': config.batch.tokens,
        'devices': run.mesh.size,
        'expected_memory': expected.total if expected else None,
    }
    if expected and limit and expected.total > limit:
        why = f'about {size(expected.total)} per device, which has {size(limit)}'
        return {'status': TOO_LARGE, 'why': why, **sizes}
    with jax.set_mesh(run.mesh):
        state = init_state(run.recipe, config.seed)
        step = compile_step(run, state, run.batch(0))
        print(step, flush=True)
        ends, metrics = [], None
        with contextlib.closing(prefetch(run.batch, range(warmup + steps), 2)) as batches:
            for batch in batches:
                before = metrics
                state, metrics = step.call(state, batch)
                if before is not None:  # the device already computes the next step
                    jax.block_until_ready(before)
                    ends.append(time.perf_counter())
        assert metrics is not None
        loss = float(metrics['loss'])
        ends.append(time.perf_counter())
    each = [b - a for a, b in itertools.pairwise(ends)][warmup - 1 :]
    seconds = statistics.median(each)
    speed = config.batch.tokens / seconds
    return {
        'status': DONE,
        **sizes,
        'step_seconds': seconds,
        'slowest_step_seconds': max(each),
        'tokens_per_second': speed,
        **run.mfu(speed),
        'memory': _peak_memory(run),
        'loss': loss,
        **({'compile_seconds': step.seconds} if step.is_new else {}),
    }


def _memory_of_device(run: Run) -> int | None:
    """Memory of a device of the run, in bytes; None: not known. The devices of a CPU share the machine's memory."""
    device = run.mesh.local_devices[0]
    if device.platform == 'cpu':
        return total_memory() // len(run.mesh.local_devices)
    known = lookup(device.device_kind)
    return device_memory(device) or (known.memory if known else None)


def _peak_memory(run: Run) -> int:
    peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in run.mesh.local_devices]
    known = [peak for peak in peaks if peak is not None]
    unit = 1 if sys.platform == 'darwin' else 1024
    return max(known) if known else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _first_line(error: Exception) -> str:
    return f'{type(error).__name__}: {(str(error).splitlines() or [""])[0][:300]}'
