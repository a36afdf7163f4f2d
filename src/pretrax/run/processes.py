"""Several processes that train one run: the identity of this process, and its end if it or another process fails.

JAX's heartbeats notice a process that was killed, stopped or disconnected. JAX then aborts all other processes, whatever
Python is doing there. This module turns that abort into stacks, an explanation, and exit code 75: try again.
Starting and restarting processes is the task of `pretrax.launch`.
"""

import ctypes
import dataclasses
import faulthandler
import functools
import importlib.util
import os
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
from pretrax.errors import TRY_AGAIN, UserError, first_line
from pretrax.jax_compat import detected_identity
from pretrax.machine.tpu_slices import slice_identity
from pretrax.storage import AnyPath
from pretrax.storage.working_directory import working_directory

_VARIABLES = {'count': 'JAX_NUM_PROCESSES', 'index': 'JAX_PROCESS_ID', 'coordinator': 'JAX_COORDINATOR_ADDRESS'}
_kept: list[Any] = []  # objects that native code uses until the process ends


def join_processes(config: RunConfig) -> None:
    """Joins the other processes of a run, if there are any.

    The identity of this process comes from `processes:`, else from the environment
    (`JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, `JAX_COORDINATOR_ADDRESS`, or GKE's variables for slices
    of TPUs), else from what JAX detects: Slurm, Open MPI, a TPU.

    Raises:
        UserError: a part of the identity is missing or not a number, or the number of processes is not the configured one.
    """
    if jax.distributed.is_initialized():
        return
    section, heartbeat = config.processes, config.faults.heartbeat_seconds
    given = _named(section)
    if given is not None:
        _end_well_when_aborted(config.run_dir, given.index, heartbeat)
        # Otherwise JAX would use the devices that Slurm assigns to its own kind of processes.
        jax.distributed.initialize(
            given.coordinator,
            given.count,
            given.index,
            heartbeat_timeout_seconds=heartbeat,
            cluster_detection_method='deactivate',
        )
    elif not _is_alone(section) and _may_be_detected() and _initialize_as_detected(heartbeat):
        _end_well_when_aborted(config.run_dir, jax.process_index(), heartbeat)
    count = jax.process_count() if jax.distributed.is_initialized() else 1
    if section.count is not None and section.count != count:
        actual = 'this process is alone' if count == 1 else f'there are {count}'
        raise UserError(
            f'processes.count is {section.count}, but {actual}\nstart them with pretrax launch local '
            f'CONFIG --processes {section.count}, or leave out processes.count'
        )


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which of several processes this one is. `coordinator`: HOST:PORT of the first; '' if there is one process."""

    count: int = 1
    index: int = 0
    coordinator: str = ''


def identity(config: RunConfig) -> Identity:
    """The identity that this process has in `join_processes`, without joining. Raises UserError as it does."""
    named = _named(config.processes)
    if named is None and not _is_alone(config.processes) and _may_be_detected():
        coordinator, count, index = detected_identity()
        if coordinator is not None and count is not None and index is not None and count > 1:
            return Identity(count, index, coordinator)
    return named or Identity()


def _is_alone(section: Processes) -> bool:
    return _given(section, 'count') == 1


def _named(section: Processes) -> Identity | None:
    """The identity that the configuration or the environment gives; None: it gives none, or there is one process."""
    given: dict[str, Any] = {key: _given(section, key) for key in _VARIABLES}
    named = given['index'] is not None or given['coordinator'] is not None or _VARIABLES['count'] in os.environ
    if given['count'] == 1:
        return None
    if not named:
        return None if (found := slice_identity()) is None else Identity(*found)
    missing = [key for key, value in given.items() if value is None]
    if missing:
        key = missing[0]
        raise UserError(
            f'processes: this process is one of several, but {_MEANING[key]} is not set\n'
            f'set {_VARIABLES[key]}, or processes.{key}; `pretrax launch local` sets them all'
        )
    if given['index'] >= given['count']:
        raise UserError(f'processes: number {given["index"]} of {given["count"]}; expected 0 to {given["count"] - 1}')
    return Identity(**given)


_MEANING = {
    'count': 'the number of processes',
    'index': 'its number',
    'coordinator': 'the address of the first process',
}


def is_first_process() -> bool:
    """Whether this process is alone, or the first of several: it writes the files of the run."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def _given(section: Processes, key: str) -> Any:
    """The value of `processes:`, else that of the environment."""
    text, configured = os.environ.get(_VARIABLES[key]), getattr(section, key)
    if text is None or (key != 'count' and configured is not None):
        return configured
    if key == 'coordinator':
        return text
    if not text.isdecimal() or (key == 'count' and int(text) == 0):
        expected = 'a positive number of processes' if key == 'count' else 'the number of a process, from 0'
        raise UserError(f'{_VARIABLES[key]}={text!r}: expected {expected}')
    if configured is not None and configured != int(text):
        raise UserError(f'processes.count is {configured}, but {_VARIABLES[key]}={text}\nremove one of the two')
    return int(text)


def _may_be_detected() -> bool:
    """Whether to ask JAX. It would also ask the server of any Kubernetes cluster, often without permission."""
    several = any(os.environ.get(name, '1') != '1' for name in ('SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE'))
    return several or 'JAX_FORCE_TPU_INIT' in os.environ or importlib.util.find_spec('libtpu') is not None


def _initialize_as_detected(heartbeat: int) -> bool:
    """Whether JAX has detected other processes, and joined them."""
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat)
    except ValueError as error:
        if 'defined' not in str(error):  # 'coordinator_address should be defined': it has detected none
            raise
        return False
    return True


def _end_well_when_aborted(run_dir: AnyPath, index: int, heartbeat: int) -> None:
    """Explains JAX's abort after a lost process, and exits with code 75.

    JAX cannot call Python when a process is lost (it cannot convert the status), and aborts instead. The thread that
    aborts calls this handler, after `faulthandler` has written the stacks of all threads.
    """
    directory = working_directory(run_dir, index)
    path = directory / 'stacks' / f'process-{index}.txt'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stacks = path.open('a')
    except OSError as error:
        raise UserError(
            f'run_dir: {directory} cannot be written: {error.strerror}\nuse another directory: run_dir=PATH'
        ) from error
    restore = b'\x1b[?25h' if sys.stdout.isatty() else b''  # shows the cursor, which a progress bar hides
    text = (
        f'\nprocess {index}: another process of this run is lost (no heartbeat for {heartbeat} s, or its connection '
        f'broke), or native code failed, see above\nexiting with code {TRY_AGAIN}: try again; stacks are in {path}\n'
    ).encode()

    def aborted(number: int) -> None:
        del number
        os.write(2, restore + text)
        os._exit(TRY_AGAIN)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.extend((stacks, handler))
    faulthandler.disable()  # it may be on already, and must be called before ours
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    faulthandler.enable(stacks)


def exiting_on_error[**P, R](train: Callable[P, R]) -> Callable[P, R]:
    """Ends one of several processes at once if `train`, whose first argument is the configuration, raises an exception.

    Otherwise Python would wait in JAX's shutdown for the other processes, which wait for this one in a step.
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
    if _may_be_a_lost_process(error):
        notice = f'another process may be lost: JAX notices within {heartbeat} s'
        print(f'{type(error).__name__}: {first_line(error)[:200]}\n{notice}', file=sys.stderr, flush=True)
        time.sleep(heartbeat + 5)  # if one is lost, `aborted` ends the process here
    code = 1
    if isinstance(error, UserError):
        print(error.short_text(), file=sys.stderr)
        code = error.exit_code
    elif isinstance(error, KeyboardInterrupt | SystemExit):  # asked to stop before the first step
        code = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _may_be_a_lost_process(error: BaseException) -> bool:
    """Whether communication with another process, or a checkpoint written together with it, may have failed."""
    words = re.search(r'gloo|nccl|connection|coordination|deadline|unavailable', str(error), re.IGNORECASE)
    return isinstance(error, SaveError) or (
        isinstance(error, ValueError | RuntimeError) and words is not None and not isinstance(error, UserError)
    )
