"""Trains a byte-level BPE or Unigram tokenizer on text."""

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pretrax.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from pretrax.system.cache import oldest_first, own_directory, read_entries, remove, write_entries

type ModelName = Literal['bpe', 'unigram']
MODELS: dict[str, ModelName] = {'bpe': 'bpe', 'unigram': 'unigram'}
_MOST_KEPT = 32  # tokenizers
_SHOWN = {'bpe': 'byte-level BPE', 'unigram': 'byte-level Unigram'}


def train_tokenizer(texts: Iterable[str], vocab_size: int, model: ModelName = 'bpe') -> Tokenizer:
    """Trains a byte-level tokenizer with at most `vocab_size` tokens: <|endoftext|> is 0, then bytes and longer tokens.

    Every Unicode string can be encoded, and decoding restores it. A BPE does not depend on the order of the texts or
    the number of cores. Sennrich et al. 2016, arXiv:1508.07909; Kudo 2018, arXiv:1804.10959; Radford et al. 2019
    (bytes).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    empty, kind = (models.BPE, trainers.BpeTrainer) if model == 'bpe' else (models.Unigram, trainers.UnigramTrainer)
    trainer = kind(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    backend = tokenizers.Tokenizer(empty())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend.to_str(pretty=True).encode(), 'the trained tokenizer')


def train_and_report(
    sample: list[str], vocab_size: int, say: Callable[[str], None], model: ModelName = 'bpe'
) -> Tokenizer:
    """Runs `train_tokenizer`, or finds what it returned for the same texts before, and prints a summary."""
    started, key = time.perf_counter(), hashlib.sha256(f'{tokenizers.__version__} {model} {vocab_size}'.encode())
    for text in sample:
        content = text.encode(errors='surrogatepass')
        key.update(len(content).to_bytes(8) + content)
    file = own_directory() / 'trained_tokenizers' / f'{key.hexdigest()}.json'
    if kept := read_entries(file).get('tokenizer'):
        tokenizer, how = Tokenizer(kept.encode(), 'the trained tokenizer'), f'by an earlier run ({file})'
    else:
        tokenizer = train_tokenizer(sample, vocab_size, model)
        how = f'in {time.perf_counter() - started:.1f} s'
        if file.is_absolute():  # otherwise this user has no home
            write_entries(file, {'tokenizer': tokenizer.content.decode()})
            for old, _ in oldest_first(file.parent)[:-_MOST_KEPT]:
                remove(old)
    short = '' if tokenizer.vocab_size == vocab_size else f' (the text does not yield the requested {vocab_size:,})'
    size = f'{sum(map(len, sample)) / 1e6:,.1f} M characters'
    say(f'tokenizer: {_SHOWN[model]} of {tokenizer.vocab_size:,} tokens{short}, trained on {size} {how}')
    return tokenizer
