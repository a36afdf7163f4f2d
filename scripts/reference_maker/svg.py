"""A few shapes of SVG, as text. The pictures are white, so that they can be read on a dark page too."""

import re
from xml.sax.saxutils import escape

INK, GREY, PALE = '#1f2933', '#667788', '#e4e8ee'
COLORS = {'r': '#c2410c', 'p': '#7e22ce', 'd': '#1d4ed8', 'e': '#4d7c0f', 'c': '#0f766e', 't': '#be123c'}


def document(width: int, height: int, shapes: list[str], label: str) -> str:
    """A file with these shapes; `label` describes the picture to those who cannot see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}" font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" '
        'font-size="13">'
    )
    background = f'<rect width="{width}" height="{height}" rx="6" fill="white"/>'
    return '\n'.join([head, background, *shapes, '</svg>\n'])


def text(
    x: float, y: float, words: str, *, fill: str = INK, size: float = 13, weight: int = 400, anchor: str = 'start'
) -> str:
    """A line of text; y is its baseline."""
    bold = f' font-weight="{weight}"' if weight != 400 else ''
    where = f' text-anchor="{anchor}"' if anchor != 'start' else ''
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size:g}"{bold}{where}>{escape(words)}</text>'


def type_text(x: float, y: float, spec: str, axis: str, *, size: float = 12) -> str:
    """A type in a fixed-width font, with an axis in its color."""
    marked = re.sub(rf'/({axis})(?![\w])', rf'/<tspan fill="{COLORS[axis]}" font-weight="700">\1</tspan>', escape(spec))
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{INK}" font-size="{size:g}" xml:space="preserve" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace">{marked}</text>'
    )


def rectangle(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str = 'none',
    line: str = 'none',
    thick: float = 1,
    radius: float = 2,
) -> str:
    """A rectangle."""
    stroke = f' stroke="{line}" stroke-width="{thick:g}"' if line != 'none' else ''
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"{stroke}/>'
