"""The templates of pages, which escape what they are given."""

import functools
from typing import TYPE_CHECKING

from pretrax.errors import printable
from pretrax.view.definitions import COMPARISONS, definition_of

if TYPE_CHECKING:
    import jinja2


@functools.cache
def template(name: str) -> 'jinja2.Template':
    """A template by its path in this package, such as 'charts/page.html', the page with one chart, which others extend.

    Its filters give definitions: `definition` that of a key of metrics, `term` also that of a term of comparisons.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=jinja2.PackageLoader('pretrax.view', ''),
        finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters['definition'] = definition_of
    environment.filters['term'] = lambda term: COMPARISONS.get(term) or definition_of(term)
    return environment.get_template(name)
