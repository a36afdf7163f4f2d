"""A small trained tokenizer of each common kind: byte-level, tiktoken's patterns, SentencePiece."""

import functools

import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pretrax.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from pretrax.data.tokenizers.tokenizer_files import byte_letters, bytes_tokenizer, from_tiktoken
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer

TEXTS = [
    'def encode(text):\n    return [ord(letter) for letter in text]\n',
    'the cat and the other cat é漢 \n',
    "I'll say it's 1234 or 56, WON'T I?\r\n\n\n  Then: ünd so weiter 🎉.\n",
] * 20
# The patterns of r50k_base, cl100k_base and o200k_base in tiktoken 0.14, tiktoken_ext/openai_public.py.
PATTERNS = {
    'r50k': r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    'cl100k': (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
        r"""\s*[\r\n]|\s+(?!\S)|\s"""
    ),
    'o200k': '|'.join([
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]),
}  # fmt: skip


@functools.cache
def byte_level() -> Tokenizer:
    return train_tokenizer(TEXTS, 400)


@functools.cache
def encoding(pattern: str) -> tiktoken.Encoding:
    """A tiktoken encoding with the merges of `byte_level()` and one of PATTERNS."""
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocabulary = byte_level().settings['model']['vocab']
    tokens = [name for name in sorted(vocabulary, key=vocabulary.__getitem__) if name != END_OF_TEXT]
    ranks = {bytes(byte_of[letter] for letter in name): rank for rank, name in enumerate(tokens)}
    return tiktoken.Encoding(
        f'trained_{pattern}', pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
    )


@functools.cache
def family(name: str) -> Tokenizer:
    match name:
        case 'byte-level BPE':
            return byte_level()
        case 'byte-level Unigram':
            return train_tokenizer(TEXTS, 400, 'unigram')
        case 'bytes':
            return bytes_tokenizer()
        case 'SentencePiece BPE':
            return _sentencepiece()
    return from_tiktoken(encoding(name))


FAMILIES = ('byte-level BPE', 'byte-level Unigram', 'bytes', 'SentencePiece BPE', *PATTERNS)


def _sentencepiece() -> Tokenizer:
    """Like Llama 2: spaces are letters, unknown characters fall back to bytes, NFKC normalization."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>', fuse_unk=True))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='first', split=True)
    backend.decoder = decoders.Sequence([
        decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0),
    ])  # fmt: skip
    special = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return Tokenizer(backend.to_str().encode(), 'SentencePiece')
