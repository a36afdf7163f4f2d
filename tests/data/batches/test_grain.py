"""Grain can read a source in threads, as the page on data shows."""

import re
from pathlib import Path

import numpy as np

from pretrax.data.batches import block_cache, windows
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import open_stores
from token_arrays import ArrayStore


def test_grain_yields_the_batches_of_the_source_from_any_step(tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache, 'MEMORY', 2000)  # so four threads need different blocks at once
    monkeypatch.setattr(windows, 'BLOCK', 64)
    lengths = np.random.default_rng(0).integers(1, 40, size=300).tolist()
    source = open_stores(ArrayStore(lengths), None, None, DataRequest(0, 8, tmp_path, lambda _: None))
    page = (Path(__file__).parents[3] / 'docs' / 'data.md').read_text()
    [example] = re.findall(r'```python\n(import grain.*?)```', page, re.DOTALL)
    names = {}
    exec(example.replace('range(10_000)', 'range(60)'), names)
    found = iter(names['processed'](source, lambda batch: batch.tokens.tolist(), 7))
    expected = [source.batch(step, slice(None), 64).tokens.tolist() for step in range(60)]
    assert [next(found) for _ in range(3)] == expected[7:10]
    state = found.get_state()
    assert list(found) == expected[10:]
    found.set_state(state)
    assert next(found) == expected[10]
    found.close()
