"""Checkpoints in a bucket, uploaded from host memory by all processes in parallel.

Each attempt to save a step writes below a prefix of its own, `<step>/<attempt>/`, its manifest last. It becomes the
checkpoint of the step when the index names it (storage/index.py). The files are as on a disk, with smaller chunks.
"""

from collections.abc import Callable
from typing import Any

from pretrax.checkpoint.files import File
from pretrax.checkpoint.manifest import MANIFEST, Array, manifest_content, published, steps_in
from pretrax.checkpoint.state_files import HostFiles, copy_to_host
from pretrax.storage import BucketPath
from pretrax.storage.index import Entries, Index

_LARGEST = 64 << 20  # bytes of an object


class Bucket:
    """The prefix `<run_dir>/checkpoints`. Processes call `write` and `finish` together; process 0 calls the rest.

    Every method but `write` raises OSError, or what `confirm` raises.

    Args:
        token: names the attempts of these processes.
        confirm: raises an exception if another process has taken over the run. Called in process 0.
    """

    def __init__(self, path: BucketPath, token: str, confirm: Callable[[], None]):
        self.path = path
        self._token, self._attempts = token, 0
        self._index = Index(path, confirm, _copied)
        self._files = HostFiles()  # what this process will upload

    def begin(self) -> None:
        """Takes over the checkpoints, and removes what earlier processes have left."""
        self._index.claim()
        self._index.remove_unlisted()

    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        return steps_in(self.path)

    def prepare(self, step: int) -> None:
        """Does nothing: an attempt touches no other one."""

    def write(self, step: int, state: Any) -> None:
        """Copies the state of a step off the devices."""
        del step
        self._attempts += 1
        self._files = HostFiles(copy_to_host(state, _LARGEST))

    def finish(self, step: int) -> dict[str, File]:
        """Uploads what this process has copied. Returns the digests."""
        attempt = self.path / self._attempt(step)
        return self._files.write(lambda name, content: (attempt / name).write_bytes(bytes(content)))

    def wait(self, has_ended: Callable[[], bool]) -> None:
        """Does nothing: an upload takes long, and training goes on."""

    def publish(self, step: int, description: dict[str, Any], arrays: dict[str, Array], files: dict[str, File]) -> None:
        """Removes leftovers, writes the manifest, and makes what was written the checkpoint of its step."""
        attempt = self._attempt(step)
        self._index.remove_unlisted({attempt})
        content = manifest_content(step, description, arrays, files)
        (self.path / f'{attempt}/{MANIFEST}').write_bytes(content)
        self._index.change({str(step): attempt})

    def discard(self, step: int) -> None:
        """Leaves what a failed save has uploaded to the next `publish`: the bucket may be out of reach."""

    def remove(self, step: int) -> None:
        """Removes a checkpoint, whose objects were written by earlier attempts only."""
        prefix = self._index.entries.get(str(step)) or str(step)
        self._index.change({str(step): None})
        if prefix == str(step):  # copied from a disk: attempts of this step are below it too
            self._index.remove_unlisted()
        else:
            (self.path / prefix).remove_tree()

    def _attempt(self, step: int) -> str:
        """The prefix of the current attempt. All processes count alike."""
        return f'{step}/{self._token}-{self._attempts}'


def _copied(files: list[str], entries: Entries | None) -> Entries:
    """The checkpoints that the index does not name: they were written by an earlier version, or copied from a disk."""
    return {step: prefix for step, prefix in published(files, entries).items() if step not in (entries or {})}
