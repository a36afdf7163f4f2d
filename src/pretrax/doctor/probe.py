"""The process that runs the checks of the devices: `python -m pretrax.doctor.probe CONFIG-or-empty KEY=VALUE ...`.

It waits for a line on its standard input, the seconds for each check, and ends when that is closed. It writes a JSON
object per line: the name of the check that begins, or a finding.
"""

import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrax.config import RunConfig, load
from pretrax.doctor.checks import DEVICES, JOIN
from pretrax.doctor.findings import Context, failure
from pretrax.errors import first_line
from pretrax.system.accelerators import skip_absent_accelerators

_HEARTBEAT = 600  # seconds: `pretrax doctor` has limits of its own, which name the check


def configuration(arguments: Sequence[str]) -> RunConfig | None:
    """The configuration that the arguments name; None: there is none."""
    return load(arguments[0], list(arguments[1:])) if arguments and arguments[0] else None


def main(arguments: Sequence[str]) -> None:
    """Runs the checks."""
    out = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)  # libraries may print

    def write(value: Any) -> None:
        out.write(json.dumps(value) + '\n')

    config = configuration(arguments)
    skip_absent_accelerators()
    import jax

    import pretrax.doctor.devices
    from pretrax.doctor.barrier import MissingError, wait_for_all
    from pretrax.run.processes import join_processes

    if not (seconds := sys.stdin.readline()):
        return
    threading.Thread(target=_end_with_input, daemon=True).start()
    write(JOIN)
    with tempfile.TemporaryDirectory(prefix='pretrax-doctor-') as scratch:
        some = config or load('quickstart')
        faults = some.faults.model_copy(update={'heartbeat_seconds': _HEARTBEAT})
        join_processes(some.processes, Path(scratch), faults.heartbeat_seconds)
        several = jax.distributed.is_initialized()
        context = Context(
            config, jax.process_index() if several else 0, jax.process_count() if several else 1, float(seconds)
        )
        pretrax.doctor.devices.start(context)
        for check in DEVICES:
            write(check.name)
            module, _, function = check.function.partition(':')
            try:
                wait_for_all(check.name, context)
                for finding in getattr(importlib.import_module(f'pretrax.doctor.{module}'), function)(context):
                    write(finding.to_json())
            except MissingError as error:
                write(failure(check.name, str(error), 'look at that node: it hangs, or is slow').to_json())
                break
            except Exception as error:  # of JAX, a driver or a network: a line of the table
                write(failure(check.name, f'{type(error).__name__}: {first_line(error)[:200]}', check.fix).to_json())
                break
    write('')
    out.flush()
    sys.stdin.close()
    os._exit(0)  # JAX would wait for the other processes


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == '__main__':
    main(sys.argv[1:])
