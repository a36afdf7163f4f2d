"""The directory of a run: on a disk, or in a bucket with a working directory on the disk.

A run in a bucket writes its checkpoints there, and everything else in its working directory, from which a thread
uploads it. Process 0 has the lock of the directory on the disk, and the lease `lock` in the bucket.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Iterator

import jax

from pretrax.errors import Report, UnavailableError, UserError
from pretrax.run.processes import is_first_process
from pretrax.run.resume import lock_patience, lock_run
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import kind_of_error
from pretrax.storage.lease import FILE, HeldError, Lease, LostError
from pretrax.storage.locate import working_directory
from pretrax.storage.mirror import Mirror
from pretrax.storage.parts import join_copied
from pretrax.system.atomic import write_file
from pretrax.system.locks import DirectoryLock


def local_directory(run_dir: AnyPath) -> pathlib.Path:
    """Where this process writes files: the run directory, or the working directory of a run in a bucket."""
    return working_directory(run_dir, jax.process_index() if jax.distributed.is_initialized() else 0)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """A run directory that this process may write. Files are written in `local`."""

    local: pathlib.Path
    lock: DirectoryLock | None = None  # in process 0
    lease: Lease | None = None  # in process 0 of a run in a bucket
    mirror: Mirror | None = None  # of a run in a bucket

    def check(self) -> None:
        """Raises UserError if another process has taken over the run. Makes no request."""
        if self.lease is not None:
            try:
                self.lease.check_not_lost()
            except LostError as lost:
                raise taken_over(self.local, lost) from None

    def confirm(self) -> None:
        """Asks whether another process has taken over the run. Raises LostError, LockedError or OSError."""
        if self.lock is not None:
            self.lock.confirm()
        if self.lease is not None:
            self.lease.confirm()

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, in a bucket without a copy in `local`. Raises LostError or OSError."""
        if self.mirror is not None:
            self.mirror.write(name, content)
        else:
            write_file(self.local / name, content)

    def upload(self, step: int = 0) -> None:
        """Uploads what has changed, before the checkpoint of a step becomes valid.

        Raises:
            LostError: another process has taken over the run.
            OSError: the bucket cannot be written.
        """
        del step
        if self.mirror is not None:
            self.mirror.upload()


@contextlib.contextmanager
def open_directory(run_dir: AnyPath, lease_seconds: float, report: Report) -> Iterator[RunDirectory]:
    """Locks the run directory, and fetches and uploads that of a bucket. Raises UserError if that is not possible."""
    local = local_directory(run_dir)
    is_new = not local.exists()
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(lock_run(local, report, run_dir)) if is_first_process() else None
        if lock is not None:
            join_copied(local)
        if not isinstance(run_dir, BucketPath):
            try:
                yield RunDirectory(local, lock)
            except UserError:
                # A mistake left only the lock file, and perhaps an empty directory for tokens.
                written = [path for path in local.rglob('*') if not path.is_dir()]
                if is_new and is_first_process() and written == [local / FILE]:
                    shutil.rmtree(local)
                raise
            return
        directory = dataclasses.replace(_open_bucket(run_dir, local, lease_seconds, report, stack), lock=lock)
        try:
            yield directory
        except BaseException as error:
            directory.check()  # a lost lease is the cause of other errors
            _upload_the_rest(directory, run_dir, report)
            raise error
        directory.check()
        try:
            directory.upload()
        except LostError as lost:
            raise taken_over(local, lost) from None
        except OSError as error:
            raise UnavailableError(
                f'run_dir: {run_dir} cannot be written: {error.strerror}\n'
                f'nothing is lost: what is not uploaded is in {local}\n'
                'run the same command again on this machine when the bucket can be reached'
            ) from error


def _open_bucket(
    remote: BucketPath, local: pathlib.Path, seconds: float, report: Report, stack: contextlib.ExitStack
) -> RunDirectory:
    lease = None
    try:
        if is_first_process():
            lease = _held_lease(remote, seconds, report, stack)
        local.mkdir(parents=True, exist_ok=True)
        mirror = Mirror(local, remote, lease, report)
        if lease is not None:
            mirror.fetch(lease)
    except HeldError as held:
        raise UserError(
            f'{held}\nstop that process first, or use another name=; if it no longer runs, its lease expires by itself'
        ) from None
    except LostError as lost:
        raise taken_over(local, lost) from None
    except OSError as error:
        raise kind_of_error(error)(f'run_dir: {remote} cannot be used: {error.strerror} ({error.filename})') from error
    stack.enter_context(mirror.running())
    return RunDirectory(local, lease=lease, mirror=mirror)


def _held_lease(remote: BucketPath, seconds: float, report: Report, stack: contextlib.ExitStack) -> Lease:
    """The lease of a run, until the stack is closed. A restarted process tries for as long as `lock_run`."""
    until = time.monotonic() + lock_patience()
    while True:
        lease = Lease(remote / FILE, seconds, report)
        try:
            stack.enter_context(lease.held())
            return lease
        except HeldError as held:
            if time.monotonic() >= until:
                raise
            report(f'{held}; waiting, since it may be lost')


def _upload_the_rest(directory: RunDirectory, remote: BucketPath, report: Report) -> None:
    """Uploads what an error leaves. The error itself is more important than a failure to do so."""
    try:
        directory.upload()
    except (OSError, LostError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        report(f'WARNING: {remote} does not have all files of this run: {reason}. They are in {directory.local}')


def taken_over(local: pathlib.Path, lost: LostError) -> UserError:
    """The error of a run whose lease was lost."""
    return UserError(
        f'another process has taken over this run: {lost}\n'
        f'this process stops, so that they do not overwrite each other; its files are in {local}'
    )
