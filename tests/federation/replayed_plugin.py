"""A plugin for islands in tests that train again in other processes: a small model, and batches that are bad once."""

from pretrax import register
from runs import BadBatches  # which also registers the model
from small import VOCAB


@register('data', 'bad-of-replays')
def bad(request):
    return BadBatches(request, VOCAB, 17)
