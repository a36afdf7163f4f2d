"""Text from a model and a tokenizer."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pretrax.errors import UserError
from pretrax.infer.answers import encode_prompt
from pretrax.infer.generate import generate
from pretrax.infer.text import text_after
from pretrax.model.base import Model

if TYPE_CHECKING:
    from pretrax.config.schema import Sample


def check_can_sample(model: Model, source: Any, choices: 'Sample | None' = None) -> None:
    """Raises UserError if a model or its data cannot write text after the prompts of `choices`; None: after any."""
    where, fix = ('', '') if choices is None else ('sample: ', 'set sample.every=0')
    if not model.can_generate:
        fix = fix or 'define logits in the class of the model'
        raise UserError(f'{where}{type(model).__name__} cannot generate text: it has no logits(weights, tokens)\n{fix}')
    if getattr(source, 'tokenizer', None) is None:
        fix = fix or (
            'train on data with a tokenizer, or put tokenizer.json into the directory before `pretrax import`\n'
            'for token ids: pretrax.load(RUN).logits(ids)'
        )
        raise UserError(f'{where}the data has no tokenizer to read tokens with\n{fix}')
    if choices is not None and not most_new_tokens(model, source.tokenizer, choices.prompts):
        raise UserError(
            f'sample.prompts: the longest fills the {model.max_length} positions of the model\nshorten the prompts'
        )


def most_new_tokens(model: Model, tokenizer: Any, prompts: Sequence[str]) -> float:
    """How many tokens can follow the longest of the prompts."""
    if model.max_length is None:
        return math.inf
    return max(model.max_length - max(len(ids) for ids in _encoded(tokenizer, prompts)), 0)


def sample(model: Model, weights: Any, tokenizer: Any, choices: 'Sample', seed: int = 0) -> list[str]:
    """Each prompt and its continuation, up to the end of the text or of the model's positions."""
    prompts = _encoded(tokenizer, choices.prompts)
    end = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    how = {name: getattr(choices, name) for name in ('temperature', 'top_k', 'top_p')}
    tokens = min(choices.tokens, most_new_tokens(model, tokenizer, choices.prompts))
    continued = generate(model, weights, prompts, tokens=int(tokens), **how, seed=seed, stop_ids=end)
    texts = []
    for prompt, ids, more in zip(choices.prompts, prompts, continued, strict=True):
        texts.append(prompt + text_after(tokenizer, ids, [token for token in more if token not in end]))
    return texts


def _encoded(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    return [encode_prompt(tokenizer, prompt) for prompt in prompts]
