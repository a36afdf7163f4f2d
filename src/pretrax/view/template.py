"""The templates of pages in one file, which escape what they are given."""

import functools
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from pretrax.errors import printable
from pretrax.page_kit import script_text
from pretrax.view.definitions import COMPARISONS, definition_of

if TYPE_CHECKING:
    import jinja2


_NUMBER = re.compile(r'[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[A-Za-zµ/]+))?')


def filled_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns of a table that are not empty."""
    return [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]


def number_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns after the first that have numbers only, with their units."""
    columns = [[str(cell) for cell in column if cell] for column in zip(*rows, strict=True)]
    return [i for i, cells in enumerate(columns) if i and cells and all(map(_NUMBER.fullmatch, cells))]


@functools.cache
def template(name: str) -> 'jinja2.Template':
    """A template by its path in this package or in `page_kit`: 'document.html', which the pages extend.

    Its filters give definitions: `definition` that of a key of metrics, `term` also that of a term of comparisons.
    `filled_columns` and `number_columns` give columns of a table. `code` makes elements of what is between backticks.
    `script` gives a script of this package with the modules of the kit that it imports.
    """
    import jinja2
    from markupsafe import Markup, escape

    places = [jinja2.PackageLoader(package, '') for package in ('pretrax.view', 'pretrax.page_kit')]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(places),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.globals['script'] = lambda path: Markup(script_text(files('pretrax.view').joinpath(path)))
    environment.filters |= {'filled_columns': filled_columns, 'number_columns': number_columns}
    environment.filters['code'] = lambda text: Markup(re.sub('`(.*?)`', r'<code>\1</code>', escape(printable(text))))
    environment.filters['definition'] = definition_of
    environment.filters['term'] = lambda term: COMPARISONS.get(term) or definition_of(term)
    return environment.get_template(name)
