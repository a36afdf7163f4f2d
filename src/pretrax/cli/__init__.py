"""The command line: `pretrax VERB` and `pretrax GROUP VERB`; see `_verbs.py` for how a verb is declared.

`main` turns a `UserError`, a path that no file can have, or a bucket that refuses a request into at most ten lines on
stderr and exit code 2, and a bucket that does not answer into exit code 75. Any other exception is a bug in pretrax and
keeps its traceback.
"""

import contextlib
import importlib
import os
import re
import signal
import sys
from typing import Annotated, Any

import typer

from pretrax import __version__
from pretrax.cli._verbs import Group
from pretrax.errors import MISTAKE, OF_THE_SYSTEM, TRY_AGAIN, PrintableStream, UserError, disk_fix, printable
from pretrax.system.accelerators import skip_absent_accelerators
from pretrax.system.process_memory import ask_for_kept_memory

_MODELS = (['train'], ['eval'], ['generate'], ['serve'])  # verbs that run a model
_WITH_JAX = (*_MODELS, ['compile'], ['doctor'])


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; exits with 2 after a mistake of the user."""
    if arguments is None and sys.argv[1:2] in _MODELS:
        ask_for_kept_memory()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked by `ask_for_kept_memory`
    skip_absent_accelerators()
    app = typer.Typer(rich_markup_mode=None)
    app.callback(cls=Group, invoke_without_command=True, no_args_is_help=True)(_pretrax)
    stdout: Any = PrintableStream(sys.stdout)
    try:
        if arguments is None and sys.argv[1:2] in _WITH_JAX:
            _import_jax()
        with contextlib.redirect_stdout(stdout):
            typer.main.get_command(app).main(arguments, prog_name='pretrax')
    except UserError as error:
        from pretrax.config.interpolation import without_secrets

        print(UserError(without_secrets(str(error))).short_text(), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        in_bucket = str(error.filename).startswith(('gs://', 's3://'))
        if not in_bucket and error.errno not in OF_THE_SYSTEM:
            raise
        path = error.filename2 or error.filename or 'a file or standard output'  # filename2: the copy of a file
        shown = str(path) if in_bucket else str(path)[:100]
        fix = '' if in_bucket else f'\n{disk_fix(error)}'
        print(printable(f'{shown}: {error.strerror}{fix}'), file=sys.stderr)
        sys.exit(TRY_AGAIN if getattr(error, 'is_temporary', False) else MISTAKE)


def _import_jax() -> None:
    """Imports JAX if variables are set for it. Raises UserError if it refuses one, which else is a traceback."""
    if not any(name.startswith('JAX_') for name in os.environ):
        return
    try:
        importlib.import_module('jax')
    except ValueError as error:
        refused = re.search(r"(?:for environment '|for JAX flag )(\w+)", str(error))
        if refused is None:
            raise
        name = refused[1].upper()
        raise UserError(
            f'{name}={os.environ.get(name, "")!r}: JAX does not accept this value\nset another one, or unset {name}'
        ) from error


def _pretrax(version: Annotated[bool, typer.Option('--version', help='Print the version and exit.')] = False) -> None:
    """Pretrain decoder-only language models in JAX.

    Arguments of the form KEY=VALUE change the configuration; options of the form --flag belong to the verb.
    """
    if version:
        print(f'pretrax {__version__}')
        raise typer.Exit
