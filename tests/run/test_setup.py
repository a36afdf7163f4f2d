"""Preparing a run: a model or a data source that leaves an optional member out works."""

import pytest

from bigram import Bigram
from decoders import decoder_options
from pretrax import config_from_values, prepare, pretrain, register
from pretrax.data.batches.source import HostBatch, Source
from pretrax.errors import UserError
from pretrax.model.architecture import resolve
from pretrax.model.option_names import nest
from pretrax.model.plan import ExecutionPlan
from runs import Quiet
from small import LLAMA, VOCAB, random_batch


@register('model', 'bigram-with-sizes')
class WithSizes(Bigram):
    """It has the sizes of a decoder, and neither a plan nor FLOPs of its own."""

    def __init__(self, request):
        super().__init__(request.vocab_size)
        self.arch = resolve(decoder_options(**LLAMA), request.vocab_size, request.sequence_length)


@register('model', 'bigram-in-bf16')
class InBf16(Bigram):
    """Its gradients are sent over r in the dtype that the run asks for."""

    def __init__(self, request):
        super().__init__(request.vocab_size)
        self.plan = ExecutionPlan(reduction=request.reduction)


@register('data', 'batches-alone')
class BatchesAlone(Source):
    """A vocabulary and batches: no tokenizer, no held-out text, no fingerprint."""

    vocab_size = VOCAB

    def __init__(self, request):
        del request

    def batch(self, step, rows, batch_rows):
        whole = random_batch(batch_rows, seed=step)
        return HostBatch(*(getattr(whole, name)[rows] for name in HostBatch._fields))


REQUESTS = []


@register('data', 'with-its-request')
class WithItsRequest(BatchesAlone):
    def __init__(self, request):
        REQUESTS.append(request)


@pytest.fixture
def plain(values):
    return values | {
        'model': {'name': 'bigram-of-tests'},
        'data': {'name': 'batches-alone'},
        'steps': 2,
        'schedule': {},
        'eval': {'every': 1},
    }


def topics(run):
    return {line.topic: line.text for line in run.startup}


def test_a_model_and_a_source_without_optional_members_train_and_resume(plain):
    progress = Quiet()
    first = pretrain(config_from_values(plain | {'steps': 1}), progress=progress)
    assert 'memory' not in topics(first.run)
    assert topics(first.run)['mfu'] == 'not measured: the FLOPs of this model are not known'
    assert 'eval: the data has no held-out part, so there is no validation loss' in progress.said
    second = pretrain(config_from_values(plain), progress=Quiet())
    assert int(second.state.step) == 2
    assert 'bits_per_byte' not in second.metrics
    assert second.metrics['mfu'] is None


def test_the_memory_of_a_model_with_sizes_alone_is_estimated(plain):
    run = prepare(config_from_values(plain | {'model': {'name': 'bigram-with-sizes'}}), lambda text: None)
    assert topics(run)['memory'].startswith('about ')
    assert 'TFLOP/s per device' in topics(run)['mfu']


def test_a_model_that_is_none_is_refused(plain):
    register('model', 'no-model')(lambda request: object())
    with pytest.raises(UserError, match='object is not a model of pretrax\nderive it from Model'):
        prepare(config_from_values(plain | {'model': {'name': 'no-model'}}), lambda text: None)


def test_gradients_in_bf16_are_reported_or_refused(plain):
    narrow = plain | {
        'model': nest(LLAMA),
        'data': {'name': 'synthetic', 'vocab_size': 32},
        'precision': {'reduction': 'bf16'},
    }
    for mesh, said in (
        ({'r': 2, 'd': 4}, '; sums over r in bf16, all others in f32'),
        ({'d': 8}, '; NOT over r in bf16, because mesh.r = 1'),
    ):
        run = prepare(config_from_values(narrow | {'mesh': mesh}), lambda text: None)
        assert topics(run)['gradients'].endswith(said)
    prepare(config_from_values(narrow | {'model': {'name': 'bigram-in-bf16'}}), lambda text: None)
    with pytest.raises(
        UserError, match=r'model.name = bigram-of-tests sums its gradients in f32\nleave out precision.red'
    ):
        prepare(config_from_values(narrow | {'model': {'name': 'bigram-of-tests'}}), lambda text: None)
    with pytest.raises(UserError, match=r"precision.reduction is 'f16'; expected 'f32', 'bf16' or 'bf16_r_d'"):
        config_from_values(plain | {'precision': {'reduction': 'f16'}})


def test_the_data_of_an_island_are_opened_for_all_islands(plain, tmp_path):
    batch = {'tokens': [[0, 128], [3, 256]], 'sequence_length': 16}
    more = {'data': {'name': 'with-its-request'}, 'steps': 10, 'batch': batch}
    for section, islands in (({}, 1), ({'islands': 5}, 1), ({'islands': 5, 'bucket': str(tmp_path / 'shared')}, 5)):
        run = prepare(config_from_values(plain | more | {'federation': section}), print)
        request = REQUESTS[-1]
        assert [request.rows_before(step) for step in (0, 1, 3, 5)] == [0, 8 * islands, 24 * islands, 56 * islands]
        assert request.batch_rows == (3 * 8 + 7 * 16) / 10
    island = run.with_share(3)
    assert {each.source for each in (island, *island.smaller)} == {island.source}
    assert (island.source.source, island.source.index, island.source.count) == (run.source, 3, 5)
