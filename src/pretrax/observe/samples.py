"""`samples.jsonl` of a run: one sample of text per line, in the order of steps and of the configured prompts.

    {"step": 500, "prompt": "def ", "text": "def read(path):\\n    ..."}

`text` begins with the prompt.
"""

import pathlib
from collections.abc import Sequence

from pretrax.errors import Report
from pretrax.observe.step_lines import StepLines

FILE = 'samples.jsonl'


class SampleLog(StepLines):
    """Appends the samples of a run to `samples.jsonl` in its directory."""

    def __init__(self, directory: pathlib.Path, resumed_step: int = 0, say: Report = print):
        super().__init__(directory / FILE, resumed_step, say)

    def write(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Appends the text that continues each prompt."""
        for prompt, text in zip(prompts, texts, strict=True):
            self.append({'step': step, 'prompt': prompt, 'text': text})
