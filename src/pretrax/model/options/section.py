"""The declaration of an option of the decoder, and the sections of options. This module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from pretrax.errors import UserError

if TYPE_CHECKING:  # as an `Architecture` has them
    type Choice[T] = T
    type LayerNumbers = tuple[int, ...]
else:

    class Choice:
        """The type of an option that a configuration may leave out: None until it is resolved."""

        def __class_getitem__(cls, item: Any) -> Any:
            return item | None

    LayerNumbers = Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...]
Share = Annotated[float, Field(ge=0, lt=1)]
Effect = Literal['weights', 'forward', 'training', 'nothing']


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The attributes of an option besides its pydantic field."""

    # Its value if neither the configuration nor the preset nor the family gives one; `...`: it has none, or it follows
    # from other options
    choice: Any = ...
    # Its name in pretrax 0.1, whose section `model:` was flat; '': the same; None: 0.1 did not have it
    former: str | None = ''
    # What another value changes. 'weights': which there are, their sizes or their meaning, so that those of a
    # checkpoint do not fit; 'forward': only what is computed with the same weights; 'training': only that; 'nothing':
    # only how it is computed.
    changes: Effect = 'weights'


def option(
    choice: Any = ..., *, default: Any = None, former: str | None = '', changes: Effect = 'weights', **field: Any
) -> Any:
    """The pydantic field of an option, with its `Declaration`; `default` if the configuration leaves it out."""
    declared = Field(default=default, **field)
    declared.metadata.append(Declaration(choice, former, changes))
    return declared


class Section(BaseModel):
    """A section of options, which may have sections of its own."""

    model_config = ConfigDict(extra='forbid', frozen=True)

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """The declarations of all options by dotted key: 'attention.window'."""
        declared: dict[str, Declaration] = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section):
                inner = type(field.default).declarations()
                declared |= {f'{name}.{key}': declaration for key, declaration in inner.items()}
            else:
                declared[name] = next((x for x in field.metadata if isinstance(x, Declaration)), Declaration())
        return declared

    @classmethod
    def defaults(cls, prefix: str = '') -> dict[str, Any]:
        """The options that have a value if nothing gives them one, by dotted key with a prefix."""
        declared = cls.declarations().items()
        return {prefix + key: declaration.choice for key, declaration in declared if declaration.choice is not ...}

    def dotted(self) -> dict[str, Any]:
        """The options that are not None, by dotted key."""
        options: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Section):
                options |= {f'{name}.{key}': inner for key, inner in value.dotted().items()}
            elif value is not None:
                options[name] = value
        return options

    @classmethod
    def from_dotted(cls, options: Mapping[str, Any]) -> Self:
        """The inverse of `dotted`, without validation. Keys of other sections are ignored."""
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section):
                inner = {
                    key.removeprefix(f'{name}.'): value for key, value in options.items() if key.startswith(f'{name}.')
                }
                values[name] = type(field.default).from_dotted(inner)
            elif name in options:
                values[name] = options[name]
        return cls.model_construct(**values)


def refuse(chosen: dict[str, Any], fits: dict[str, bool], part: str) -> None:
    """Refuses the first option that does not fit a part. `part` also says what to do."""
    for name, does_fit in fits.items():
        if not does_fit:
            raise UserError(f'model.{name} = {chosen[name]} does not fit {part}')
