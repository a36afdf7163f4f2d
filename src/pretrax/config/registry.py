"""The components a configuration can name: models, data sources, optimizers and schedules.

A component is a callable. pretrax supplies its positional parameters; its keyword-only parameters, with their
annotations and defaults, are its options in YAML:

    @register('optimizer', 'momentum')
    def momentum(*, decay: float = 0.9) -> optax.GradientTransformation:
        return optax.trace(decay)

Built-in components are 'module:attribute' strings that are imported at first use, because most import JAX.
"""

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pydantic

from pretrax.config.one_of import Kinds, OneOf
from pretrax.config.problems import nearest
from pretrax.errors import UserError, first_line

if TYPE_CHECKING:
    from pretrax.config.schema import Component

DEFAULTS: Mapping[str, str] = {'model': 'transformer', 'data': 'text', 'optimizer': 'adamw', 'schedule': 'cosine'}


@dataclass(frozen=True)
class Entry:
    """A component."""

    factory: Callable[..., Any] | str  # what `build` calls, or its 'module:attribute'
    # The model of its options, or its 'module:attribute', which may also be the models of several kinds and a function
    # that chooses one by the given values; None: the keyword-only parameters of the factory
    options: type[pydantic.BaseModel] | Kinds | str | None = None
    # 'module:attribute' of a function that reads the section of a configuration from a checkpoint
    section_of: str | None = None
    option_names: str | None = None  # module with the names that pretrax 0.1 had for its options; None: the same names


# Sections that most runs do not have, and what runs then: a run without them does not import it.
_FEATURES = {
    'init_from': 'pretrax.weights.warm_start:warm_state',
    'distill': 'pretrax.distill.teaching:Teaching',
    'federation': 'pretrax.run.federation:joined',
}
_PARTS = ('mixer', 'feed_forward', 'loss')  # of the decoder
DECAYING = ('cosine', 'linear', 'wsd', 'inverse_sqrt', 'step', 'exponential', 'polynomial')  # schedules that decay
_components: dict[str, dict[str, Entry]] = {
    'model': {
        'transformer': Entry(
            'pretrax.model.transformer:Transformer',
            'pretrax.model.choices:TransformerOptions',
            'pretrax.weights.saved:model_section',
            'pretrax.model.option_names',
        ),
        'nnx': Entry('pretrax.model.nnx:NnxModel', 'pretrax.model.nnx_options:NnxOptions'),
    },
    'data': {
        'text': Entry('pretrax.data.text:open_text', 'pretrax.data.options:OPTIONS'),
        'synthetic': Entry('pretrax.data.batches.synthetic:open_synthetic'),
        'tokenizer': Entry('pretrax.data.batches.synthetic:TokenizerOnly'),
    },
    'optimizer': {
        name: Entry(f'pretrax.train.optimizer:{name}')
        for name in ('adamw', 'adafactor', 'lion', 'sgd', 'muon', 'soap', 'schedule_free')
    },
    'schedule': {name: Entry(f'pretrax.train.schedule:{name}') for name in ('constant', *DECAYING, 'piecewise')},
}


def register[F: Callable[..., Any]](
    kind: str, name: str, *, options: type[pydantic.BaseModel] | Kinds | None = None
) -> Callable[[F], F]:
    """Registers a function or class as the component `name` of the section `kind`.

    Args:
        kind: 'model', 'data', 'optimizer' or 'schedule'. Or 'mixer', 'feed_forward' or 'loss', a part of the decoder:
            the component is then a model with this part and the options of the decoder (`pretrax.model.variant`).
        name: what the user writes as `name:` in that section.
        options: a pydantic model of the options, or those of several kinds and a function that chooses one, passed to
            the component as the keyword `options`. Without it, the component's keyword-only parameters are its options.

    Raises:
        UserError: the kind is unknown, the name is invalid or taken, or an option has a type that YAML cannot express.
    """
    if kind not in (*_components, *_PARTS):
        kinds = ', '.join((*_components, *_PARTS))
        raise UserError(f'register: there is no kind {kind!r}; expected one of {kinds}{nearest(kind, DEFAULTS)}')
    if not re.fullmatch(r'[A-Za-z][\w-]*', name):
        raise UserError(f'register: {name!r} cannot name a component; expected letters, digits, "_" and "-"')

    def add_part(function: F) -> F:
        decoder = _components['model'][DEFAULTS['model']]
        made = imported('pretrax.model.variant:variant')(kind, function)
        register('model', name, options=imported(decoder.options))(made)
        return function

    def add(factory: F) -> F:
        taken = _components[kind].get(name)
        # A plugin that failed halfway and is loaded again may register again from the same file.
        if taken and (isinstance(taken.factory, str) or _where(taken.factory) != _where(factory)):
            raise UserError(
                f'register: the {kind} {name!r} of {_where(factory)} is already registered by {_where(taken.factory)}\n'
                '    choose another name'
            )
        if options is None:
            _options_from_signature(factory)  # now, so that an error points to the plugin
        _components[kind][name] = Entry(factory, options)
        return factory

    return add_part if kind in _PARTS else add


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    return sorted(_components[kind])


def options_model(kind: str, name: str) -> type[pydantic.BaseModel] | OneOf:
    """The pydantic model of the options of a component, or those of its kinds."""
    entry = _components[kind][name]
    if entry.options is not None:
        found = imported(entry.options)
        return OneOf(found[0], found[1]) if isinstance(found, tuple) else found
    return _options_from_signature(imported(entry.factory))


def description(kind: str, name: str) -> str:
    """The first paragraph of the docstring of a component, in one line; '' if it has none."""
    text = inspect.getdoc(imported(_components[kind][name].factory)) or ''
    return ' '.join(text.partition('\n\n')[0].split())


def build(kind: str, section: 'Component', *supplied: Any) -> Any:
    """Calls the component of a section, with the `supplied` positional arguments and its options.

    An optimizer is supplied with `Model.matrix_dimensions` if it has a parameter `matrices`.
    """
    entry = _components[kind][section.name]
    factory = imported(entry.factory)
    if kind == 'optimizer' and 'matrices' not in inspect.signature(factory).parameters:
        supplied = ()
    if entry.options is not None:
        return factory(*supplied, options=section.options)
    return factory(*supplied, **{name: getattr(section.options, name) for name in type(section.options).model_fields})


def plugin_factory(kind: str, name: str) -> Callable[..., Any] | None:
    """The function or class that a user has registered under this name; None: the component is one of pretrax."""
    factory = _components[kind][name].factory
    return None if isinstance(factory, str) else factory


def section_of_checkpoint(kind: str, name: str, place: str) -> dict[str, Any] | None:
    """The section of a component as the checkpoint at `place` gives it; None if the component reads none."""
    entry = _components[kind].get(name)
    return imported(entry.section_of)(place) if entry and entry.section_of else None


def feature(section: str) -> Any:
    """The module that runs if a configuration has the section `init_from`, `distill` or `federation`."""
    return imported(_FEATURES[section])


def option_names(kind: str, name: Any) -> Any:
    """The module with former option names of a component; None: there are none, or no such component."""
    entry = _components[kind].get(name) if isinstance(name, str) else None
    return importlib.import_module(entry.option_names) if entry and entry.option_names else None


@functools.cache
def _options_from_signature(factory: Callable[..., Any]) -> type[pydantic.BaseModel]:
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        required = parameter.default is parameter.empty
        fields[parameter.name] = (_annotation(factory, parameter), ... if required else parameter.default)
    try:
        return pydantic.create_model(
            getattr(factory, '__name__', 'component'),
            __config__=pydantic.ConfigDict(extra='forbid', frozen=True, strict=True, protected_namespaces=()),
            **fields,
        )
    except (pydantic.errors.PydanticUserError, NameError) as error:
        raise UserError(
            f'{_where(factory)}: an option has a type that cannot be checked: {first_line(error)[:80]}\n'
            '    annotate keyword-only parameters with types that YAML can write (int, float, str, bool, list[...])'
        ) from error


def _annotation(factory: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if isinstance(parameter.annotation, str):  # from __future__ import annotations
        module = inspect.getmodule(factory)
        return eval(parameter.annotation, vars(module) if module else {})
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    if parameter.default in (None, parameter.empty):
        raise UserError(
            f'{_where(factory)}: the option {parameter.name!r} needs a type\n'
            f'    write for example  {parameter.name}: float'
        )
    return type(parameter.default)


def imported(reference: Any) -> Any:
    """The attribute of 'module:attribute'; what is not a text is returned."""
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(':')
    return getattr(importlib.import_module(module), attribute)


def _where(factory: Callable[..., Any] | str) -> str:
    if isinstance(factory, str):
        return 'pretrax itself'
    module = sys.modules.get(factory.__module__)
    return f'{getattr(module, "__file__", factory.__module__)}:{getattr(factory, "__qualname__", factory)}'
