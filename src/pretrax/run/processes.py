"""Several processes that train one run: which of them this one is, and how it ends when it fails or another one is lost.

JAX's heartbeats notice a process that was killed, stopped or cut off, in all others and whatever Python is doing there;
then JAX aborts them. Here that abort becomes stacks, a line that says what has happened, and exit code 75: try again.
Who starts processes, starts them again and how often is no matter of this file: see `pretrax.launch`.
"""

import ctypes
import faulthandler
import functools
import importlib.util
import os
import pathlib
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from pretrax.checkpoint import SaveError
from pretrax.config import Processes, RunConfig
from pretrax.errors import MISTAKE, TRY_AGAIN, UserError

_VARIABLES = {'count': 'JAX_NUM_PROCESSES', 'index': 'JAX_PROCESS_ID', 'coordinator': 'JAX_COORDINATOR_ADDRESS'}
_kept: list[Any] = []  # what native code holds on to, for as long as the process lives


def join_processes(config: RunConfig) -> None:
    """Joins the other processes of a run, if there are any. Who this one is says `processes:`, else the environment
    (`JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, `JAX_COORDINATOR_ADDRESS`), else what JAX finds: Slurm, Open MPI, a TPU.

    Raises:
        UserError: a part of it is missing or no number, or there are not as many processes as configured.
    """
    if jax.distributed.is_initialized():
        return
    section = config.processes
    given: dict[str, Any] = {key: _given(section, key) for key in _VARIABLES}
    alone = given['count'] == 1
    named = given['index'] is not None or given['coordinator'] is not None or _VARIABLES['count'] in os.environ
    heartbeat = config.faults.heartbeat_seconds
    if not alone and named:
        missing = [key for key, value in given.items() if value is None]
        if missing:
            key = missing[0]
            raise UserError(
                f'processes: this is one of several, but nothing says {_MEANING[key]}\n'
                f'set {_VARIABLES[key]}, or processes.{key}; `pretrax launch local` sets all of it'
            )
        count, index, coordinator = given.values()
        if index >= count:
            raise UserError(f'processes: number {index} of {count}; they are counted from 0')
        _end_well_when_aborted(config.run_dir, index, heartbeat)
        # Without the word, JAX would take the devices that Slurm means for its own kind of processes.
        jax.distributed.initialize(
            coordinator, count, index, heartbeat_timeout_seconds=heartbeat,
            cluster_detection_method='deactivate',
        )  # fmt: skip
    elif not alone and _may_be_found() and _initialize_as_found(heartbeat):
        _end_well_when_aborted(config.run_dir, jax.process_index(), heartbeat)
    count = jax.process_count() if jax.distributed.is_initialized() else 1
    if section.count is not None and section.count != count:
        found = 'this process is alone' if count == 1 else f'there are {count}'
        raise UserError(
            f'processes.count is {section.count}, but {found}\nstart them with: pretrax launch local '
            f'CONFIG --processes {section.count}; or leave processes.count out'
        )


_MEANING = {'count': 'how many there are', 'index': 'which one', 'coordinator': 'where the first one listens'}


def _given(section: Processes, key: str) -> Any:
    """What `processes:` says, else the environment."""
    text, configured = os.environ.get(_VARIABLES[key]), getattr(section, key)
    if text is None or (key != 'count' and configured is not None):
        return configured
    if key == 'coordinator':
        return text
    if not text.isdecimal() or (key == 'count' and int(text) == 0):
        raise UserError(f'{_VARIABLES[key]}={text!r} is no {"number of processes" if key == "count" else "process"}')
    if configured is not None and configured != int(text):
        raise UserError(f'processes.count is {configured}, but {_VARIABLES[key]}={text}\ntake one of the two away')
    return int(text)


def _may_be_found() -> bool:
    """Whether asking JAX is worth it. It would also ask the server of any Kubernetes cluster, often without the right."""
    several = any(os.environ.get(name, '1') != '1' for name in ('SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE'))
    return several or importlib.util.find_spec('libtpu') is not None


def _initialize_as_found(heartbeat: int) -> bool:
    """Whether JAX has found other processes, and joined them."""
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat)
    except ValueError as error:
        if 'defined' not in str(error):  # 'coordinator_address should be defined': it has found none
            raise
        return False
    return True


def _end_well_when_aborted(directory: pathlib.Path, index: int, heartbeat: int) -> None:
    """JAX takes no callback from Python for a lost process (its status cannot be converted), and aborts instead. The
    handler is called by the thread that aborts, after `faulthandler` has written the stacks of all threads.
    """
    path = directory / 'stacks' / f'process-{index}.txt'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stacks = path.open('a')
    except OSError as error:
        raise UserError(
            f'run_dir: {directory} cannot be written: {error.strerror}\ngive another one: run_dir=PATH'
        ) from error
    restore = b'\x1b[?25h' if sys.stdout.isatty() else b''  # the cursor, which a progress bar hides
    text = (
        f'\nprocess {index}: another process of this run is lost (no sign of life for {heartbeat} s, or its connection '
        f'broke), or native code failed, see above\nending with code {TRY_AGAIN}: try again; stacks are in {path}\n'
    ).encode()

    def aborted(number: int) -> None:
        del number
        os.write(2, restore + text)
        os._exit(TRY_AGAIN)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.extend((stacks, handler))
    faulthandler.disable()  # if it is on already: it has to be called before ours
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    faulthandler.enable(stacks)


def ending_at_once[**P, R](train: Callable[P, R]) -> Callable[P, R]:
    """For a function whose first argument is the configuration: an exception in one of several processes ends it.

    Python's ordinary end would wait in JAX's shutdown for the other processes, which wait for this one in a step.
    """

    @functools.wraps(train)
    def ending(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return train(*arguments, **named)
        except BaseException as error:
            if not jax.distributed.is_initialized() or jax.process_count() == 1:
                raise
            config: Any = arguments[0]
            _end(error, config.faults.heartbeat_seconds)

    return ending


def _end(error: BaseException, heartbeat: int) -> NoReturn:
    if _may_come_of_a_loss(error):
        first = str(error).strip().partition('\n')[0][:200]
        print(
            f'{type(error).__name__}: {first}\nperhaps another process is lost: JAX knows in at most {heartbeat} s',
            file=sys.stderr, flush=True,
        )  # fmt: skip
        time.sleep(heartbeat + 5)  # if one is, `aborted` ends the process here
    if isinstance(error, UserError):
        print(error.told(), file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(MISTAKE if isinstance(error, UserError) else 1)


def _may_come_of_a_loss(error: BaseException) -> bool:
    """Whether it may have failed for want of another process: to talk to, or to write a checkpoint with."""
    words = re.search(r'gloo|nccl|connection|coordination|deadline|unavailable', str(error), re.IGNORECASE)
    return isinstance(error, SaveError) or (
        isinstance(error, ValueError | RuntimeError) and words is not None and not isinstance(error, UserError)
    )
