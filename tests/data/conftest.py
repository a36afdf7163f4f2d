"""Fixtures of the data tests: collected messages, an opened source, and a small corpus."""

from pathlib import Path

import hypothesis
import pytest

from data_options import data_options
from pretrax.data.batches.source import DataRequest
from pretrax.data.text import open_text

# Timing on a busy machine does not measure the code.
hypothesis.settings.register_profile('pretrax', deadline=None)
hypothesis.settings.load_profile('pretrax')


class Said(list[str]):
    """Collects the lines that a component prints."""

    @property
    def text(self) -> str:
        return '\n'.join(self)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def open_source(tmp_path: Path, said: Said):
    """open_source(sequence_length=8, seed=0, **options) opens the component `text` in tmp_path/data."""

    def opened(sequence_length: int = 8, seed: int = 0, **options):
        request = DataRequest(seed, sequence_length, tmp_path / 'data', said.append)
        return open_text(request, options=data_options(options))

    return opened


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    """A .jsonl file of 200 short documents."""
    path = tmp_path / 'novel.jsonl'
    path.write_text(
        ''.join(f'{{"text": "Chapter {n}. It was a day like {n * n} others; ünd so weiter."}}\n' for n in range(200))
    )
    return path
