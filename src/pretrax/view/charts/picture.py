"""Charts as pictures, drawn by Matplotlib. The same chart gives the same bytes."""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretrax.errors import printable
from pretrax.system.software import need_extra
from pretrax.view.charts.chart import COLORS, MARKED, Chart, Panel, log_ticks, number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = ('.png', '.svg', '.pdf')
_STYLES = ('solid', (0, (5, 2)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
_SETTINGS: Any = {
    'svg.fonttype': 'none',  # text stays text
    'svg.hashsalt': 'pretrax',
    'text.parse_math': False,  # names may have dollar signs
    'axes.unicode_minus': False,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.color': '#dddddd',
    'grid.linewidth': 0.6,
    'lines.linewidth': 1.6,
    'font.size': 10,
}
_WIDTH = 9.0  # inches
_LONGEST = 90  # characters of a name


def chart_picture(chart: Chart, suffix: str) -> bytes:
    """The content of a .png, .svg or .pdf file."""
    labels = [_shown(line.label) for line in chart.legend()]
    columns = max(1, min(len(labels), 110 // (max(map(len, labels)) + 8)))
    height = 4.6 if len(chart.panels) == 1 else 2.8 * len(chart.panels)

    def draw(figure: 'Figure') -> None:
        rows = figure.subplots(len(chart.panels), sharex=True, squeeze=False)
        for number, ((axes,), panel, title) in enumerate(zip(rows, chart.panels, chart.titles(), strict=True)):
            axes.set_title(_shown(title), loc='left', fontsize=10, fontweight='bold')
            _draw_panel(axes, panel, chart, number)
        rows[-1][0].set_xlabel(_shown(chart.x_label))
        _legend(figure, chart, columns)

    return figure_bytes(draw, suffix, height + 0.2 * len(labels) / columns)


def bars_picture(series: Mapping[str, tuple[Sequence[str], Sequence[int]]], title: str, foot: str) -> bytes:
    """An .svg with the bars of each series of (labels, values), one series below another."""
    heights = [len(labels) + 1 for labels, _ in series.values()]

    def draw(figure: 'Figure') -> None:
        figure.suptitle(_shown(title), fontsize=11)
        rows = figure.subplots(len(series), squeeze=False, height_ratios=heights)
        for number, ((axes,), (name, (labels, values))) in enumerate(zip(rows, series.items(), strict=True)):
            bars = axes.barh(range(len(values)), values, color=COLORS[number % len(COLORS)])
            axes.bar_label(bars, [f'{value:,}' for value in values], padding=3)
            axes.set_yticks(range(len(labels)), [_shown(label) for label in labels])
            axes.invert_yaxis()
            axes.grid(visible=False)
            axes.set_title(_shown(name), loc='left', fontsize=10)
            axes.set_xlim(0, 1.12 * max(*values, 1))
            axes.xaxis.set_major_formatter(lambda value, _: f'{value:,.0f}')
        rows[-1][0].set_xlabel(_shown(foot))

    return figure_bytes(draw, '.svg', 0.8 + 0.25 * sum(heights))


def need_pictures(suffix: str) -> None:
    """Raises UserError if Matplotlib is not installed: check it before long work."""
    need_extra('pictures', f'a chart in a {suffix} file', 'matplotlib')


def figure_bytes(draw: Callable[['Figure'], None], suffix: str, height: float) -> bytes:
    """The content of a .png, .svg or .pdf file that `draw` draws; `height` in inches."""
    need_pictures(suffix)
    import matplotlib
    from matplotlib.figure import Figure

    content = io.BytesIO()
    date = {'.svg': {'Date': None}, '.pdf': {'CreationDate': None}}.get(suffix, {})
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        figure = Figure(figsize=(_WIDTH, height), layout='constrained')
        draw(figure)
        warnings.filterwarnings('ignore', 'Glyph .* missing from font')
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=date)
    return content.getvalue()


def _draw_panel(axes: 'Axes', panel: Panel, chart: Chart, number: int) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter

    for i, line in enumerate(panel.lines):
        color, style = COLORS[line.color % len(COLORS)], _STYLES[line.style % len(_STYLES)]
        marker = 'o' if len(line.x) <= MARKED else None
        if line.smoothed is not None:
            axes.plot(line.x, line.y, color=color, alpha=0.25, linewidth=0.9)  # the points, pale
        values = line.y if line.smoothed is None else line.smoothed
        axes.plot(line.x, values, color=color, linestyle=style, marker=marker, markersize=3.5, gid=f'line-{number}-{i}')
    if chart.log_x:
        axes.set_xscale('log')
    if chart.log_y:
        axes.set_yscale('log')
    scales = (axes.xaxis, chart.log_x, False), (axes.yaxis, chart.log_y, panel.is_fraction)
    for line_axis, is_log, is_fraction in scales:
        if is_log:
            line_axis.set_major_locator(FixedLocator(log_ticks(*line_axis.get_data_interval())))
            line_axis.set_minor_formatter(NullFormatter())
        line_axis.set_major_formatter(lambda value, _, is_fraction=is_fraction: number_text(value, is_fraction))


def _legend(figure: 'Figure', chart: Chart, columns: int) -> None:
    """One legend below all panels."""
    drawn = [artist for axes in figure.axes for artist in axes.lines if artist.get_alpha() is None]
    lines = [id(line) for panel in chart.panels for line in panel.lines]
    entries = chart.legend()
    handles = [drawn[lines.index(id(line))] for line in entries]
    legend = figure.legend(handles, ['' for _ in entries], loc='outside lower center', ncols=columns, frameon=False)
    for text, line in zip(legend.get_texts(), entries, strict=True):
        text.set_text(_shown(line.label))  # `legend` leaves out labels that begin with an underscore


def _shown(text: str) -> str:
    """Text in one line, shortened in the middle."""
    text = printable(text).replace('\n', ' ')
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f'{text[:half]} ... {text[-half:]}'
