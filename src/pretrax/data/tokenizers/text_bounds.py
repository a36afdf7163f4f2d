"""Facts in a tokenizer.json that are known before a text is encoded: the tokens around it, and bounds on its size.

The post-processor writes tokens before and after a text. As in `transformers` 5, only it decides: `add_bos_token` of a
tokenizer_config.json changes nothing beside it.

The bytes of text for each token are bounded from the definition of each step, so that a text is known to be too long
before it is encoded: how far normalization can shorten a text, whether text is dropped between words, and whether one
token can stand for a text of any length.

The steps of a normalizer or a decoder may each replace a letter by many, so nine short steps can turn one letter into
more than memory holds; the library then ends the process. The bound gives each character a weight: at the end 1, and
before a step the least weights with which no replacement adds to the sum. A text of n characters then becomes at most n
times the largest weight.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import tokenizers
from tokenizers import pre_tokenizers

from pretrax.errors import UserError

_TEMPLATES = ('TemplateProcessing', 'BertProcessing', 'RobertaProcessing')


class Added(NamedTuple):
    """The ids that a post-processor adds before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def added_tokens(settings: Mapping[str, Any]) -> Added:
    """The tokens that a tokenizer adds to a text. Raises ValueError if the post-processor is malformed."""
    processor = settings.get('post_processor')
    if processor is None:
        return Added((), ())
    # A vocabulary of one word stands for any other: a post-processor knows the ids of its tokens itself.
    model = {'type': 'WordLevel', 'vocab': {'x': 0}, 'unk_token': 'x'}
    probe = tokenizers.Tokenizer.from_buffer(
        json.dumps({'version': '1.0', 'model': model, 'post_processor': processor}).encode()
    )
    encoding = probe.encode('x', add_special_tokens=True)
    at = encoding.special_tokens_mask.index(0)
    return Added(tuple(encoding.ids[:at]), tuple(encoding.ids[at + 1 :]))


def with_begin(content: bytes, begin: Sequence[int], names: Mapping[int, str]) -> bytes:
    """A tokenizer.json that adds these tokens before a text; the same bytes if it does so already."""
    settings = json.loads(content)
    added = added_tokens(settings)
    if added.before == tuple(begin):
        return content
    kept = [step for step in steps(settings.get('post_processor'), 'processors') if step['type'] not in _TEMPLATES]
    kept += [_template(begin, added.after, names)] if begin or added.after else []
    settings['post_processor'] = {'type': 'Sequence', 'processors': kept} if len(kept) > 1 else (*kept, None)[0]
    return json.dumps(settings, ensure_ascii=False, indent=2).encode()


def _template(before: Sequence[int], after: Sequence[int], names: Mapping[int, str]) -> dict[str, Any]:
    def piece(kind: str, name: str, number: int) -> dict[str, Any]:
        return {kind: {'id': name, 'type_id': number}}

    def whole(name: str, number: int) -> list[dict[str, Any]]:
        begin, end = ([piece('SpecialToken', names[token], number) for token in ids] for ids in (before, after))
        return [*begin, piece('Sequence', name, number), *end]

    special = {
        names[token]: {'id': names[token], 'ids': [token], 'tokens': [names[token]]} for token in (*before, *after)
    }
    return {
        'type': 'TemplateProcessing',
        'single': whole('A', 0),
        'pair': whole('A', 0) + whole('B', 1),
        'special_tokens': special,
    }


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
