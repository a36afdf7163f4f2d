"""What the data tests share: a request that keeps what is said, and prepared tokens of a few documents."""

from pathlib import Path

import hypothesis
import pytest

from pretrax.data.batches.source import DataRequest
from pretrax.data.options import TextOptions
from pretrax.data.text import open_text

# The clock of a busy machine says nothing about the code.
hypothesis.settings.register_profile('pretrax', deadline=None)
hypothesis.settings.load_profile('pretrax')


class Said(list[str]):
    """Collects what a component says."""

    @property
    def text(self) -> str:
        return '\n'.join(self)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def open_source(tmp_path: Path, said: Said):
    """open_source(sequence_length=8, seed=0, **options) opens the text component in tmp_path/data."""

    def opened(sequence_length: int = 8, seed: int = 0, **options):
        request = DataRequest(seed, sequence_length, tmp_path / 'data', said.append)
        return open_text(request, options=TextOptions(**options))

    return opened


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    """200 short documents, one a line of a .jsonl file."""
    path = tmp_path / 'novel.jsonl'
    path.write_text(
        ''.join(f'{{"text": "Chapter {n}. It was a day like {n * n} others; ünd so weiter."}}\n' for n in range(200))
    )
    return path
