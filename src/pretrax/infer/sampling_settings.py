"""How the tokens of an answer are chosen: each setting with its meaning, range and default, declared once.

`pretrax generate` and its files of prompts, `sample:` of a configuration, and the server take their settings from here.
Neither JAX nor pydantic is imported before it is used.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """The meaning and the range of a number, in an `Annotated` type. Pydantic reads the range.

    Attributes:
        meaning: the help of the option, and the description of the key.
        expected: the range in words.
        ge, gt, le: the least value, a value below all others, and the largest value; None: no such bound.
        kind: int, or float for finite numbers.
    """

    meaning: str
    expected: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    kind: type[int] | type[float] = float

    __is_annotated_types_grouped_metadata__ = True  # pydantic asks `__iter__` for its own constraints

    def __iter__(self) -> Iterator[Any]:
        from pydantic import Field

        finite = False if self.kind is float else None
        yield from Field(ge=self.ge, gt=self.gt, le=self.le, allow_inf_nan=finite).metadata

    def accepts(self, value: Any) -> bool:
        """Whether a value from JSON or from a command line is in the range; a boolean is not a number."""
        is_number = isinstance(value, int | self.kind) and not isinstance(value, bool) and math.isfinite(value)
        return (
            is_number
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (value <= self.le if self.le is not None else self.kind is float or value < 2**63)
        )


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
    """How a token is chosen. The logits are biased, penalized, divided by the temperature and filtered, in this order."""

    temperature: Temperature = 1.0
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    seed: Seed = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)  # added to the logits of these tokens


def setting_of(annotation: Any) -> Setting | None:
    """The setting of `Annotated[T, Setting(...)]`, or of such a type or None; None if there is none."""
    for each in (annotation, *typing.get_args(annotation)):
        for metadata in getattr(each, '__metadata__', ()):
            if isinstance(metadata, Setting):
                return metadata
    return None


SETTINGS: dict[str, Setting] = {
    name: setting
    for name, annotation in typing.get_type_hints(Sampling, include_extras=True).items()
    if (setting := setting_of(annotation))
}
