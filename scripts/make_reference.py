"""Writes the pages of the reference into a directory, or the pictures of the source into docs/images/:

    uv run python scripts/make_reference.py DIRECTORY
    uv run python scripts/make_reference.py

The site has the pages, which scripts/site_hooks.py generates when it is built. The pictures are committed;
tests/docs/test_reference.py draws them again and compares.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reference_maker import api, errors, keys, metrics, owners, parts, pictures, verbs

COMMAND = 'uv run python scripts/make_reference.py'
IMAGES = Path(__file__).parents[1] / 'docs' / 'images'
PAGES: dict[str, Callable[[], str]] = {
    'keys.md': keys.page,
    'verbs.md': verbs.page,
    'metrics.md': metrics.page,
    'errors.md': errors.page,
    'api.md': api.page,
}
PICTURES: dict[str, Callable[[], str]] = {
    'parts.svg': parts.picture,
    'mesh.svg': pictures.mesh,
    'owners.svg': owners.picture,
    **{f'axis-{axis}.svg': functools.partial(pictures.of_axis, axis) for axis in pictures.AXES},
}


def main(arguments: Sequence[str]) -> None:
    directory, makers = (Path(arguments[0]), PAGES) if arguments else (IMAGES, PICTURES)
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        (directory / name).write_text(make())
        print(directory / name)


if __name__ == '__main__':
    main(sys.argv[1:])
