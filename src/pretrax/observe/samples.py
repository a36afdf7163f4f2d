"""`samples.jsonl` of a run: one sample of text per line, in the order of steps and of the configured prompts.

    {"step": 500, "prompt": "def ", "text": "def read(path):\\n    ..."}

`text` begins with the prompt.
"""

import pathlib
from collections.abc import Sequence

from pretrax.errors import Report
from pretrax.observe.step_lines import StepLines

FILE = 'samples.jsonl'


class SampleLog:
    """Appends the samples of a run. The file is created with the first one.

    Args:
        directory: the run directory.
        resumed_step: the step that training continues from; samples of later steps are removed.
        say: receives messages about removed lines.
    """

    def __init__(self, directory: pathlib.Path, resumed_step: int = 0, say: Report = print):
        self._path, self._say = directory / FILE, say
        self._lines = StepLines(self._path, resumed_step, say) if self._path.exists() else None

    def write(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Appends the text that continues each prompt."""
        self._lines = self._lines or StepLines(self._path, say=self._say)
        for prompt, text in zip(prompts, texts, strict=True):
            self._lines.append({'step': step, 'prompt': prompt, 'text': text})

    def rewind(self, step: int) -> None:
        """Removes the samples of later steps."""
        if self._lines is not None:
            self._lines.rewind(step)

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._lines is not None:
            self._lines.close()
