"""A small run for tests that need a whole one:
documents of made-up words, and a decoder that learns them in a second.
"""

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from bigram import Bigram
from pretrax import register
from pretrax.data.batches.synthetic import SyntheticSource
from pretrax.observe.metrics import read_metrics
from pretrax.observe.progress import Progress

BIGRAM = {'name': 'bigram-of-tests'}  # compiles in a second, for what does not depend on the model


@register('model', 'bigram-of-tests')
def bigram(request):
    return Bigram(request.vocab_size)


@register('model', 'bigram-of-another-table')
def taller_bigram(request):
    """Its table has more rows."""
    model = Bigram(request.vocab_size)
    model.shape = model.shape[0] + 8, model.shape[1]
    return model


class BadBatches(SyntheticSource):
    """Batches that no step can learn from."""

    def batch(self, step, rows, batch_rows):
        batch = super().batch(step, rows, batch_rows)
        return batch._replace(mask=batch.mask * np.float32(np.nan)) if 7 <= step <= 9 else batch


class Quiet(Progress):
    """Keeps messages instead of printing them."""

    def __init__(self):
        super().__init__()
        self.said = []

    def message(self, text):
        self.said.append(text)

    def update(self, metrics):
        pass


class StoppedAt(Quiet):
    """Asks the run to stop, as Ctrl-C does, when the metrics of a step are reported."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def update(self, metrics):
        if metrics['step'] == self.step:
            signal.raise_signal(signal.SIGINT)


class At(Quiet):
    """Does something when the metrics of a step are reported."""

    def __init__(self, step, what):
        super().__init__()
        self.step, self.what = step, what

    def update(self, metrics):
        if metrics['step'] == self.step:
            self.what()


def lines_of(values, key='loss'):
    return [line for line in read_metrics(Path(values['run_dir']) / 'metrics.jsonl') if key in line]


def without_clock(line):
    clocked = ('tokens_per_second', 'mfu', 'mfu_full', 'goodput', 'time')
    return {key: value for key, value in line.items() if key not in clocked and not key.startswith('seconds/')}


def write_yaml(values, path):
    path.write_text(json.dumps(values))
    return str(path)


@pytest.fixture
def documents(tmp_path):
    return write_documents(tmp_path)


def write_documents(tmp_path):
    """60 documents of words drawn from 80, one a line of a .jsonl file."""
    draw = random.Random(0)
    words = [''.join(draw.choices('abcdefgh', k=draw.randint(2, 6))) for _ in range(80)]
    texts = [' '.join(draw.choices(words, k=draw.randint(20, 120))) for _ in range(60)]
    path = tmp_path / 'documents.jsonl'
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    return path


@pytest.fixture
def small(values):
    """A run whose model compiles in a second, for tests that do not depend on the model."""
    return values | {'model': BIGRAM}


@pytest.fixture
def values(documents, tmp_path):
    return small_values(documents, tmp_path)


def small_values(documents, tmp_path):
    """The configuration as a dict, for `config_from_values` or a YAML file (YAML reads JSON)."""
    return {
        'name': 'small',
        'run_dir': str(tmp_path / 'run'),
        'steps': 6,
        'model': {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}, 'z_loss': 1e-3},
        'data': {'text': str(documents), 'vocab_size': 300, 'validation': 0.2},
        'batch': {'tokens': 128, 'sequence_length': 16},
        'optimizer': {'learning_rate': 1e-2, 'weight_decay': 0.1},
        'schedule': {'name': 'linear', 'warmup': 2},
        'mesh': {'r': 2, 'd': 2, 't': 2},
        'precision': {'compute': 'f32'},
        'log': {'every': 1, 'report': False},
        'eval': {'every': 0},
        'sample': {'tokens': 8},
    }
