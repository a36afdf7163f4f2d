from types import SimpleNamespace

import numpy as np
import pytest

from pretrax.config.registry import build, options_model
from pretrax.data.batches.source import DataRequest, Source
from pretrax.data.batches.synthetic import open_synthetic
from pretrax.errors import UserError


def opened(seed=0, **options):
    return open_synthetic(DataRequest(seed, 64, None, lambda _: None), **options)  # type: ignore[arg-type]


def test_rows_depend_only_on_the_seed_and_their_number():
    source = opened(vocab_size=1000, document_length=20)
    assert isinstance(source, Source)
    whole = source.batch(3, slice(None), 8)
    part = source.batch(3, slice(2, 5), 8)
    for a, b in zip(whole, part, strict=True):
        assert a[2:5].tolist() == b.tolist()
    assert source.batch(24 + 3, slice(None), 1).tokens[0].tolist() == whole.tokens[3].tolist()
    assert opened(seed=1, vocab_size=1000).batch(3, slice(None), 8).tokens.tolist() != whole.tokens.tolist()
    assert source.validation(3, slice(None), 8).tokens.tolist() != whole.tokens.tolist()


def test_document_lengths_and_token_frequencies():
    source = opened(vocab_size=1000, document_length=20)
    batch = source.batch(0, slice(None), 2000)
    assert (batch.segments.max(), source.documents_per_row) == (4, 4)
    assert (batch.mask == 0).sum() == 2000 * 3, 'the first token of a document cannot be predicted'
    assert batch.tokens.min() == 0
    assert batch.tokens.max() == 999
    frequency = np.bincount(batch.tokens.ravel(), minlength=1000) / batch.tokens.size
    # Token k - 1 has the share log(1 + 1/k) / log(1001).
    np.testing.assert_allclose(frequency[:5], np.log(1 + 1 / np.arange(1, 6)) / np.log(1001), rtol=0.05)
    assert opened(vocab_size=10).documents_per_row == 1


def test_a_vocabulary_of_one_token_is_refused():
    with pytest.raises(UserError, match='vocab_size=1'):
        opened(vocab_size=1)


def test_a_configuration_selects_it():
    options = options_model('data', 'synthetic').model_validate({'vocab_size': 50})
    section = SimpleNamespace(name='synthetic', options=options)
    source = build('data', section, DataRequest(0, 8, None, lambda _: None))  # type: ignore[arg-type]
    assert source.batch(0, slice(None), 2).tokens.shape == (2, 8)
