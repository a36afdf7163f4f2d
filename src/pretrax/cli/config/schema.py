"""Print the JSON Schema of configuration files, for editors."""

import json
from typing import Annotated

import typer

from pretrax.cli._arguments import load_plugins


def schema(
    plugin: Annotated[
        list[str] | None, typer.Option(metavar='FILE', help='A Python file with more components; may be repeated.')
    ] = None,
) -> None:
    from pretrax.config import json_schema

    load_plugins(plugin)
    print(json.dumps(json_schema(), indent=2))
