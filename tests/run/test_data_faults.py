"""Data that is lost or damaged, or comes late, while a run trains from it."""

import shutil
import time
from pathlib import Path

import pytest

from data_options import data_options
from pretrax import config_from_values, pretrain, register
from pretrax.checkpoint import steps_in
from pretrax.data.batches import block_cache, windows
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.synthetic import SyntheticSource
from pretrax.data.text import open_text
from pretrax.data.tokens import token_array
from pretrax.errors import UnavailableError, UserError
from pretrax.observe.metrics import read_metrics
from runs import BIGRAM, At, Quiet


def cut(file: Path):
    file.write_bytes(file.read_bytes()[:50])


def flip(file: Path):
    content = bytearray(file.read_bytes())
    for at in range(0, len(content), 64):
        content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    'damage',
    [Path.unlink, *(pytest.param(f, marks=pytest.mark.slow) for f in (cut, flip))],
    ids=['lost', 'cut', 'flipped'],
)
def test_a_source_damaged_while_training_is_named_and_nothing_is_lost(values, monkeypatch, damage, tmp_path):
    # As of a corpus larger than memory: blocks are read all along.
    monkeypatch.setattr(block_cache, 'MEMORY', 4 * 64)
    monkeypatch.setattr(windows, 'BLOCK', 64)
    values |= {'model': BIGRAM, 'checkpoint': {'every': 2}, 'steps': 20, 'schedule': {}}
    request = DataRequest(0, 16, tmp_path / 'prepared', lambda _: None)
    directory = open_text(request, options=data_options(values['data'])).train.tokens.path
    file = directory / 'encoded_tokens' / 'c' / '0'
    whole = file.read_bytes()
    values['data'] = {'tokens': str(directory.parent)}

    with pytest.raises(UserError) as caught:
        pretrain(config_from_values(values), progress=At(5, lambda: damage(file)))
    assert str(file) in str(caught.value)
    run_dir = Path(values['run_dir'])
    last = steps_in(run_dir / 'checkpoints')[-1]
    assert last >= 4

    file.write_bytes(whole)
    result = pretrain(config_from_values(values), progress=Quiet())
    assert int(result.state.step) == 20
    repaired = [line['loss'] for line in read_metrics(run_dir / 'metrics.jsonl')]
    shutil.rmtree(run_dir)
    pretrain(config_from_values(values), progress=Quiet())
    assert repaired == [line['loss'] for line in read_metrics(run_dir / 'metrics.jsonl')]


class LateSource(SyntheticSource):
    reading = 'tokens 0 to 100 of a slow disk'

    def batch(self, step, rows, batch_rows):
        if step == 3:
            time.sleep(0.3)
        return super().batch(step, rows, batch_rows)


@register('data', 'late')
def late(request: DataRequest):
    return LateSource(request, 96, 20)


def test_a_stall_is_reported_with_its_cause(values):
    progress = Quiet()
    values |= {
        'model': BIGRAM, 'data': {'name': 'late'}, 'log': {'every': 1, 'stall_seconds': 0.05},
    }  # fmt: skip
    pretrain(config_from_values(values), progress=progress)
    reported = [line for line in progress.said if line.startswith('batch 3: waited ')]
    assert len(reported) == 2, 'while it waits, and at the end'
    assert all('s for data; the source is reading tokens 0 to 100 of a slow disk' in line for line in reported)


@pytest.mark.slow
def test_a_bucket_of_tokens_that_goes_away_ends_the_run_and_the_next_one_loses_nothing(
    values, monkeypatch, tmp_path, s3
):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '0.2')
    monkeypatch.setattr(token_array, 'PATIENCE', 2)
    monkeypatch.setattr(block_cache, 'MEMORY', 8 * 512)
    monkeypatch.setattr(windows, 'BLOCK', 512)
    values |= {'model': BIGRAM, 'checkpoint': {'every': 2}, 'steps': 12, 'schedule': {}}
    request = DataRequest(0, 16, tmp_path / 'prepared', lambda _: None)
    directory = open_text(request, options=data_options(values['data'])).train.tokens.path.parent
    for file in directory.rglob('*'):
        if file.is_file():
            s3.put(f'tokens/{file.relative_to(directory)}', file.read_bytes())
    straight = values | {'run_dir': str(tmp_path / 'straight'), 'data': {'tokens': str(directory)}}
    pretrain(config_from_values(straight), progress=Quiet())

    values['data'] = {'tokens': f'{s3.url}/tokens'}
    with pytest.raises(UnavailableError, match=f'{s3.url}/tokens/train') as caught:
        pretrain(config_from_values(values), progress=At(5, lambda: s3.fault(times=float('inf'), cut_after=0)))
    assert caught.value.exit_code == 75
    s3.faults.clear()
    assert steps_in(Path(values['run_dir']) / 'checkpoints')[-1] in (4, 6)
    s3.fault(match='encoded_tokens/c', times=1, status=500)
    pretrain(config_from_values(values), progress=Quiet())
    losses, expected = (
        [(line['step'], line['loss']) for line in read_metrics(Path(run['run_dir']) / 'metrics.jsonl')]
        for run in (values, straight)
    )
    assert losses == expected


@pytest.mark.parametrize('begin', [b'\x7fELF\x02\x01\x01\x00', b'\x89PNG\r\n\x1a\n'], ids=['program', 'image'])
def test_a_text_that_is_none_leaves_no_directory(values, tmp_path, begin):
    (tmp_path / 'wrong.txt').write_bytes(begin + bytes(range(256)) * 4)
    values['data'] = {'text': str(tmp_path / 'wrong.txt'), 'vocab_size': 300}
    with pytest.raises(UserError, match='not text'):
        pretrain(config_from_values(values), progress=Quiet())
    assert not Path(values['run_dir']).exists()
