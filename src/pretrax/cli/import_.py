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
    allow_not_finite: Annotated[
        bool, typer.Option('--allow-not-finite', help='Import weights that are NaN or infinite, and only report them.')
    ] = False,
) -> None:
    from pretrax.run.imported import import_checkpoint

    import_checkpoint(source, out, allow_not_finite)
