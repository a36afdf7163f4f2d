"""A file with one JSON object per line, each of a step, that a run appends to: `metrics.jsonl` and files like it.

A run that continues from a checkpoint trains the steps after it again. Their lines are removed first, so that no step
is in the file twice.
"""

import io
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pretrax.errors import Report
from pretrax.system.atomic import new_file
from pretrax.system.line_files import parse_lines, read_pieces


class StepLines:
    """Appends to a file, which the first line creates with its directories. Only one process of a run may open it.

    Args:
        resumed_step: the step that training continues from. Lines of later steps are removed, and an incomplete last
            line.
        say: receives a message for removed lines, and if the file cannot be written.
        is_record: whether a JSON object with an integer 'step' belongs there; other lines are removed.
    """

    def __init__(
        self,
        path: pathlib.Path,
        resumed_step: int = 0,
        say: Report = print,
        is_record: Callable[[dict[str, Any]], bool] = lambda record: True,
    ):
        self._path, self._say, self._is_record = path, say, is_record
        self._unwritten = b''  # lines that did not fit on the disk
        self._begun = b''  # the part of the first of them that did
        self._rewound: int | None = None  # lines of later steps are still to be removed
        self._reported = 0  # bytes that waited when this was last reported
        self._file: io.FileIO | None = None
        if path.exists():
            self._keep_up_to(resumed_step)
            self._open()

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open('ab', buffering=0)  # a line is with the operating system when `append` returns

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a line. If the disk is full or the directory gone, it stays in memory and training continues.

        This is reported at first, and again each time when twice as many bytes wait.
        """
        self._unwritten += json.dumps(record, allow_nan=False).encode() + b'\n'
        self._write()

    def _write(self) -> None:
        try:
            if self._rewound is not None:
                self._keep_up_to(self._rewound)
                self._rewound = None
                self._open()
            if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
                self._say(
                    f'WARNING: {self._path} was removed while training; it is created again, with the lines from now on'
                )
                self._open()
            while self._unwritten:  # a full disk may take a part before it refuses
                if self._file is None:
                    self._open()
                assert self._file is not None
                n_bytes = self._file.write(self._unwritten)
                self._begun = (self._begun + self._unwritten[:n_bytes]).rpartition(b'\n')[2]
                self._unwritten = self._unwritten[n_bytes:]
        except OSError as error:
            if len(self._unwritten) >= 2 * self._reported:
                self._reported = len(self._unwritten)
                self._say(
                    f'WARNING: cannot write {self._path}: {error.strerror}. Training continues; '
                    f'{len(self._unwritten):,} bytes of {self._path.stem} wait in memory'
                )
        else:
            if self._reported:
                self._say(f'{self._path} is written again')
            self._reported = 0

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps, which will be trained again; later if the disk cannot be written now."""
        waiting = (self._begun + self._unwritten).splitlines(keepends=True)
        self._unwritten = b''.join(line for line in waiting if json.loads(line)['step'] <= step)
        self._begun = b''
        if self._file is not None:
            self._rewound = step
            self._write()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        lost, self._unwritten = len(self._unwritten), b''
        if self._file is not None:
            self._file.close()
        if lost:
            self._say(f'WARNING: {lost:,} bytes of {self._path.stem} could not be written to {self._path}')

    def _keep_up_to(self, last_step: int) -> None:
        """Keeps the complete lines up to a step. A new file replaces the old one, so that a kill loses nothing."""
        later = torn = 0
        path = self._path
        with new_file(path, sync=True) as kept, path.open('rb') as file:
            for _, _, content in read_pieces(file):
                steps = [self._step(record) for record in parse_lines(content)]
                if all(step is not None and step <= last_step for step in steps) and content.endswith(b'\n'):
                    kept.write(content)
                    continue
                for text, step in zip(io.BytesIO(content).readlines(), steps, strict=True):
                    if step is not None and step <= last_step:
                        kept.write(text.rstrip(b'\r\n') + b'\n')
                    elif step is not None:
                        later += 1
                    elif text.strip():
                        torn += 1
        if torn:
            self._say(f'{path.name}: removed {_lines(torn)} left incomplete when the run was stopped')
        if later:
            self._say(f'{path.name}: removed {_lines(later)} after step {last_step}; those steps are trained again')

    def _step(self, record: Any) -> int | None:
        """The step of a line; None: the line does not belong to the file."""
        is_ours = isinstance(record, dict) and type(record.get('step')) is int and self._is_record(record)
        return record['step'] if is_ours else None


def _lines(count: int) -> str:
    return '1 line' if count == 1 else f'{count} lines'


SAMPLES = 'samples.jsonl'


class SampleLog(StepLines):
    """Appends the samples of a run to `samples.jsonl` in its directory, by step and in the order of the prompts.

    {"step": 500, "prompt": "def ", "text": "def read(path):\\n    ..."}; `text` begins with the prompt.
    """

    def __init__(self, directory: pathlib.Path, resumed_step: int = 0, say: Report = print):
        super().__init__(directory / SAMPLES, resumed_step, say)

    def write(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Appends the text that continues each prompt."""
        for prompt, text in zip(prompts, texts, strict=True):
            self.append({'step': step, 'prompt': prompt, 'text': text})
