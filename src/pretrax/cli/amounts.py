"""Bytes and seconds as a person reads them."""


def in_bytes(n: float) -> str:
    """Such as '1.2 GB'."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if n < 1000:
            return f'{n:.0f} B' if unit == 'B' else f'{n:.3g} {unit}'
        n /= 1000
    return f'{n:,.3g} TB'


def ago(seconds: float) -> str:
    """Such as '3 h ago'."""
    for unit, size in (('d', 86400), ('h', 3600), ('min', 60)):
        if seconds >= size:
            return f'{seconds / size:.0f} {unit} ago'
    return f'{max(seconds, 0):.0f} s ago'
