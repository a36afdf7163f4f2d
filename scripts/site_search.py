"""A hook of mkdocs: a search for a key, a verb or a metric finds its row of the reference first."""

from typing import Any

WEIGHTS = {'reference/keys.md': 4, 'reference/verbs.md': 3, 'reference/metrics.md': 3, 'lab-notes.md': 0.5}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Weighs the pages of a search."""
    if weight := WEIGHTS.get(page.file.src_uri):
        page.meta['search'] = {'boost': weight}
    return markdown
