"""Other readers of YAML find numbers where pretrax has them: YAML 1.1, as PyYAML reads it, takes 3e-4 for text."""

import re
from pathlib import Path

import pytest
import yaml

from config.smallest import VALUES
from pretrax.config import from_values, resolved_yaml

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / 'configs').rglob('*.yaml'), *(ROOT / 'examples').glob('*.yaml'), *(ROOT / 'benchmarks').rglob('*.yaml'),
]  # fmt: skip
BLOCK = re.compile(r'^( *)```yaml[^\n]*\n(.*?)^\1```', re.MULTILINE | re.DOTALL)
EXPONENT = re.compile(r'[-+]?[\d.]+e[-+]?\d+', re.IGNORECASE)


def texts_like_numbers(value):
    if isinstance(value, dict | list):
        return [
            text for one in (value.values() if isinstance(value, dict) else value) for text in texts_like_numbers(one)
        ]
    return [value] if isinstance(value, str) and EXPONENT.fullmatch(value) else []


def test_files_and_pages():
    found = {path.name: texts_like_numbers(yaml.safe_load(path.read_text())) for path in FILES}
    pages = [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]
    for page in pages:
        numbers = [word for _, block in BLOCK.findall(page.read_text()) for word in re.split(r'[\s,\[\]{}]+', block)]
        found[str(page.relative_to(ROOT))] = [
            word
            for word in numbers
            if texts_like_numbers(yaml.safe_load(f'[{word}]') if EXPONENT.fullmatch(word) else [])
        ]
    assert {name: numbers for name, numbers in found.items() if numbers} == {}
    assert len(FILES) > 30


@pytest.mark.parametrize('number', [3e-4, 1e-10, 2.5e-7, 1e-20, 0.1, 1.0])
def test_what_a_run_writes(number):
    config = from_values(VALUES | {'optimizer': {'learning_rate': number, 'eps': 1e-8}})
    read = yaml.safe_load(resolved_yaml(config))
    assert (read['optimizer']['learning_rate'], read['optimizer']['eps']) == (number, 1e-8)
    assert texts_like_numbers(read) == []
