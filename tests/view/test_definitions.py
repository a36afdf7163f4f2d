"""Every key of metrics.jsonl has one definition, which docs/metrics.md repeats."""

import dataclasses
import re
from pathlib import Path

import numpy as np

from pretrax.model.statistics import HeadStatistics, LayerStatistics
from pretrax.train.layer_statistics import of_weights
from pretrax.view.definitions import DEFINITIONS, LAYER_DEFINITIONS, definition_of, definition_of_statistic
from small import LLAMA, transformer

PAGE = Path(__file__).parents[2] / 'docs' / 'metrics.md'


def rows(section='## The file'):
    """{key: (unit, meaning)} of the table in a section of the page, without links."""
    text = re.sub(r'\[([^]]+)\]\([^)]+\)', r'\1', PAGE.read_text())
    part = text.partition(f'{section}\n')[2].partition('\n## ')[0]
    found = re.findall(r'^\| `([^`|]+)` \|([^|]*)\|([^|]*)\|$', part, re.MULTILINE)
    return {key: (unit.strip(), meaning.strip()) for key, unit, meaning in found}


def test_the_documentation_has_every_key_and_its_definition():
    assert rows() == {key: (each.unit, each.meaning) for key, each in DEFINITIONS.items()}


def test_the_documentation_has_every_layer_statistic_and_its_definition():
    assert rows('## Layer statistics') == {key: (each.unit, each.meaning) for key, each in LAYER_DEFINITIONS.items()}


def test_every_statistic_that_is_written_has_a_definition():
    written = {field.name for part in (LayerStatistics, HeadStatistics) for field in dataclasses.fields(part)}
    weights, arch = {'layers': {'q': np.ones((2, 3))}, 'embed': np.ones(4)}, transformer(LLAMA).arch
    written |= {name.partition('/')[0] for name in of_weights(weights, weights, weights, arch)}
    assert written == set(LAYER_DEFINITIONS)
    assert definition_of_statistic('gradient_norm/q').name == 'gradient norm of q'


def test_a_source_of_a_mixture_has_the_definition_of_its_family():
    assert definition_of('val_loss/code').name == 'validation loss of code'
    assert definition_of('val_loss/code').unit == 'nats per token'


def test_an_unknown_key_is_named_after_itself():
    assert definition_of('my_number').name == 'my_number'
    assert definition_of('other/NAME').name == 'other/NAME'
