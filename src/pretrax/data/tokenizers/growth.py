"""Bounds how much longer a tokenizer.json can make a text, before any text goes through it.

The steps of a normalizer or a decoder may each replace a letter by many, so nine short steps can turn one letter into
more than memory holds; the library then ends the process. The bound gives each character a weight: at the end 1, and
before a step the least weights with which no replacement adds to the sum. A text of n characters then becomes at most n
times the largest weight.
"""

import base64
from collections.abc import Mapping
from typing import Any

from pretrax.data.tokenizers.bytes_per_token import steps
from pretrax.errors import UserError

LARGEST_GROWTH = 100.0
_MAY_MATCH_NOTHING = set('*?|()^$\\')  # a regular expression without these matches at least a character
_FACTORS = {'ByteLevel': 4.0, 'Metaspace': 2.0, 'BertNormalizer': 3.0, 'WordPiece': 2.0}  # a character becomes at most


def refuse_growth(settings: Mapping[str, Any], name: str) -> None:
    """Raises UserError if a step before or after the model may make a text more than LARGEST_GROWTH times as long."""
    before = [*steps(settings.get('normalizer'), 'normalizers'), *steps(settings.get('pre_tokenizer'), 'pretokenizers')]
    for what, chain in (('normalizer', before), ('decoder', [*steps(settings.get('decoder'), 'decoders')])):
        if (growth := _growth(chain)) > LARGEST_GROWTH:
            raise UserError(
                f'{name}: its {what} may make a text {growth:.3g} times as long\n'
                f'  expected at most {LARGEST_GROWTH:.0f} times: use another tokenizer'
            )


def _growth(chain: list[Mapping[str, Any]]) -> float:
    """The largest weight of a character before the first step."""
    weights, other = dict[str, float](), 1.0  # of the characters that steps name, and of all others
    for step in reversed(chain):
        largest = max(other, *weights.values(), 1.0)
        kind, pattern = step.get('type'), step.get('pattern')
        written = sum(weights.get(letter, other) for letter in step.get('content') or step.get('prepend') or '')
        if kind == 'Replace' and isinstance(pattern, dict) and (text := pattern.get('String')):
            weights |= {letter: max(weights.get(letter, other), written / len(text)) for letter in set(text)}
        elif kind == 'Replace':
            regex = str(pattern.get('Regex', '')) if isinstance(pattern, dict) else str(pattern)
            added = written if not regex or _MAY_MATCH_NOTHING & set(regex) else 0.0
            weights = {letter: max(weight, written) + added for letter, weight in weights.items()}
            other = max(other, written) + added
        elif kind == 'Prepend':
            weights = {letter: weight + written for letter, weight in weights.items()}
            other += written
        else:  # it may turn a character into any other one
            factor = _longest(step) if kind == 'Precompiled' else _FACTORS.get(str(kind), 1.0)
            weights, other = {}, largest * factor
    return max(other, *weights.values(), 1.0)


def _longest(step: Mapping[str, Any]) -> float:
    """Characters of the longest replacement in a map of SentencePiece: a trie, and texts that end with NUL."""
    raw = base64.b64decode(step.get('precompiled_charsmap') or '')
    texts = raw[4 + int.from_bytes(raw[:4], 'little') :].decode(errors='replace')
    return float(max(1, *map(len, texts.split('\0'))))
