"""Finds the runs to watch: those that were given, and those that appear in directories of runs."""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from pretrax.errors import UserError, system_errors
from pretrax.storage import AnyPath, BucketPath
from pretrax.view.live.run import WatchedRun
from pretrax.view.record.run_record import no_such_run, run_directory
from pretrax.view.run_list import find_runs

MOST_RUNS = 64


class Places:
    """The runs and directories of runs that were given.

    Attributes:
        is_remote: whether a directory of runs is in a bucket.

    Raises:
        UserError: a path does not exist or cannot be read.
    """

    def __init__(self, given: Sequence[str]):
        self._given: dict[str, AnyPath] = {}
        self._directories: list[AnyPath] = []
        self._watched: dict[str, WatchedRun] = {}
        self._seen: dict[str, float] = {}  # when each run was first found; 0: at the first look
        self.hidden = 0  # number of runs beyond `MOST_RUNS`, which are not watched
        for text in given:
            path = run_directory(text)
            with system_errors(f'{path} cannot be read'):
                if not path.is_dir():
                    raise UserError(
                        f'{no_such_run(path)}\nto wait for a run, watch the directory in which it will appear'
                    )
                found = find_runs(path)
            if list(found.values()) == [path]:
                self._given |= {str(path): path}
            else:
                self._directories.append(path)
        self.has_directories = bool(self._directories)  # whether runs may appear
        self.is_remote = any(isinstance(path, BucketPath) for path in self._directories)

    def look(self) -> tuple[list[WatchedRun], list[WatchedRun]]:
        """Runs to watch from now on, the newest first, and runs to watch no longer, which make room. Raises OSError."""
        found = {path: name for directory in self._directories for name, path in find_runs(directory).items()}
        for path in self._given.values():
            found[path] = (path.absolute() if isinstance(path, Path) else path).name
        now = time.time() if self._seen else 0.0
        for path in found:
            self._seen.setdefault(str(path), now)
        unknown = [path for path in found if str(path) not in self._watched]
        unknown.sort(key=lambda path: math.inf if str(path) in self._given else self._changed(path), reverse=True)
        room = MOST_RUNS - len(self._watched)
        new, waiting = unknown[:room], unknown[room:]
        dropped = self._less_recent(waiting) if waiting else []
        for run in dropped:
            del self._watched[run.id]
        watched = [self._watch(found[path], path) for path in [*new, *waiting[: len(dropped)]]]
        self.hidden = sum(str(path) not in self._watched for path in found)
        return watched, dropped

    def _less_recent(self, waiting: list[AnyPath]) -> list[WatchedRun]:
        """Runs that have ended and were written before those that wait, one for each of the first of these."""
        ended = [run for run in self._watched.values() if run.state != 'running' and run.id not in self._given]
        pairs = zip(sorted(ended, key=lambda run: self._changed(run.path)), waiting, strict=False)
        return [run for run, path in pairs if self._changed(path) > self._changed(run.path)]

    def _watch(self, name: str, path: AnyPath) -> WatchedRun:
        is_taken = any(run.name == name for run in self._watched.values())
        run = self._watched[str(path)] = WatchedRun(path, str(path) if is_taken else name)
        return run

    def _changed(self, path: AnyPath) -> float:
        """When a run was last written. In a bucket: when it was first seen, or 0 if it was there from the start."""
        for file in (path / 'metrics.jsonl', path) if isinstance(path, Path) else ():
            with contextlib.suppress(OSError):
                return file.stat().st_mtime
        return self._seen.get(str(path), 0.0) if isinstance(path, BucketPath) else 0.0

    def __str__(self) -> str:
        return ', '.join(map(str, [*self._given.values(), *self._directories]))
