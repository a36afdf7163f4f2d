"""Arguments and options that several verbs take."""

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pretrax.errors import UserError
from pretrax.option import option

if TYPE_CHECKING:
    from pretrax.config import RunConfig
    from pretrax.system.target import Target

ConfigFile = Annotated[
    str, typer.Argument(metavar='CONFIG', help='A YAML file, or the name of a packaged configuration: quickstart.')
]
Overrides = Annotated[
    tuple[str, ...],
    typer.Argument(metavar='KEY=VALUE', help='Changes to the configuration, such as mesh.d=4 or steps=1000.'),
]
AllowChanges = Annotated[
    bool, typer.Option('--allow-changes', help='Resume even if the configuration or the data has changed.')
]
Verbose = Annotated[bool, typer.Option('--verbose', help='Print the whole start-up report.')]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """The configuration of a run, and changes to it: the first arguments of a verb."""

    config: ConfigFile
    overrides: Overrides = ()

    @property
    def words(self) -> list[str]:
        """The words of a command line that name it."""
        return [self.config, *self.overrides]

    def load(self) -> 'RunConfig':
        """Reads it. Raises UserError."""
        from pretrax.config import load

        return load(self.config, self.overrides)

    def flags(self, *names: str) -> list[str]:
        """The words of a command line for the options of these names that are given: ['--dry-run'] of 'dry_run'."""
        return [f'--{name.replace("_", "-")}' for name in names if getattr(self, name)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(Configuration):
    """What the engines of `pretrax launch` have in common."""

    dry_run: bool = option('Print what would be started or submitted, and do nothing.', default=False)
    unchecked: bool = option('Launch without checking here that the run would start.', default=False)
    allow_changes: AllowChanges = False

    def check_start(self, target: 'Target') -> None:
        """Raises UserError if the run would not start on the machines of the target. Warnings go to standard error."""
        from pretrax.launch.start_check import check_start

        if not self.unchecked:
            say = functools.partial(print, file=sys.stderr, flush=True)
            check_start(self.words, target, self.allow_changes, say)


RunOrCheckpoint = Annotated[
    str,
    typer.Argument(metavar='RUN_OR_CHECKPOINT', help='runs/NAME, or a checkpoint in it: runs/NAME/checkpoints/100.'),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        '--dtype',
        metavar='DTYPE',
        help='Dtype of activations and matrix products: f32, bf16 or fp16. [default: on CPUs f32, else as in training]',
    ),
]
Plugins = Annotated[
    tuple[str, ...],
    typer.Option(
        '--plugin',
        metavar='FILE',
        help='Import the Python file with the components of the run; may be repeated. Nothing else is imported.',
    ),
]
Variables = Annotated[
    tuple[str, ...],
    typer.Option(
        '--env',
        metavar='NAME=VALUE',
        help='A variable for the processes. NAME without a value: its value here. Repeatable.',
    ),
]
LaunchedRun = Annotated[
    str, typer.Argument(metavar='RUN', help='A run directory, its name below runs/, or a bucket URL.')
]
Standbys = Annotated[
    bool,
    typer.Option(
        '--standbys/--no-standbys',
        help='Keep a process that has imported everything ready for each process, 0.2 GB of memory each.',
    ),
]
Retries = Annotated[int, typer.Option(min=0, help='Restarts in a row without a new checkpoint before it gives up.')]
HardwareOption = Annotated[
    str | None,
    typer.Option(metavar='NAME', help='Hardware, such as v5e-256, v5p:4x4x4, h200 or h200x8.', show_default=False),
]
SlicesOption = Annotated[
    int | None,
    typer.Option(metavar='N', min=1, help='Number of slices of that hardware; for GPUs, of nodes.', show_default='1'),
]


def variables(texts: Sequence[str]) -> dict[str, str]:
    """The environment that `--env` names. Raises UserError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition('=')
        if not name.isidentifier():
            raise UserError(f'--env {text}: expected NAME=VALUE, or NAME for its value here')
        if not equals and name not in os.environ:
            raise UserError(f'--env {name}: it is not set here\nwrite --env {name}=VALUE')
        found[name] = value if equals else os.environ[name]
    return found


def numbers(option: str, text: str, expected: str, least: int = 1) -> tuple[int, ...]:
    """The different numbers above 0 in 'A,B'. Raises UserError if there are fewer than `least`, or other words."""
    parts = dict.fromkeys(part.strip() for part in text.split(','))
    if len(parts) < least or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UserError(f'{option} {text}: expected {expected}, such as 8,32,128')
    return tuple(map(int, parts))


def load_plugins(plugins: Sequence[str]) -> None:
    """Runs the plugins that `--plugin` names. Raises UserError."""
    from pretrax.config import load_plugin

    for plugin in plugins:
        load_plugin(plugin, Path())
