"""Writes the pages in docs/reference/ and the pictures that are made from the source:

    uv run python scripts/make_reference.py

The files are committed. tests/docs/test_reference.py makes them again and compares.
"""

import functools
from collections.abc import Callable
from pathlib import Path

from reference_maker import api, errors, keys, metrics, parts, pictures, verbs

DOCS = Path(__file__).parents[1] / 'docs'
COMMAND = 'uv run python scripts/make_reference.py'
NOTE = f'<!-- Made by `{COMMAND}` from the source; a change here is lost. -->\n\n'

PAGES: dict[str, Callable[[], str]] = {
    'reference/keys.md': keys.page,
    'reference/verbs.md': verbs.page,
    'reference/metrics.md': metrics.page,
    'reference/errors.md': errors.page,
    'reference/api.md': api.page,
}
PICTURES: dict[str, Callable[[], str]] = {
    'images/parts.svg': parts.picture,
    'images/mesh.svg': pictures.mesh,
    **{f'images/axis-{axis}.svg': functools.partial(pictures.of_axis, axis) for axis in pictures.AXES},
}


def made(name: str) -> str:
    """The text of a file, by its path below docs/."""
    return NOTE + PAGES[name]() if name in PAGES else PICTURES[name]()


def main() -> None:
    for name in (*PAGES, *PICTURES):
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(made(name))
        print(path)


if __name__ == '__main__':
    main()
