"""Train a few steps at several widths, and compare the sizes of activations.

This is the coordinate check of muP (arXiv:2203.03466, appendix D.1): with muP, activations and what training changes in
the logits have the same size at any width. The exit code is 1 if a slope is larger than --tolerance.
"""

import dataclasses

from pretrax.cli._arguments import Configuration, numbers
from pretrax.errors import UserError
from pretrax.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Configuration):
    widths: str = option('Values of model.d_model.', default='64,128,256,512', metavar='A,B')
    steps: int = option('Steps before the sizes are measured.', default=4, min=1)
    seeds: int = option('Models of each width, whose mean counts.', default=2, min=1)
    tolerance: float = option('The largest slope that passes.', default=0.1, min=0)
    standard: bool = option('Also check the standard parametrization, to compare.', default=False)
    out: str | None = option('A picture: .png, .svg or .pdf.', '-o', metavar='FILE')


def check(options: Options) -> int:
    from pretrax.cli._output import write_output
    from pretrax.run.coordinate_check import Coordinates, as_chart, as_text, check_coordinates, slopes
    from pretrax.view.charts.picture import SUFFIXES, chart_picture, need_pictures

    out = options.out
    if out is not None:
        if not out.endswith(SUFFIXES):
            raise UserError(f'--out {out}: expected a name that ends with {", ".join(SUFFIXES)}')
        need_pictures('.' + out.rpartition('.')[2])
    sizes = sorted(numbers('--widths', options.widths, 'two widths or more', least=2))
    found: dict[str, Coordinates] = {}
    for name, mup in (('muP', True), ('standard', False))[: 1 + options.standard]:
        found[name] = check_coordinates(
            options.config, options.overrides, sizes, steps=options.steps, seeds=options.seeds, mup=mup, report=print
        )
        print(f'\n{as_text(name, found[name])}')
    if out is not None:
        write_output(out, chart_picture(as_chart(found, options.steps), '.' + out.rpartition('.')[2]))
        print(f'\nwrote {out}')
    worst = max(slopes(found['muP']).items(), key=lambda item: abs(item[1]))
    if abs(worst[1]) > options.tolerance:
        print(f'\n{worst[0]} depends on the width: slope {worst[1]:+.2f}, more than {options.tolerance:g}')
        return 1
    return 0
