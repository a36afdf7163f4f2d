"""Train a few steps at several widths, and compare the sizes of activations.

This is the coordinate check of muP (arXiv:2203.03466, appendix D.1): with muP, activations and what training changes in the
logits have the same size at any width. The exit code is 1 if a slope is larger than --tolerance.
"""

import dataclasses
from typing import Annotated

import typer

from pretrax.cli._arguments import Configuration
from pretrax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Configuration):
    widths: Annotated[str, typer.Option(metavar='A,B', help='Values of model.d_model.')] = '64,128,256,512'
    steps: Annotated[int, typer.Option(min=1, help='Steps before the sizes are measured.')] = 4
    seeds: Annotated[int, typer.Option(min=1, help='Models of each width, whose mean counts.')] = 2
    tolerance: Annotated[float, typer.Option(min=0, help='The largest slope that passes.')] = 0.1
    standard: Annotated[
        bool, typer.Option('--standard', help='Also check the standard parametrization, to compare.')
    ] = False
    out: Annotated[str | None, typer.Option('--out', '-o', metavar='FILE', help='A picture: .png, .svg or .pdf.')] = (
        None
    )


def check(options: Options) -> None:
    from pretrax.cli._output import write_output
    from pretrax.run.coordinate_check import Coordinates, as_chart, as_text, check_coordinates, slopes
    from pretrax.view.charts.picture import SUFFIXES, chart_picture

    out = options.out
    if out is not None and not out.endswith(SUFFIXES):
        raise UserError(f'--out {out}: expected a name that ends with {", ".join(SUFFIXES)}')
    sizes = _numbers(options.widths)
    found: dict[str, Coordinates] = {}
    for name, mup in (('muP', True), ('standard', False))[: 1 + options.standard]:
        found[name] = check_coordinates(
            options.config, options.overrides, sizes, options.steps, options.seeds, mup, print
        )
        print(f'\n{as_text(name, found[name])}')
    if out is not None:
        write_output(out, chart_picture(as_chart(found, options.steps), '.' + out.rpartition('.')[2]))
        print(f'\nwrote {out}')
    worst = max(slopes(found['muP']).items(), key=lambda item: abs(item[1]))
    if abs(worst[1]) > options.tolerance:
        print(f'\n{worst[0]} depends on the width: slope {worst[1]:+.2f}, more than {options.tolerance:g}')
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(',')]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts) or len(set(parts)) < 2:
        raise UserError(f'--widths {text}: expected two widths or more, such as 64,128,256')
    return sorted({int(part) for part in parts})
