"""Bars with labels, as text for a terminal or as SVG."""

import html
from collections.abc import Mapping, Sequence

from pretrax.observe.plot import COLORS


def bars_text(labels: Sequence[str], values: Sequence[int], width: int = 80) -> list[str]:
    """One line per value: its label, a bar relative to the largest value, and the value."""
    margin, figures = max(map(len, labels)), max(len(f'{value:,}') for value in values)
    room = max(width - margin - figures - 4, 10)
    most = max(*values, 1)
    # Every value above zero has at least one mark.
    marks = ['#' * max(round(value / most * room), min(value, 1)) for value in values]
    return [
        f'{label:>{margin}} |{mark:<{room}} {value:>{figures},}'
        for label, mark, value in zip(labels, marks, values, strict=True)
    ]


def bars_svg(series: Mapping[str, tuple[Sequence[str], Sequence[int]]], title: str, foot: str) -> str:
    """An SVG document with the bars of each series of (labels, values), one series below another."""
    left, top, row, bar, panel = 110, 50, 20, 560, 34
    height = top + sum(panel + row * len(labels) for labels, _ in series.values()) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" width="800" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="800" height="{height}" fill="white"/>',
        f'<text x="20" y="26" font-weight="bold">{html.escape(title)}</text>',
    ]
    y = top
    for (name, (labels, values)), color in zip(series.items(), COLORS, strict=False):
        parts.append(f'<text x="{left}" y="{y + 12}" fill="{color}">{html.escape(name)}</text>')
        y += panel - 14
        for label, value in zip(labels, values, strict=True):
            length = value / max(*values, 1) * bar
            parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>')
            parts.append(f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="{row - 5}" fill="{color}"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{value:,}</text>')
            y += row
        y += 14
    parts.append(f'<text x="{left}" y="{y + 10}" fill="#555">{html.escape(foot)}</text>')
    return '\n'.join([*parts, '</svg>', ''])
