"""Import a Hugging Face checkpoint as a run.

The run can generate text, be exported, and be the init_from of another run.
"""

from typing import Annotated

import typer


def import_(
    source: Annotated[
        str, typer.Argument(metavar='HF_DIR_OR_ID', help='A directory, or org/name[@revision] on the hub.')
    ],
    out: Annotated[
        str | None, typer.Option('--out', '-o', metavar='RUN', help='Directory of the new run. [default: runs/NAME]')
    ] = None,
) -> None:
    from pretrax.run.imported import import_checkpoint

    import_checkpoint(source, out)
