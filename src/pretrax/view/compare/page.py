"""A comparison as a page that needs no network."""

from collections.abc import Iterator

from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.charts.page import chart_figures, page_of
from pretrax.view.compare.comparison import Result, averaged, curve_of, is_sparse
from pretrax.view.compare.text import sections
from pretrax.view.definitions import definition_of

_POINTS = 2000  # of a line; more are thinned out


def compare_page(result: Result) -> str:
    """The comparison as an HTML document."""
    return page_of(
        'compare/page.html',
        chart_figures(comparison_chart(result)),
        kind='comparison',
        title=' and '.join(arm.label for arm in result.arms),
        sections=sections(result),
        curves=_keys(result),
    )


def comparison_chart(result: Result) -> Chart:
    """The curves of all runs, in the color of their arm: the compared key, and below it the training loss."""
    return Chart([Panel(_title(key), list(_lines(result, key))) for key in _keys(result)], result.x_name)


def _lines(result: Result, key: str) -> Iterator[Line]:
    ends = [one.end for one in result.comparisons if one.end == one.end]
    for number, arm in enumerate(result.arms):
        for run in arm.runs:
            curve = curve_of(run, key, result.x_name)
            if len(curve.x):
                smooth = averaged(curve, key, 0.05 * max([*ends, float(curve.x[-1])]))
                thinned = slice(None, None, -(-len(curve.x) // _POINTS))
                left_out = f'{curve.nonfinite} not finite' if curve.nonfinite else ''
                x, y = curve.x[thinned].tolist(), curve.y[thinned].tolist()
                yield Line(
                    arm.label, x, y, None if is_sparse(key) else smooth[thinned].tolist(), number, 0, left_out=left_out
                )


def _title(key: str) -> str:
    unit = definition_of(key).unit
    return key + (f' ({unit})' if unit else '') + ('' if is_sparse(key) else ', points and means over 5% of the run')


def _keys(result: Result) -> list[str]:
    runs = [run for arm in result.arms for run in arm.runs]
    return [key for key in dict.fromkeys([result.key, 'loss']) if all(key in run.metrics for run in runs)]
