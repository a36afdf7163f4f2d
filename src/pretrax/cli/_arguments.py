"""Arguments and options that several verbs take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    str, typer.Argument(metavar='CONFIG', help='A YAML file, or the name of a packaged configuration: quickstart.')
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar='KEY=VALUE', help='Changes to the configuration, such as mesh.d=4 or steps=1000.'),
]
AllowChanges = Annotated[
    bool, typer.Option('--allow-changes', help='Resume even if the configuration or the data has changed.')
]
Compiled = Annotated[
    str | None, typer.Option(metavar='FILE', help='Run the step that `pretrax compile --save FILE` wrote.')
]
DryRun = Annotated[bool, typer.Option('--dry-run', help='Do all but train: check and compile everything.')]
Verbose = Annotated[bool, typer.Option('--verbose', help='Print the whole start-up report.')]
RunOrCheckpoint = Annotated[
    str,
    typer.Argument(metavar='RUN_OR_CHECKPOINT', help='runs/NAME, or a checkpoint in it: runs/NAME/checkpoints/100.'),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        '--plugin',
        metavar='FILE',
        help='Import the Python file with the components of the run; may be repeated. Nothing else is imported.',
    ),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(metavar='NAME', help='Hardware, such as v5e-256, v5p:4x4x4, h200 or h200x8.', show_default=False),
]
SlicesOption = Annotated[
    int | None,
    typer.Option(metavar='N', min=1, help='Number of slices of that hardware; for GPUs, of nodes.', show_default='1'),
]


def load_plugins(plugins: Sequence[str] | None) -> None:
    """Runs the plugins that `--plugin` names. Raises UserError."""
    from pretrax.config import load_plugin

    for plugin in plugins or []:
        load_plugin(plugin, Path())
