"""One row of `pretrax bench`, in a process of its own: prepares a run as `train` does, and times some of its steps.

    python -c 'from pretrax.run.measure import main; main()' CONFIG RESULT STEPS WARMUP

writes RESULT, a JSON object with a `status`. Nothing is saved, logged or evaluated.
"""

import contextlib
import itertools
import json
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import jax

from pretrax.amounts import size
from pretrax.config import RunConfig, load
from pretrax.errors import UserError, first_line
from pretrax.run.clock import is_done
from pretrax.run.compiled_step import compile_step
from pretrax.run.devices import memory_limit, peak_memory
from pretrax.run.out_of_memory import FullMemoryError
from pretrax.run.processes import join_processes
from pretrax.run.setup import memory_of_run, prepare
from pretrax.system.atomic import write_file
from pretrax.train.state import init_state

DONE, TOO_LARGE, OUT_OF_MEMORY, REFUSED, FAILED = 'done', 'too large', 'out of memory', 'refused', 'failed'


def main() -> None:
    """Measures a configuration, and writes the result or the reason of a failure."""
    config, result, steps, warmup = sys.argv[1:]
    try:
        measured = measure(load(config), int(steps), int(warmup))
    except UserError as error:
        print(error.short_text(), file=sys.stderr)
        status = OUT_OF_MEMORY if isinstance(error, FullMemoryError) else REFUSED
        measured = {'status': status, 'why': error.short_text().splitlines()[0]}
    except Exception as error:  # the result names it; the output has the traceback
        ran_out = isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)
        measured = {
            'status': OUT_OF_MEMORY if ran_out else FAILED,
            'why': f'{type(error).__name__}: {first_line(error)[:300]}',
        }
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
    join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
    run = prepare(config)
    for line in run.startup:
        print(line, flush=True)
    expected, limit = memory_of_run(run), memory_limit(run.mesh.local_devices)
    sizes: dict[str, Any] = {
        'n_params': run.n_params,
        'batch_tokens': run.size.tokens,
        'devices': run.mesh.size,
        'expected_memory': expected.total if expected else None,
    }
    if expected and limit and expected.total > limit:
        why = f'about {size(expected.total)} per device, which has {size(limit)}'
        return {'status': TOO_LARGE, 'why': why, **sizes}
    with jax.set_mesh(run.mesh):
        state = init_state(run.recipe, config.seed)._replace(constants=run.constants(lambda text: None))
        step = compile_step(run, state)
        print(step, flush=True)
        ends, metrics = list[tuple[int, float]](), None  # numbers of finished steps, and when they were known
        numbers = range(run.first_batch, run.first_batch + warmup + steps)
        with contextlib.closing(run.batches(numbers, print)) as batches:
            for number, batch in enumerate(batches):
                if number == warmup:  # the first measured step begins on idle devices
                    jax.block_until_ready(metrics)
                    ends, metrics = [(warmup, time.perf_counter())], None
                before = metrics
                state, metrics = step.call(state, batch)
                if before is not None:
                    jax.block_until_ready(before)
                    ends.append((number + is_done(metrics), time.perf_counter()))
        assert metrics is not None
        loss = float(metrics['loss'])
        ends.append((warmup + steps, time.perf_counter()))
    each = seconds_of_steps(ends)
    seconds = statistics.median(each)
    speed = run.size.tokens / seconds
    if run.mfu.is_exceeded(speed):
        print(run.mfu.explain_excess(speed), flush=True)
    return {
        'status': DONE,
        **sizes,
        'step_seconds': seconds,
        'slowest_step_seconds': max(each),
        'tokens_per_second': speed,
        **run.mfu(speed),
        'memory': peak_memory(run.mesh.local_devices),
        'loss': loss,
        **({'compile_seconds': step.seconds} if step.is_new else {}),
    }


def seconds_of_steps(ends: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds of each step after the first ones, from numbers of finished steps and the times at which they were known.

    Steps that were found finished together have the same share of the time.
    """
    known = dict(reversed(ends))  # the earliest time for each number
    pairs = itertools.pairwise(sorted(known.items()))
    return [(later - at) / (more - done) for (done, at), (more, later) in pairs for _ in range(more - done)]
