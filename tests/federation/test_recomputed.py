"""The rounds of a run equal those that are computed again from the bucket by other code, and damage is found."""

import json

import numpy as np
import pytest

from federation.test_island import values_of
from pretrax import config_from_values, pretrain
from recomputed_federation import Recomputed
from runs import Quiet


def objects_of(bucket):
    return {path.relative_to(bucket).as_posix(): path.read_bytes() for path in bucket.rglob('*') if path.is_file()}


@pytest.mark.parametrize(
    ('encoding', 'section'), [('bf16', {}), ('int8', {'fragments': 2, 'delay': 1}), ('int4', {'keep': 2})]
)
def test_a_federation_computed_again_has_the_same_bits(encoding, section, tmp_path):
    values = values_of(tmp_path, encoding=encoding, **section)
    result = pretrain(config_from_values(values), progress=Quiet())
    again = Recomputed(objects_of(tmp_path / 'bucket'))
    assert again.problems == []
    assert again.batches() == {'a': list(range(12))}
    for name in ('table', 'bias'):
        np.testing.assert_array_equal(again.weights[name], getattr(result.state.weights, name))


def test_what_is_wrong_in_a_bucket_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr('pretrax.federation.cleaning.Cleaner.start', lambda *_: None)  # all differences stay
    pretrain(config_from_values(values_of(tmp_path, keep=1)), progress=Quiet())
    whole = objects_of(tmp_path / 'bucket')
    contribution = json.loads(whole['rounds/2/a.json'])

    def problems(changes, **settings):
        return '\n'.join(Recomputed(whole | changes, **settings).problems)

    def changed(**facts):
        return {'rounds/2/a.json': json.dumps(contribution | facts).encode()}

    assert problems({}) == ''
    assert 'lists another contribution of a' in problems(changed(loss=1.0))
    assert 'a has contributed batches [3] twice' in problems(changed(first_batch=3))
    assert 'round 2: a began at other weights' in problems(changed(anchor=32 * '0'))
    assert 'the momentum in anchor 2 are others' in problems({}, mu=0.8)
    without = {key: content for key, content in whole.items() if not key.startswith('rounds/1/closed')}
    assert 'the closed rounds are [2, 3]' in Recomputed(without).problems
