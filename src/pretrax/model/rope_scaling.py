"""How the frequencies of RoPE are scaled for contexts that are longer than those of pretraining. No JAX here."""

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RopeScaling(BaseModel):
    """How the frequencies of RoPE are scaled; `rope.py` has the formulas."""

    model_config = ConfigDict(extra='forbid', frozen=True)

    kind: Literal['none', 'linear', 'llama3', 'yarn', 'longrope', 'proportional'] = Field(
        description='none turns the scaling of a preset off'
    )
    factor: float = Field(1.0, ge=1, description='how much longer contexts are')
    original_length: int = Field(8192, gt=0, description='the context length before scaling; linear ignores it')
    low_freq_factor: float = Field(
        1.0, gt=0, description='llama3: frequencies with fewer turns than this in original_length are scaled'
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description='llama3: frequencies with more turns than this are unchanged'
    )
    beta_fast: float = Field(32.0, gt=0, description='yarn: frequencies with more turns than this are unchanged')
    beta_slow: float = Field(1.0, gt=0, description='yarn: frequencies with fewer turns than this are scaled')
    truncate: bool = Field(True, description='yarn: both bounds are rounded outward to whole dimensions')
    mscale: float | None = Field(None, ge=0, description='yarn: see attention_factor')
    mscale_all_dim: float | None = Field(None, ge=0, description='yarn: see attention_factor')
    short_factor: tuple[float, ...] = Field(
        (), description='longrope: divisors of the frequencies, up to original_length'
    )
    long_factor: tuple[float, ...] = Field((), description='longrope: divisors of the frequencies, in longer sequences')
    fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description='proportional: the first pairs of dimensions that turn, as a part of all; null: all',
    )
    attention_factor: float | None = Field(
        None,
        gt=0,
        description='yarn, longrope: queries and keys are multiplied by it (default: from factor, as published)',
    )

    @model_validator(mode='after')
    def _fits_together(self) -> Self:
        if self.kind == 'llama3' and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f'low_freq_factor {self.low_freq_factor} is above high_freq_factor {self.high_freq_factor}'
            )
        if self.kind == 'yarn' and self.beta_slow > self.beta_fast:
            raise ValueError(f'beta_slow {self.beta_slow} is above beta_fast {self.beta_fast}')
        if self.kind == 'longrope':
            if not self.short_factor or len(self.short_factor) != len(self.long_factor):
                raise ValueError('longrope needs short_factor and long_factor, one number for each pair of dimensions')
            if min(*self.short_factor, *self.long_factor) <= 0:
                raise ValueError('short_factor and long_factor are divisors, and must be above 0')
        return self

    @property
    def amplitude(self) -> float:
        """What queries and keys are multiplied by.

        yarn: Peng et al. 2023, arXiv:2309.00071, section 3.4; with mscale and mscale_all_dim, the quotient in the
        released code of DeepSeek-V2. longrope: Ding et al. 2024, arXiv:2402.13753, and the released code of Phi-3.
        """
        if self.kind not in ('yarn', 'longrope'):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.kind == 'longrope':
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        if self.mscale and self.mscale_all_dim:
            return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)
        return self.yarn_mscale(1.0)

    def yarn_mscale(self, weight: float) -> float:
        """0.1 weight ln(factor) + 1. Peng et al. 2023, arXiv:2309.00071, eq. 22."""
        return 0.1 * weight * math.log(self.factor) + 1.0

    def ramp(self, dim: int, base: float) -> tuple[float, float]:
        """yarn: the pairs of `dim` dimensions before the first number are unchanged, those after the second are scaled.

        Peng et al. 2023, arXiv:2309.00071, section 3.2, in dimensions instead of turns.
        """
        low, high = (
            dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high if high != low else high + 0.001

    def divisors(self, length: int) -> tuple[float, ...]:
        """longrope: the divisors of the frequencies in sequences of this many tokens."""
        return self.long_factor if length > self.original_length else self.short_factor

    def for_length(self, length: int) -> 'RopeScaling':
        """The scaling for sequences of this many tokens, whatever the length of the arrays that hold them."""
        return self.model_copy(update=dict.fromkeys(('short_factor', 'long_factor'), self.divisors(length)))

    def describe(self, length: int) -> str:
        """longrope: which factors apply to sequences of this many tokens, for the start-up report."""
        which, how = ('long', 'exceed') if length > self.original_length else ('short', 'do not exceed')
        return (
            f'longrope with the {which} factors (sequences of {length} tokens {how} original_length, '
            f'{self.original_length})'
        )

    def __str__(self) -> str:
        return f'{self.kind} x{self.factor:g}'
