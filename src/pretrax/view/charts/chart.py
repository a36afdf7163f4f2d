"""What a chart shows, whichever way it is drawn: lines in panels that share their x axis."""

import dataclasses
import math
from collections.abc import Sequence

# After Okabe and Ito 2008: distinguishable for color-blind readers, and dark enough for lines on white.
COLORS = ('#0072b2', '#d55e00', '#00805f', '#b3598d', '#a87000', '#2f8fc4', '#5b5f6b', '#7a5cc0')
MARKED = 60  # a line of at most as many points, such as evaluations, has a mark at each


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of finite points. `x`, `y`: of the same length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    smoothed: Sequence[float] | None = None  # the smoothed values, as many as `y`; None: not smoothed
    color: int = 0  # number of the color; lines of one run share theirs
    style: int = 0  # number of the line style; lines of one key share theirs
    left_out: str = ''  # number of points that cannot be drawn, and why: '1 not finite'; '' if there is none

    @property
    def label(self) -> str:
        """The name with what was left out."""
        return f'{self.name} ({self.left_out})' if self.left_out else self.name


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines with one y axis. `is_fraction`: the axis is in percent."""

    title: str
    lines: Sequence[Line]
    is_fraction: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Panels, one below another."""

    panels: Sequence[Panel]
    x_label: str = 'step'
    log_x: bool = False
    log_y: bool = False

    def legend(self) -> list[Line]:
        """The lines of the legend: of lines that look the same, the first."""
        lines = [line for panel in self.panels for line in panel.lines]
        by_look = {(line.color, line.style): line for line in reversed(lines)}
        return [by_look[look] for look in dict.fromkeys((line.color, line.style) for line in lines)]

    def titles(self) -> list[str]:
        """The title of each panel, with what is left out of lines that are not in the legend."""
        shown = list(map(id, self.legend()))
        return [
            ', '.join([panel.title, *(line.label for line in panel.lines if line.left_out and id(line) not in shown)])
            for panel in self.panels
        ]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers at equal distances that enclose [low, high]."""
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    distance = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)
    return [i * distance for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers for a logarithmic axis that enclose [low, high], both above zero."""
    if high / low < 4:
        return [tick for tick in ticks(low, high, count) if tick > 0] or [low / 2, low * 2]
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last - first > 2:
        distance = math.ceil((last - first) / count)
        return [10.0**power for power in range(first, last + distance, distance)]
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    below = max(tick for tick in every if tick <= low * (1 + 1e-9))
    above = min(tick for tick in every if tick >= high * (1 - 1e-9))
    return [tick for tick in every if below <= tick <= above]


def number_text(value: float, is_fraction: bool = False, digits: int = 6) -> str:
    """A number at an axis: a fraction in percent, a large number with M, B or T."""
    if is_fraction:
        return f'{100 * value:.{digits}g}%'
    for size, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
        if abs(value) >= size:
            return f'{value / size:.{digits}g}{letter}'
    return f'{value:.{digits}g}'
