"""Fields of config.json that a decoder does without, each with the reason. Any field that is in no list is refused."""

import fnmatch
from typing import Any

_FILES = 'describes the files or the classes, not what they compute'
_IDS = 'ids of special tokens: they matter to generation, and an export writes them again'
_HEADS = 'belongs to other heads than that of a language model'
_GENERATION = 'belongs to generation, and was once a part of config.json'
_OUTPUTS = 'chooses what a call returns'
_KERNELS = 'chooses how the same numbers are computed'
_TRAINING = 'matters only to training in transformers'

REASONS: dict[str, str] = {
    **dict.fromkeys((
        '_commit_hash', '_name_or_path', 'architectures', 'auto_map', 'dtype', 'for_llm_compressor', 'model_type',
        'name_or_path',
        'tokenizer_class', 'torch_dtype', 'transformers_version', 'unsloth_*',
    ), _FILES),
    **dict.fromkeys((
        'bos_token_id', 'decoder_start_token_id', 'eos_token_id', 'pad_token_id', 'prefix', 'sep_token_id',
    ), _IDS),
    **dict.fromkeys((
        'classifier_dropout', 'finetuning_task', 'id2label', 'label2id', 'num_labels', 'predict_special_tokens',
        'problem_type', 'summary_*', 'task_specific_params',
    ), _HEADS),
    **dict.fromkeys((
        'bad_words_ids', 'begin_suppress_tokens', 'diversity_penalty', 'do_sample', 'early_stopping',
        'encoder_no_repeat_ngram_size', 'exponential_decay_length_penalty', 'forced_bos_token_id',
        'forced_eos_token_id', 'length_penalty', 'max_length', 'min_length', 'no_repeat_ngram_size',
        'num_beam_groups', 'num_beams', 'num_return_sequences', 'remove_invalid_values', 'repetition_penalty',
        'suppress_tokens', 'temperature', 'top_k', 'top_p', 'typical_p',
    ), _GENERATION),
    **dict.fromkeys((
        'output_attentions', 'output_hidden_states', 'output_past', 'output_router_logits', 'output_scores',
        'return_dict', 'return_dict_in_generate', 'use_return_dict',
    ), _OUTPUTS),
    **dict.fromkeys((
        '_attn_implementation*', '_flash_attn_2_enabled', 'attn_implementation', 'cache_implementation',
        'chunk_size_feed_forward', 'pretraining_tp', 'tf_legacy_loss', 'torchscript', 'use_bfloat16', 'use_cache',
    ), _KERNELS),
    'initializer_range': _TRAINING,
    'is_decoder': 'says what every model here is',
    'is_llama_config': 'says that a model of another program (nanotron) has the architecture of Llama',
    'n_ctx': 'is the former name of n_positions',
}  # fmt: skip
# Harmless only at these values: another value asks for another model.
AT_THESE_VALUES: dict[str, tuple[Any, ...]] = {
    'add_cross_attention': (False, None),
    'cross_attention_hidden_size': (None,),
    'is_encoder_decoder': (False, None),
    'n_special': (0, None),  # rows of the embedding besides the vocabulary, of GPT-1
    'pruned_heads': ({}, None),
    'rope_interleaved': (False, None),  # SmolLM2; true would rotate neighbors, which transformers does not do
    'tie_encoder_decoder': (False, None),
}  # fmt: skip
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
    return name in DROPOUT_FIELDS or any(fnmatch.fnmatchcase(name, pattern) for pattern in REASONS)
