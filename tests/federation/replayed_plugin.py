"""A plugin for islands in tests that train again in other processes: a small model, and batches that are bad once."""

import numpy as np

import runs  # noqa: F401 - registers the model
from pretrax import register
from pretrax.data.batches.synthetic import SyntheticSource
from small import VOCAB


class Bad(SyntheticSource):
    """Batches that no step can learn from."""

    def batch(self, step, rows, batch_rows):
        batch = super().batch(step, rows, batch_rows)
        return batch._replace(mask=batch.mask * np.float32(np.nan)) if 7 <= step <= 9 else batch


@register('data', 'bad-of-replays')
def bad(request):
    return Bad(request, VOCAB, 17)
