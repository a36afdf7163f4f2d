import grain.python as grain
import numpy as np

from pretrax.data.batches import block_cache, windows
from pretrax.data.batches.grain_batches import grain_batches
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import open_stores
from token_arrays import ArrayStore


def test_grain_yields_the_batches_of_the_source_from_any_step(tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache, 'MEMORY', 2000)  # so four threads need different blocks at once
    monkeypatch.setattr(windows, 'BLOCK', 64)
    lengths = np.random.default_rng(0).integers(1, 40, size=300).tolist()
    source = open_stores(ArrayStore(lengths), None, None, DataRequest(0, 8, tmp_path, lambda _: None))
    dataset = grain_batches(source, 16, 60, slice(4, 12))
    assert len(dataset) == 60
    found = iter(dataset[7:].to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)))
    expected = [source.batch(step, slice(4, 12), 16).tokens.tolist() for step in range(60)]
    assert [next(found).tokens.tolist() for _ in range(3)] == expected[7:10]
    state = found.get_state()
    assert [batch.tokens.tolist() for batch in found] == expected[10:]
    found.set_state(state)
    assert next(found).tokens.tolist() == expected[10]
    found.close()
