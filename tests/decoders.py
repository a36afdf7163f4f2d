"""Architectures for tests of formulas: a small GPT without padding, and changes of it."""

from typing import Any

from pretrax.model.architecture import Architecture, resolve
from pretrax.model.choices import TransformerOptions
from pretrax.model.option_names import RENAMED, nest


def decoder_options(**options: Any) -> TransformerOptions:
    """Options of the decoder, with the names of pretrax 0.1, which are keyword arguments."""
    return TransformerOptions(**nest(options))


def gpt(**changes: Any) -> Architecture:
    """4 layers of 4 heads, width 64, feed-forward 256 without a gate, 1000 tokens; `changes` have the names of 0.1."""
    options = decoder_options(family='gpt2', n_layers=4, d_model=64, n_heads=4)
    vocab_size = changes.get('vocab_size', 1000)
    changes = {'vocab_size': vocab_size, 'padded_vocab_size': vocab_size} | changes
    arch = resolve(options, vocab_size=1000, sequence_length=128)
    return arch.replace({RENAMED.get(name, name): value for name, value in changes.items()})
