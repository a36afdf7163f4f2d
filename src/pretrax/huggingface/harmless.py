"""Fields of config.json that a decoder does without, each with the reason (harmless.yaml). Others are refused."""

import fnmatch
from pathlib import Path
from typing import Any

from pretrax.tables import read_table

_HARMLESS = [name for names in read_table(Path(__file__).with_suffix('.yaml')).values() for name in names.split()]
# Harmless only at these values: another value asks for another model.
AT_THESE_VALUES: dict[str, tuple[Any, ...]] = {
    'add_cross_attention': (False, None),
    'cross_attention_hidden_size': (None,),
    'is_encoder_decoder': (False, None),
    'n_special': (0, None),  # rows of the embedding besides the vocabulary, of GPT-1
    'pruned_heads': ({}, None),
    'rope_interleaved': (False, None),  # SmolLM2; true would rotate neighbors, which transformers does not do
    'tie_encoder_decoder': (False, None),
}
# Dropout and noise in training in transformers. An import does not apply them, and prints this.
DROPOUT_FIELDS = (
    'attention_dropout',
    'attn_pdrop',
    'dropout',
    'embd_pdrop',
    'hidden_dropout',
    'resid_pdrop',
    'router_jitter_noise',
)
_ATTENTION = {'attention_dropout': ('attention.dropout',)}
_RESIDUAL = {'resid_pdrop': ('block.dropout',)}
_EMBEDDING = {'embd_pdrop': ('embedding.dropout',)}
_OF_CLASS: dict[str, dict[str, tuple[str, ...]]] = {
    'gpt2': {'attn_pdrop': ('attention.dropout',)} | _RESIDUAL | _EMBEDDING,
    'gpt_neox': _ATTENTION | {'hidden_dropout': ('block.dropout', 'embedding.dropout')},
    'phi': _ATTENTION | _RESIDUAL | _EMBEDDING,
    'phi3': _ATTENTION | _RESIDUAL,
}


def dropout_options(model_type: str) -> dict[str, tuple[str, ...]]:
    """The options for each dropout field of a class. StableLM's hidden_dropout has none:
    it drops only the feed-forward.
    """
    return _OF_CLASS.get(model_type, _ATTENTION)


def is_harmless(name: str, value: Any) -> bool:
    """Whether a model that leaves this field out computes the same."""
    if name in AT_THESE_VALUES:
        return any(type(value) is type(one) and value == one for one in AT_THESE_VALUES[name])
    return name in DROPOUT_FIELDS or any(fnmatch.fnmatchcase(name, pattern) for pattern in _HARMLESS)
