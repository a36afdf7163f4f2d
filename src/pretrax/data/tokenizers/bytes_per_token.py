"""An upper bound on the bytes of text for each token, so that a text is known to be too long before it is encoded.

Each step of a tokenizer is bounded from its definition in tokenizer.json: how far normalization can shorten a text,
whether text is dropped between words, and whether one token can stand for a text of any length.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tokenizers import pre_tokenizers

_KEEPS_TEXT = ('ByteLevel', 'Metaspace', 'Digits', 'Split', 'Punctuation', 'UnicodeScripts')
_MOST_BYTES_OF_A_CHARACTER = 4
# The most bytes of a text for each byte of its normal form, by the characters of Unicode; a test derives them.
_SHRINKAGE = {'NFC': Fraction(7, 2), 'NFD': Fraction(3), 'NFKC': Fraction(4), 'NFKD': Fraction(4)}


def most_bytes_per_token(settings: Mapping[str, Any]) -> int | None:
    """The most bytes of text, in UTF-8, for each token.

    Returns:
        The bound; None if a text of any length may become a single token or none.
    """
    model, added = settings['model'], settings.get('added_tokens') or ()
    normalizers = list(steps(settings.get('normalizer'), 'normalizers'))
    before = list(steps(settings.get('pre_tokenizer'), 'pretokenizers'))
    kinds = {step['type'] for step in (*normalizers, *before)}
    if any(token.get('lstrip') or token.get('rstrip') for token in added):  # such a token takes the spaces beside it
        return None
    if any(step['type'] not in _KEEPS_TEXT or step.get('behavior') == 'Removed' for step in before):
        return None
    names = _names(model)
    is_byte_level = 'ByteLevel' in kinds
    longest = max((len(name) if is_byte_level else len(name.encode()) for name in names), default=0)
    if not _knows_every_byte(model, names, is_byte_level):
        if model.get('type') == 'Unigram' or model.get('fuse_unk') or model.get('unk_token') is None:
            return None
        longest = max(longest, _MOST_BYTES_OF_A_CHARACTER)  # one token for each unknown character
    longest = max([longest, *(len(token['content'].encode()) for token in added)])
    shrunk = Fraction(1)
    for step in normalizers:
        factor = _shrinkage(step)
        if factor is None:
            return None
        shrunk *= factor
    return -int(-longest * shrunk // 1)


def steps(step: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a part of a tokenizer.json, which may be a sequence of sequences, or None."""
    if step is not None and step['type'] != 'Sequence':
        yield step
    elif step is not None:
        for inner in step[key]:
            yield from steps(inner, key)


def _names(model: Mapping[str, Any]) -> Sequence[str]:
    vocabulary = model.get('vocab') or ()
    return [name for name, _ in vocabulary] if isinstance(vocabulary, list) else list(vocabulary)


def _knows_every_byte(model: Mapping[str, Any], names: Sequence[str], is_byte_level: bool) -> bool:
    """Whether no text is unknown to the model."""
    if model.get('type') not in ('BPE', 'Unigram'):
        return False
    if is_byte_level:
        return set(pre_tokenizers.ByteLevel.alphabet()) <= set(names)
    return bool(model.get('byte_fallback')) and {f'<0x{byte:02X}>' for byte in range(256)} <= set(names)


def _shrinkage(normalizer: Mapping[str, Any]) -> Fraction | None:
    """The most bytes that become one byte; None if there is no bound."""
    match normalizer:
        case {'type': 'Prepend' | 'ByteLevel'}:
            return Fraction(1)
        case {'type': 'NFC' | 'NFD' | 'NFKC' | 'NFKD' as form}:
            return _SHRINKAGE[form]
        case {'type': 'Lowercase'}:
            return Fraction(3)  # the Kelvin sign becomes k
        case {'type': 'Replace', 'pattern': {'String': str(old)}, 'content': str(new)} if new:
            return max(Fraction(1), Fraction(len(old.encode()), len(new.encode())))
    return None
