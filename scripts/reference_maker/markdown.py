"""Markdown: tables, links, and the sections of a page."""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / 'docs'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a `|` in a cell is escaped."""
    lines = [head, ['---' for _ in head], *rows]
    return ''.join(
        '|' + '|'.join(f' {text} ' if (text := _cell(cell)) else ' ' for cell in line) + '|\n' for line in lines
    )


def code(text: str) -> str:
    """Text in backticks, whatever backticks it has itself."""
    if '`' not in text:
        return f'`{text}`'
    return f'`` {text} ``'


def prose(text: str) -> str:
    """Text of a docstring or a description, in which `<`, `*` and `_` are meant as they are."""

    def escape(part: str) -> str:
        part = re.sub(r'([*\[\]]|(?<!\w)_|_(?!\w))', r'\\\1', part)
        return part.replace('<', '&lt;')  # to mkdocs, `\<` is a backslash before a tag

    return ''.join(part if part.startswith('`') else escape(part) for part in re.split(r'(`[^`]*`)', text))


def section_about(page: str, *names: str) -> str | None:
    """'page.md#section' of the section that mentions one of the names in backticks most often; None if none does.

    A later name counts only if no section has the ones before it.
    """
    for name in names:
        mention = re.compile(rf'`[^`\n]*(?<![\w.]){re.escape(name)}(?![\w])[^`\n]*`')
        found = [(len(mention.findall(text)), slug) for slug, text in sections(page)]
        most = max(found, key=lambda each: each[0], default=(0, ''))
        if most[0]:
            return f'{page}#{most[1]}' if most[1] else page
    return None


def heading(target: str) -> str:
    """The heading that 'page.md#section' leads to, without backticks; the title of the page, for 'page.md'."""
    page, _, anchor = target.partition('#')
    found = [title for slug, title, _ in _sections(page) if slug == anchor]
    if anchor and not found:
        raise KeyError(f'docs/{page} has no section #{anchor}')
    return found[0].replace('`', '') if anchor else title_of(page)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """(Anchor, text) of each section of a page of docs/."""
    yield from ((slug, body) for slug, _, body in _sections(page))


@functools.cache
def _sections(page: str) -> list[tuple[str, str, str]]:
    """(Anchor as mkdocs makes it, heading, text) of each section; the anchor is '' before the first heading."""
    text = re.sub(r'^(```|~~~).*?^\1', '', (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    _, *parts = re.split(r'^#+ (.*)\n', f'# \n{text}', flags=re.MULTILINE)
    used: dict[str, int] = {}
    found = []
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        slug = re.sub(r'[-\s]+', '-', re.sub(r'[^\w\s-]', '', title).strip().lower())
        count = used[slug] = used.get(slug, -1) + 1
        found.append((f'{slug}_{count}' if count else slug, title, body))
    return found


def title_of(page: str) -> str:
    """The title of a page of docs/."""
    match = re.search(r'^# (.*)', (DOCS / page).read_text(), re.MULTILINE)
    assert match, f'{page} has no title'
    return match[1]


def _cell(text: str) -> str:
    return text.replace('|', r'\|').replace('\n', ' ')
