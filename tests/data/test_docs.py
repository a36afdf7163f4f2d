"""What docs/data.md shows, run."""

import json
import re
from pathlib import Path

import numpy as np
import yaml

from data_options import data_options
from pretrax.data.batches.sequences import check_row_order
from pretrax.data.batches.source import DataRequest, Source
from pretrax.data.options import KINDS

DOCS = Path(__file__).parents[2] / 'docs'


def test_the_source_in_the_docs_is_one(tmp_path):
    blocks = re.findall(r'```python\n(.*?)```', (DOCS / 'data.md').read_text(), re.DOTALL)
    [code] = [block for block in blocks if 'class Counting' in block]
    names = {}
    exec(code, names)
    source = names['Counting'](DataRequest(seed=3, sequence_length=5, directory=tmp_path, say=print))
    assert isinstance(source, Source)
    whole = source.batch(7, slice(0, 4), 4)
    np.testing.assert_array_equal(whole.targets, (whole.tokens + 1) % 1000)
    np.testing.assert_array_equal(source.batch(7, slice(2, 4), 4).tokens, whole.tokens[2:])
    check_row_order(source, 'counting', [(0, 4), (24, 8)])


def test_the_page_explains_every_option():
    """tests/docs/test_reference.py compares the defaults, which the reference has."""
    page = (DOCS / 'data.md').read_text()
    assert not [
        name
        for name in {name for kind in KINDS for name in kind.model_fields}
        if not re.search(rf'`[^`\n]*\b{name}\b', page)
    ]


def test_the_filters_in_the_docs_are_valid():
    page = (DOCS / 'data.md').read_text()
    [options] = re.findall(r'```yaml title="mail.yaml"\n(.*?)```', page, re.DOTALL)
    [rows] = re.findall(r'```json title="mail.jsonl"\n(.*?)```', page, re.DOTALL)
    # strict, as in configurations
    filters = data_options(yaml.safe_load(options)['data'], strict=True).filters
    assert filters is not None
    assert all(one.keeps(json.loads(row), 'mail.jsonl:1') for one in filters for row in rows.splitlines())
