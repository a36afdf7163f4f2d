"""The tokens that a tokenizer.json adds to a text: those that its post-processor writes before and after it.

As in `transformers` 5, only the post-processor decides: `add_bos_token` of a tokenizer_config.json changes nothing
beside it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from pretrax.data.tokenizers.bytes_per_token import steps

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
