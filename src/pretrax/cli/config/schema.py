"""Print the JSON Schema of configuration files, for editors."""

from typing import Annotated

import typer

from pretrax.cli._arguments import load_plugins


def schema(
    plugin: Annotated[
        tuple[str, ...], typer.Option(metavar='FILE', help='A Python file with more components; may be repeated.')
    ] = (),
) -> None:
    from pretrax.config import json_schema_text

    load_plugins(plugin)
    print(json_schema_text(), end='')
