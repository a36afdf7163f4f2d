"""Several processes that train one run: the identity of this process, and its end if it or another process fails.

JAX's heartbeats notice a process that was killed, stopped or disconnected. JAX then aborts all other processes,
whatever Python is doing there. This module turns that abort into stacks, an explanation, and exit code 75: try again.
Starting and restarting processes is the task of `pretrax.launch`.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax

from pretrax.checkpoint import SaveError
from pretrax.config import Processes
from pretrax.errors import TRY_AGAIN, UnavailableError, UserError, first_line, warn
from pretrax.jax_compat import detected_identity, has_started
from pretrax.run.variables import check_other_launchers, check_variables
from pretrax.storage import AnyPath
from pretrax.storage.locate import working_directory
from pretrax.system.launchers import mpi_identity, slice_identity
from pretrax.system.process_hosts import described, expected_hosts
from pretrax.system.rendezvous import AbsentError, Rendezvous
from pretrax.system.standby import wait_until_needed

_VARIABLES = {'count': 'JAX_NUM_PROCESSES', 'index': 'JAX_PROCESS_ID', 'coordinator': 'JAX_COORDINATOR_ADDRESS'}
_ARRIVAL = 300.0  # seconds for the slowest process to come
_kept: list[Any] = []  # objects that native code uses until the process ends


def join_processes(section: Processes, run_dir: AnyPath, heartbeat_seconds: int) -> None:
    """Checks variables of the environment, and joins the other processes of a run, if there are any.

    A standby first waits until it is needed, and receives its variables.
    A process is lost after `heartbeat_seconds` without a sign of life; the others then write their stacks in the run
    directory.

    Raises:
        UserError: the identity is incomplete or not the configured one, JAX is in use, or a variable is refused.
        UnavailableError: another process did not come.
    """
    if jax.distributed.is_initialized():
        return
    wait_until_needed(uses_devices=has_started())
    check_variables()
    this = identity(section)
    if this.count > 1:
        hosts = expected_hosts(this.count, this.index, this.coordinator)
        _end_well_when_aborted(run_dir, this.index, heartbeat_seconds, hosts)
        if has_started():
            raise UserError(
                f'this is process {this.index} of {this.count}, but it has used JAX before it could join the others\n'
                'in a program, call pretrain before other functions of JAX; or set processes.count=1 to train alone'
            )
        _meet(this, hosts)
        jax.distributed.initialize(
            this.coordinator,
            this.count,
            this.index,
            # Otherwise JAX would use the devices that Slurm assigns to its own kind of processes.
            None if this.device is None or 'JAX_LOCAL_DEVICE_IDS' in os.environ else [this.device],
            heartbeat_timeout_seconds=heartbeat_seconds,
            cluster_detection_method='deactivate',
        )
    if section.count is not None and section.count != this.count:
        actual = 'this process is alone' if this.count == 1 else f'there are {this.count}'
        raise UserError(
            f'processes.count is {section.count}, but {actual}\nstart them with pretrax launch local '
            f'CONFIG --processes {section.count}, or leave out processes.count'
        )


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which of several processes this one is.

    `coordinator`: HOST:PORT of the first; '' if there is one process. `device`: the only one that this process uses;
    None: all.
    """

    count: int = 1
    index: int = 0
    coordinator: str = ''
    device: int | None = None


def identity(section: Processes) -> Identity:
    """The identity of this process, from the first of these that has one.

    `processes:` and `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, `JAX_COORDINATOR_ADDRESS`; GKE's variables for slices of
    TPUs; Open MPI; what JAX detects, which is Slurm and TPU VMs. Only the address may be given, for processes that
    others number.

    Raises:
        UserError: a part is missing or not a number.
    """
    given: dict[str, Any] = {key: _given(section, key) for key in _VARIABLES}
    if given['count'] == 1:
        return Identity()
    if given['index'] is None and _VARIABLES['count'] not in os.environ:
        found = slice_identity() or mpi_identity(given['coordinator']) or _detected()
        if found is not None:
            count, index, address, *device = found
            check_other_launchers(count)
            return Identity(count, index, given['coordinator'] or address, *device)
        check_other_launchers()
        if given['coordinator'] is None:
            return Identity()
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


def _meet(this: Identity, hosts: Sequence[str]) -> None:
    """Waits until all processes are there. JAX would abort those that wait, and name none.

    Raises:
        UnavailableError: in all processes that are there: one did not come. The message names it.
    """
    calls = Rendezvous(
        this.coordinator, this.index, this.count, _ARRIVAL, dict(enumerate(hosts)), needs_all=True, say=warn
    )
    try:
        calls.assemble()
        lost = calls.share(calls.problem(), _ARRIVAL + 60)
        if not lost and this.index:
            calls.wait_for_port()
    except AbsentError as error:
        lost = str(error)
    finally:
        calls.close()
    if lost:
        raise UnavailableError(
            f'process {this.index} of {this.count}: {lost}\n'
            'look at its output: was it started, and can it reach the others? pretrax doctor, started in the same '
            'way, finds out'
        )


def _detected() -> tuple[int, int, str, int | None] | None:
    try:
        return detected_identity()
    except OSError as error:
        print(
            f'WARNING: this machine has TPUs, but no metadata server answers ({first_line(error)[:100]}): this '
            'process trains '
            f'alone. If it is one of several, set {", ".join(_VARIABLES.values())}',
            file=sys.stderr,
        )
        return None


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


def _end_well_when_aborted(run_dir: AnyPath, index: int, heartbeat: int, hosts: Sequence[str]) -> None:
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
    where = f'the machines: {described(range(len(hosts)), dict(enumerate(hosts)))}\n' if hosts else ''
    text = (
        f'\nprocess {index}: another process of this run is lost (no heartbeat for {heartbeat} s, or its connection '
        f'broke), or native code failed; above, JAX says which\n'
        f'{where}exiting with code {TRY_AGAIN}: try again; stacks are in {path}\n'
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


@contextlib.contextmanager
def exiting_on_error(heartbeat_seconds: int) -> Iterator[None]:
    """Ends one of several processes at once if the block raises an exception.

    Otherwise Python would wait in JAX's shutdown for the other processes, which wait for this one in a step.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or jax.process_count() == 1:
            raise
        _end(error, heartbeat_seconds)


def _end(error: BaseException, heartbeat: int) -> NoReturn:
    if may_be_a_lost_process(error):
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


def may_be_a_lost_process(error: BaseException) -> bool:
    """Whether communication with another process, or a checkpoint written together with it, may have failed."""
    if jax.process_count() == 1:
        return False
    words = re.search(r'gloo|nccl|connection|coordination|deadline|unavailable', str(error), re.IGNORECASE)
    return isinstance(error, SaveError) or (
        isinstance(error, ValueError | RuntimeError) and words is not None and not isinstance(error, UserError)
    )
