"""Kinds of fields of config.json. Each reads the options that it stands for, and writes the field of an architecture.

A field is read from a configuration that has every default already, so `None` is null in the file, or a default that
transformers derives from other fields. Imports no JAX.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture

Options = dict[str, Any]
MOST_LAYERS = 10_000  # a larger number is damage, and would fill the memory with names of tensors


def wrong(field: str, value: Any, expected: str) -> UserError:
    """The error for a value that a field cannot have."""
    said = 'null' if value is None else repr(value)
    return UserError(f'config.json: {field} is {said[:80]}; expected {expected}')


def whole(field: str, value: Any, least: int = 1, most: int = 2**31 - 1) -> int:
    """The value, if it is an integer in this range. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise wrong(field, value, f'an integer from {least} to {most:,}')
    return value


def number(field: str, value: Any, least: float = 0.0, above: bool = True) -> float:
    """The value, if it is a finite number of at least `least`, or greater if `above`. Raises UserError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max or value < least or (above and value == least):
        raise wrong(field, value, f'a number {"above" if above else "of at least"} {least:g}')
    return float(value)


class Field:
    """A row of a table: fields of config.json, and the options that they stand for; by default, none."""

    fields: Any  # tuple[str, ...], which some rows compute

    def read(self, config: Mapping[str, Any]) -> Options:
        """The options for a configuration that has every default. Raises UserError for a value that cannot be."""
        return {}

    def write(self, arch: Architecture) -> dict[str, Any]:
        """The fields for an architecture."""
        return {}


@dataclass(frozen=True)
class OneField(Field):
    """A row with one field."""

    field: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)


@dataclass(frozen=True)
class Size(OneField):
    """A positive integer.

    Args:
        field: name in config.json.
        option: name of the option.
        if_null: the field whose value null stands for, or a multiple of it, such as '4 * n_embd'; 'derived': pretrax
            derives it from the other sizes; None: it may not be null.
        alias: another name of the field, in files of some versions.
    """

    option: str
    if_null: str | None = None
    alias: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field, *([self.alias] if self.alias else []))

    def read(self, config: Mapping[str, Any]) -> Options:
        value = config[self.field]
        if value is None and self.if_null == 'derived':
            return {}
        if value is None and self.if_null is not None:
            times, _, field = self.if_null.rpartition(' * ')
            value = int(times or 1) * whole(field, config[field])
        most = MOST_LAYERS if self.option == 'n_layers' else 2**31 - 1
        return {self.option: whole(self.field, value, most=most)}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {self.field: arch.option(self.option)}


@dataclass(frozen=True)
class Number(OneField):
    """A number above 0, or of at least 0 if `zero`. `as_integer`: transformers requires an integer if it is whole.

    The option is this power of the field. `absent`: the attribute of the architecture, dotted, that is written if the
    option is None.
    """

    option: str
    zero: bool = False
    as_integer: bool = False
    power: int = 1
    absent: str | None = None

    def read(self, config: Mapping[str, Any]) -> Options:
        value = number(self.field, config[self.field], above=not self.zero)
        try:
            return {self.option: value**self.power}
        except OverflowError:
            raise wrong(self.field, value, 'a larger number') from None

    def write(self, arch: Architecture) -> dict[str, Any]:
        value = arch.option(self.option)
        if value is None and self.absent is not None:
            value = arch.option(self.absent)
        if not value and self.power < 0:
            value = None  # there is no such part
        if self.power != 1 and value is not None:
            exact = float(value) ** (1 / self.power)
            short = float(f'{exact:.12g}')  # drops the digits that rounding adds, if the power is the same
            value = short if short**self.power == value else exact
        return {
            self.field: int(value) if self.as_integer and value is not None and float(value).is_integer() else value
        }


@dataclass(frozen=True)
class Enumerated(OneField):
    """A field whose values correspond to options: `(('silu', {'feed_forward.activation': 'swiglu'}),)`.

    A field without a default may be absent; then it has no meaning for the class.
    """

    choices: tuple[tuple[Any, Options], ...]

    def read(self, config: Mapping[str, Any]) -> Options:
        if self.field not in config:
            return {}
        value = config[self.field]
        for choice, options in self.choices:
            if type(value) is type(choice) and value == choice:
                return dict(options)
        known = ', '.join('null' if choice is None else repr(choice) for choice, _ in self.choices)
        raise UserError(f'{wrong(self.field, value, known)}\npretrax does not support this variant')

    def write(self, arch: Architecture) -> dict[str, Any]:
        for value, options in self.choices:
            if options and all(arch.option(name) == option for name, option in options.items()):
                return {self.field: value}
        return {}

    @classmethod
    def from_values(cls, field: str, values: Mapping[Any, Options]) -> Self:
        """A field whose values correspond to these options."""
        return cls(field, tuple(values.items()))

    @classmethod
    def switch(cls, field: str, options: Sequence[str]) -> Self:
        """A field whose value, false or true, is that of these options."""
        return cls(field, tuple((value, dict.fromkeys(options, value)) for value in (False, True)))

    @classmethod
    def only(cls, field: str, values: Sequence[Any]) -> Self:
        """A field that must have one of these values, or be absent."""
        return cls(field, tuple((value, {}) for value in values))


@dataclass(frozen=True)
class Lacking(OneField):
    """A field of a part that pretrax does not have. The values are those with which the class does not have it."""

    part: str
    values: Sequence[Any]

    def read(self, config: Mapping[str, Any]) -> Options:
        value = config[self.field]
        if not any(type(value) is type(known) and value == known for known in self.values):
            raise UserError(f'config.json: {self.field} is {value!r:.80}: pretrax does not support {self.part}')
        return {}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {self.field: self.values[0]}


@dataclass(frozen=True)
class Cap(OneField):
    """A soft cap. null: none."""

    option: str

    def read(self, config: Mapping[str, Any]) -> Options:
        value = config[self.field]
        return {self.option: 0.0 if value is None else number(self.field, value)}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {self.field: arch.option(self.option) or None}


@dataclass(frozen=True)
class Unused(Field):
    """Fields without effect in the models that the other rows accept."""

    fields: Sequence[str]


@dataclass(frozen=True)
class OfEveryLayer(OneField):
    """A list with this value for every layer, or an absent field."""

    value: Any

    def read(self, config: Mapping[str, Any]) -> Options:
        count = whole('num_hidden_layers', config['num_hidden_layers'], most=MOST_LAYERS)
        if self.field in config and config[self.field] != [self.value] * count:
            raise wrong(self.field, config[self.field], f'a list of {count}, {self.value!r} for every layer')
        return {}


@dataclass(frozen=True)
class SameAs(OneField):
    """A field that the class does not read, and which must not contradict the one that it reads."""

    read_field: str

    def read(self, config: Mapping[str, Any]) -> Options:
        if self.field in config and config[self.field] != config[self.read_field]:
            raise wrong(
                self.field, config[self.field], f'the value of {self.read_field}, {config[self.read_field]!r:.80}'
            )
        return {}


@dataclass(frozen=True)
class Experts(Field):
    """Experts, balanced over the batch. If `mixed`, the class can have layers without experts (Qwen)."""

    mixed: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return ('decoder_sparse_step', 'mlp_only_layers', 'intermediate_size') if self.mixed else ()

    def read(self, config: Mapping[str, Any]) -> Options:
        options: Options = {'experts.router.balance_over': 'batch'}
        if not self.mixed:
            return options
        every, dense = whole('decoder_sparse_step', config['decoder_sparse_step']), config['mlp_only_layers'] or []
        if not isinstance(dense, list):
            raise wrong('mlp_only_layers', dense, 'a list of numbers of layers')
        n_layers = whole('num_hidden_layers', config['num_hidden_layers'])
        dense = sorted({i for i in dense if whole('mlp_only_layers', i, 0) < n_layers})  # the class ignores the others
        if not any((i + 1) % every == 0 and i not in dense for i in range(n_layers)):
            said = f'decoder_sparse_step {every} and mlp_only_layers'
            raise wrong(said, config['mlp_only_layers'], f'one of the {n_layers} layers with experts')
        options |= {'experts.every': every, 'experts.dense_layers': tuple(dense)}
        if every > 1 or dense:
            options['experts.d_ff_dense'] = whole('intermediate_size', config['intermediate_size'])
        return options

    def write(self, arch: Architecture) -> dict[str, Any]:
        if not arch.experts.d_ff_dense:
            return {}
        return {
            'decoder_sparse_step': arch.experts.every,
            'mlp_only_layers': list(arch.experts.dense_layers),
            'intermediate_size': arch.experts.d_ff_dense,
        }
