"""Words that the pages and the source do not use, because they have to be read twice or have a plainer name."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PLAINER = {
    r'\btold\b': 'report, print, set: what happens, not who hears of it',
    r'\btells? (?:you|the user)\b': 'report, print, show',
    r'\b(?:says?|said) so\b': 'report it, or name the key or the line',
    r'\bso many\b': 'the number: the first N, at most N, `count` of them',
    r'\bfor so long\b': 'the time: longer than this',
    r'\bwhat becomes of\b': 'what happens to',
    r'\bshar(?:e|es|ed|ing) out\b': 'shard, divide',
    r'\bwho stands\b': 'which slot, which device',
    r'\bafter so many\b': 'after N',
}
PAGES = [
    'README.md',
    'CONTRIBUTING.md',
    *(str(page.relative_to(REPOSITORY)) for page in REPOSITORY.glob('docs/**/*.md')),
]
SOURCES = [str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / 'src').rglob('*.py'))]


def found_in(text):
    """The lines of a text with such a word, and what to write."""
    plain = re.sub(r'\s*\n[ #]*', ' ', text)  # a phrase may be in two lines
    return [
        f'{plain[max(match.start() - 40, 0) : match.end() + 20]}  ->  {better}'
        for pattern, better in PLAINER.items()
        for match in re.finditer(pattern, plain, re.IGNORECASE)
    ]


@pytest.mark.parametrize('files', [PAGES, SOURCES], ids=['pages', 'source'])
def test_no_word_has_a_plainer_name(files):
    found = {file: lines for file in files if (lines := found_in((REPOSITORY / file).read_text()))}
    assert not found


def test_a_phrase_in_two_lines_is_found():
    assert found_in('stops after so\n    # many steps')
    assert not found_in('as many as there are; shard the weights; told_you = 1')
