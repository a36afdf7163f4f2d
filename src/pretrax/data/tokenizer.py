"""Text <-> token ids: a byte-level BPE trained here, or a given tokenizer.json.

This wraps `tokenizers` so that nothing is added to, cut from or read into the text: no padding, no truncation, no
template, no BPE dropout, and a special token's name inside a document is ordinary text.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pretrax.data.files import nearest
from pretrax.errors import UserError

END_OF_TEXT = '<|endoftext|>'
# What published tokenizers call it, in the order in which they are looked for.
_END_OF_TEXT_NAMES = (END_OF_TEXT, '<|end_of_text|>', '<eos>', '</s>')


class Tokenizer:
    """Token ids of text and back.

    Attributes: vocab_size (largest id + 1), end_of_text (the id that ends every document), content (the bytes of
    tokenizer.json) and sha256 (of those).
    """

    def __init__(self, content: bytes, name: str):
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._backend = _load(content, name)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = _end_of_text(vocabulary, name)
        self._byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone; no end-of-text token is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens show by name."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def byte_length(self, token: int) -> int:
        """How many bytes of text a token stands for."""
        if self._byte_level:  # each character of a byte-level token is one byte, even where it is part of a character
            return len(self._backend.id_to_token(token) or '')
        return len(self.decode([token]).encode())


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with at most vocab_size tokens: <|endoftext|> is 0, then the 256 bytes, then merges.

    Every string of Unicode text has an encoding, and decoding it gives the string back. The result does not depend on
    the order of the texts or the number of cores. Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019 (bytes).
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend.to_str(pretty=True).encode(), 'the trained tokenizer')


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json file. Raises UserError for what cannot end a document or is none."""
    if not path.is_file():
        raise UserError(f'{path}: no such tokenizer.json file\n  {nearest(path)}')
    return Tokenizer(path.read_bytes(), str(path))


def _load(content: bytes, name: str) -> tokenizers.Tokenizer:
    try:
        settings = json.loads(content)
        # Cutting, filling and random merges (BPE dropout) would make the tokens differ from the text.
        settings['truncation'] = settings['padding'] = None
        settings['model'] |= {'dropout': None} if 'dropout' in settings['model'] else {}
        backend = tokenizers.Tokenizer.from_buffer(json.dumps(settings).encode())
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{name}: not a tokenizer.json of the `tokenizers` library\n  {error}') from None
    backend.encode_special_tokens = True
    return backend


def _end_of_text(vocabulary: dict[str, int], name: str) -> int:
    for candidate in _END_OF_TEXT_NAMES:
        if candidate in vocabulary:
            return vocabulary[candidate]
    raise UserError(
        f'{name}: no token that ends a document\n  expected one of {", ".join(_END_OF_TEXT_NAMES)}\n'
        f'  its first tokens: {", ".join(sorted(vocabulary, key=vocabulary.__getitem__)[:8])}'
    )
