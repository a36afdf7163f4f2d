"""The options of a verb are the fields of a dataclass, and one value carries them.

A verb is a function of one argument, a frozen dataclass. A field is an `option` or an `argument`, or its type is
`Annotated` with one of typer or a `Setting`, or is a dataclass with such fields of its own. Other fields are not
options, and keep their defaults. A verb with few options may declare them as parameters, with the same defaults.
Options that may be repeated are tuples. A verb returns its exit code; None: 0.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from typing import Annotated, Any

import typer
from typer.models import ParameterInfo

from pretrax.option import setting_of

_MANY = tuple[str, ...]


def with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The function that typer registers: it has a parameter for each option of a verb."""
    parameters = list(inspect.signature(verb, eval_str=True).parameters.values())
    kind = parameters[0].annotation if len(parameters) == 1 else None
    is_one_value = dataclasses.is_dataclass(kind)
    declared = _parameters(kind) if is_one_value else map(_with_type, parameters)
    options = {each.name: each for each in declared if _is_option(each.annotation)}

    def call(**values: Any) -> Any:
        for name, option in options.items():
            if option.annotation.__origin__ == _MANY:
                values[name] = tuple(values[name] or ())
        if code := verb(_instance(kind, values)) if is_one_value else verb(**values):
            raise typer.Exit(code)

    call.__signature__ = inspect.Signature([_for_typer(each) for each in options.values()])  # type: ignore[attr-defined]
    return call


def _parameters(kind: Any, default: Any = None) -> Iterator[Parameter]:
    """The options of a dataclass; `default` is an instance whose values are the defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value, hint = _default(field) if default is None else getattr(default, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _parameters(hint, None if value is Parameter.empty else value)
        else:
            option_type = _option_type(field.name, field, hint)
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=value, annotation=option_type)


def _with_type(parameter: Parameter) -> Parameter:
    """A parameter of a function whose default is an `option`, as one of a dataclass."""
    field, hint = parameter.default, parameter.annotation
    if not isinstance(field, dataclasses.Field):
        return parameter
    return parameter.replace(annotation=_option_type(parameter.name, field, hint), default=_default(field))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is dataclasses.MISSING else field.default


def _option_type(name: str, field: dataclasses.Field[Any], hint: Any) -> Any:
    """The type of a field, with an `option`, an `argument` or a `Setting` in the words of typer."""
    if 'argument' in field.metadata:
        return Annotated[hint, typer.Argument(**field.metadata['argument'])]
    if 'option' in field.metadata:
        names, more = field.metadata['option']
        own = f'--{name.replace("_", "-")}'
        if not any(each.startswith('--') for each in names) and (names or (hint is bool and field.default is False)):
            names = (own, *names)
        return Annotated[hint, typer.Option(*names, **more)]
    if (setting := setting_of(hint)) is None:
        return hint
    least = setting.gt if setting.ge is None else setting.ge
    option = typer.Option(min=least, max=setting.le, help=f'{setting.meaning[0].upper()}{setting.meaning[1:]}.')
    return Annotated[setting.kind | None if type(None) in typing.get_args(hint) else setting.kind, option]


def _is_option(hint: Any) -> bool:
    return any(isinstance(each, ParameterInfo) for each in getattr(hint, '__metadata__', ()))


def _for_typer(option: Parameter) -> Parameter:
    """A parameter as typer knows it: an option that may be repeated has a list."""
    if option.annotation.__origin__ != _MANY:
        return option
    default = option.default if option.default is Parameter.empty else list(option.default)
    return option.replace(annotation=Annotated[list[str], *option.annotation.__metadata__], default=default)


def _instance(kind: Any, values: Mapping[str, Any]) -> Any:
    fields = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            fields[name] = _instance(hint, values)
        elif name in values:
            fields[name] = values[name]
    return kind(**fields)
