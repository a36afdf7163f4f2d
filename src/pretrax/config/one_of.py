"""Options of a component that has several kinds, each with a model of its own: text, tokens, a mixture, ..."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

type Schema = dict[str, Any]
# The models of all kinds, and the function that chooses one for the given values.
type Kinds = tuple[tuple[type[BaseModel], ...], Callable[[Mapping[str, Any]], type[BaseModel]]]


@dataclass(frozen=True)
class OneOf:
    """Takes the place of a pydantic model where its keys are listed, and where values are validated."""

    models: tuple[type[BaseModel], ...]  # the models of all kinds
    choose: Callable[[Mapping[str, Any]], type[BaseModel]]  # the model for the given values

    @property
    def model_fields(self) -> dict[str, FieldInfo]:
        """The keys of all kinds; a key of several kinds is that of the first."""
        fields: dict[str, FieldInfo] = {}
        for model in self.models:
            fields = fields | {key: field for key, field in model.model_fields.items() if key not in fields}
        return fields

    def model_validate_json(self, text: str, *, strict: bool) -> BaseModel:
        """The options of the kind that the values choose. Raises pydantic.ValidationError."""
        return self.choose(json.loads(text)).model_validate_json(text, strict=strict)

    def model_json_schema(self) -> Schema:
        """The schema of the keys of all kinds."""
        schemas = [model.model_json_schema() for model in self.models]
        definitions = {name: value for schema in schemas for name, value in schema.get('$defs', {}).items()}
        return merged_schema(schemas, definitions) | {'$defs': definitions}


def merged_schema(schemas: Sequence[Schema], definitions: Mapping[str, Schema]) -> Schema:
    """A schema with the keys of all kinds; null for a key that not all of them require is a key that is not given."""
    required = [key for key in schemas[0].get('required', ()) if all(key in s.get('required', ()) for s in schemas)]
    properties: Schema = {}
    for schema in schemas:
        for key, value in schema['properties'].items():
            if key not in properties:
                if kinds := [
                    definitions[k['$ref'].rpartition('/')[2]] for k in value.get('items', {}).get('oneOf', ())
                ]:
                    value = value | {'items': merged_schema(kinds, definitions)}
                properties[key] = value if key in required else _or_null(value)
    merged = {'type': 'object', 'additionalProperties': False, 'properties': properties}
    return merged | ({'required': required} if required else {})


def _or_null(schema: Schema) -> Schema:
    about = {key: schema.get(key) for key in ('description', 'default')}
    plain = {key: value for key, value in schema.items() if key not in about}
    choices = plain.get('anyOf', [plain])
    return {'anyOf': [*choices, *([] if {'type': 'null'} in choices else [{'type': 'null'}])]} | about
