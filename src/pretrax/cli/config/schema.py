"""Print the JSON Schema of configuration files, for editors."""

from pretrax.cli._arguments import load_plugins
from pretrax.option import option


def schema(
    plugin: tuple[str, ...] = option(
        'A Python file with more components; may be repeated.', default=(), metavar='FILE'
    ),
) -> None:
    from pretrax.config import json_schema_text

    load_plugins(plugin)
    print(json_schema_text(), end='')
