"""What the time of a run was spent on, for people. The division is that of `observe/goodput.py`."""

from collections.abc import Mapping

from pretrax.view.definitions import DEFINITIONS, Definition

FAMILY = 'seconds/'  # the keys of metrics that have the seconds of a cause


def shares(seconds: Mapping[str, float]) -> list[tuple[Definition, float, str]]:
    """The causes that took time, the longest first, each with its seconds and its share in percent."""
    total, longest = sum(seconds.values()), sorted(seconds, key=seconds.__getitem__, reverse=True)
    return [(DEFINITIONS[FAMILY + cause], n, f'{n / total:.1%}') for cause in longest if (n := seconds[cause]) > 0]


def shares_text(seconds: Mapping[str, float], most: int = 5) -> str:
    """The causes that took most of the time: 'steps kept 93.1%, compilation 4.2%'."""
    return ', '.join(f'{definition.name} {share}' for definition, _, share in shares(seconds)[:most])
