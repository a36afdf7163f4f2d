"""Print the JSON Schema of configuration files, for editors."""

import json
from pathlib import Path
from typing import Annotated

import typer


def schema(
    plugin: Annotated[
        list[str] | None, typer.Option(metavar='FILE', help='A Python file with more components; may be repeated.')
    ] = None,
) -> None:
    from pretrax.config import json_schema, load_plugin

    for name in plugin or []:
        load_plugin(name, Path())
    print(json.dumps(json_schema(), indent=2))
