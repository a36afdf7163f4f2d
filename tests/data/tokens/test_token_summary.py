"""Lengths of documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.data.tokens.token_summary import lengths
from token_arrays import encode_documents


@settings(max_examples=12)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_lengths_are_those_of_numpy(tmp_path_factory, sizes):
    identity = TokenizerIdentity(sha256=None, vocab_size=2, end_of_text=None)
    with create(tmp_path_factory.mktemp('x') / 'a', identity, None, {}) as writer:
        writer.append('train', *encode_documents([[1] * size for size in sizes]), n_bytes=None, predicted_bytes=None)
        directory = writer._directory.parent / 'a'
    found = lengths(open_split(directory, 'train'))
    assert (found.shortest, found.longest) == (min(sizes), max(sizes))
    assert found.median == sorted(sizes)[(len(sizes) - 1) // 2]
    assert found.mean == pytest.approx(np.mean(sizes))
    assert [n for *_, n in found.buckets] == [sum(a <= size <= b for size in sizes) for a, b, _ in found.buckets]
    assert sum(n for *_, n in found.buckets) == len(sizes)
