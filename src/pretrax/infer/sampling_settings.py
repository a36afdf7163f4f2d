"""How the tokens of an answer are chosen: each setting with its meaning, range and default, declared once.

`pretrax generate` and its files of prompts, `sample:` of a configuration, and the server take their settings from here.
Neither JAX nor pydantic is imported before it is used.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pretrax.option import Setting, setting_of

Temperature = Annotated[
    float, Setting('temperature of sampling; 0: always the most likely token', 'a number, 0 or more', ge=0)
]
TopK = Annotated[int, Setting('sample from the k most likely tokens', 'a number of tokens, 1 or more', ge=1, kind=int)]
TopP = Annotated[
    float,
    Setting(
        'sample from the most likely tokens of this total probability', 'a number above 0 and at most 1', gt=0, le=1
    ),
]
MinP = Annotated[
    float,
    Setting('only tokens at least this fraction as likely as the likeliest', 'a number from 0 to 1', ge=0, le=1),
]
# Keskar et al. 2019, arXiv:1909.05858
RepetitionPenalty = Annotated[
    float, Setting('above 1: tokens in the prompt and the text become less likely', 'a number above 0', gt=0)
]
PresencePenalty = Annotated[float, Setting('subtracted from the logits of tokens in the text', 'a finite number')]
FrequencyPenalty = Annotated[
    float, Setting('subtracted from the logits of a token as often as the text has it', 'a finite number')
]
Seed = Annotated[int, Setting('seed of the sampling', 'a whole number, 0 or more', ge=0, kind=int)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. Logits are biased, penalized, divided by the temperature and filtered, in this order."""

    temperature: Temperature = 1.0
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    seed: Seed = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)  # added to the logits of these tokens


SETTINGS: dict[str, Setting] = {
    name: setting
    for name, annotation in typing.get_type_hints(Sampling, include_extras=True).items()
    if (setting := setting_of(annotation))
}

WRITING = Sampling(temperature=0.8)  # of `pretrax generate`, unless its user says otherwise

_COUNT = Setting('', '', ge=1, kind=int)


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) and text for text in texts)


# Everything that changes an answer to a prompt: what is expected, and whether a value is that.
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    'max_tokens': ('a number of tokens, 1 or more', _COUNT.accepts),
    **{name: (setting.expected, setting.accepts) for name, setting in SETTINGS.items()},
    'n': ('a number of answers, 1 or more', _COUNT.accepts),
    'stop': ('a string that is not empty, or a list of them', _is_stop),
}
