"""Amounts as people read them: counts, sizes and times, and names in the order of the numbers in them."""

import re


def natural_order(name: str) -> list[tuple[int, str]]:
    """The order in which run-2 comes before run-10."""
    return [(int(part), '') if part.isdecimal() else (-1, part) for part in re.split(r'([0-9]{1,18})', name)]


def prefixed(number: float, unit: str = '', space: str = ' ') -> str:
    """1_310_000 -> '1.31 M': three digits, since more would be noise, and the prefix of a power of 1000."""
    for prefix in ('', 'k', 'M', 'G', 'T', 'P', 'E'):
        if abs(number) < 999.5:
            return f'{number:.3g}{space if prefix + unit else ""}{prefix}{unit}'
        number /= 1000
    return f'{number * 1e21:.3g}{space if unit else ""}{unit}'


def size(n_bytes: float) -> str:
    """1_500_000_000 -> '1.5 GB', decimal, as in data sheets."""
    return prefixed(n_bytes, 'B')


def clock_text(seconds: float) -> str:
    """42 -> '0:42', 3700 -> '1:01:40', 200_000 -> '2d 7:33:20'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f'{minute}:{second:02}'
    return (f'{days}d ' if days else '') + f'{hour}:{minute:02}:{second:02}'


def age(seconds: float) -> str:
    """A time in its largest unit: '12 s', '3 min', '5 h', '2 d'."""
    for length, unit in ((86400, 'd'), (3600, 'h'), (60, 'min')):
        if seconds >= length:
            return f'{seconds // length:.0f} {unit}'
    return f'{max(seconds, 0) // 1:.0f} s'


def duration(seconds: float) -> str:
    """A time in its two largest units: 5025 -> '1 h 23 min', 0.05 -> '50 ms'."""
    if seconds < 0.0995:
        return f'{seconds * 1000:.2g} ms'
    if seconds < 60:
        return f'{seconds:.3g} s'
    minutes = round(seconds / 60)
    if minutes < 60:
        return f'{int(seconds // 60)} min {int(seconds % 60)} s'
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes} min' if hours < 48 else f'{hours // 24} d {hours % 24} h'


def short_time(seconds: float) -> str:
    """0.00123 -> '1.23 ms', as of kernels; three digits."""
    for factor, unit in ((1.0, 's'), (1e3, 'ms'), (1e6, 'us')):
        if seconds * factor >= 0.9995:
            return f'{_digits(seconds * factor)} {unit}'
    return f'{_digits(seconds * 1e9)} ns' if seconds else '0'


def _digits(value: float) -> str:
    return f'{value:#.3g}'.rstrip('.') if value < 999.5 else f'{value:,.0f}'
