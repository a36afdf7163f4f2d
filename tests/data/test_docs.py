"""What docs/data.md shows, run."""

import re
from pathlib import Path

import numpy as np

from pretrax.data.source import DataRequest, Source
from pretrax.data.text import TextOptions

DOCS = Path(__file__).parents[2] / 'docs'


def test_the_source_in_the_docs_is_one(tmp_path):
    [code] = re.findall(r'```python\n(.*?)```', (DOCS / 'data.md').read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    source = names['Counting'](DataRequest(seed=3, sequence_length=5, directory=tmp_path, say=print))
    assert isinstance(source, Source)
    whole = source.batch(7, slice(0, 4), 4)
    np.testing.assert_array_equal(whole.targets, (whole.tokens + 1) % 1000)
    np.testing.assert_array_equal(source.batch(7, slice(2, 4), 4).tokens, whole.tokens[2:])


def test_the_options_in_the_docs_are_those_there_are():
    table = re.search(r'\| key \| default .*?\n\n', (DOCS / 'data.md').read_text(), re.DOTALL)
    assert table
    written = {key: default.strip('`') for key, default in re.findall(r'\| `(\w+)` \| (\S*) ?\|', table.group())}
    defaults = {
        name: '' if field.default is None else str(field.default) for name, field in TextOptions.model_fields.items()
    }
    assert written == defaults
