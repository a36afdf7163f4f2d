"""Finds phrases in pages, docstrings, messages, tables and names that are read twice, and prints what to write instead.

    uv run python scripts/check_english.py

Exits with code 1 if there is one.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
# Pattern -> what to write instead
PLAINER = {
    r'\btold\b': 'report, print, set: what happens, not who hears of it',
    r'\btells? (?:you|the user)\b': 'report, print, show',
    r'\b(?:says?|said) so\b': 'report it, or name the key or the line',
    r'\bso many\b': 'the number: the first N, at most N, `count` of them',
    r'\bfor so long\b': 'the time: longer than this',
    r'\bwhat becomes of\b': 'what happens to',
    r'\bshar(?:e|es|ed|ing) out\b': 'shard, divide',
    r'\bwho stands\b': 'which slot, which device',
    r'\blikewise\b': 'name the subject again',
    r'\bin force\b': 'current: the current mesh',
    r'\bsome(?:body|one) else\b': 'another user, another process',
    r'\bin company\b|\bwithout company\b': 'with other requests, without them',
    r'\b(?:an?|its|their|the) fates?\b': 'how it is handled, what happens to it',
    r'(?<!there )\b(?:is|are|was|were) no (?!longer\b|\w+er\b|more\b|less\b|index yet\b)\w+': 'is not a, does not',
    r'(?<!run it )(?<!is )(?<!trained )(?<!to train )(?<!student )(?<!trains )\balone\b': 'only; without the others',
    r'(?:^|[.|] )(?-i:Of) (?!course\b|\w+ \w+:)\w+': 'the subject first: the sum of each row, not of each row the sum',
}
# The first words of docstrings and help that leave the subject out -> what to write instead
OPENINGS = {
    'Of': 'name what it is: the digest of ...',
    'Those': 'name them: the nodes that ...',
    'Such': 'name what it is: the state of ..., such as ...',
    'The same': 'name what it does: reads, returns, the value of ...',
    'Likewise': 'name the subject again',
}
# file: {phrase: reason}
ALLOWED = {
    'src/pretrax/run/processes.py': {"trains ' f'alone": 'the process is alone'},
}


def phrases(text: str) -> Iterator[str]:
    """The phrases of a text with a plainer equivalent, and the equivalent."""
    plain = re.sub(r'\s*\n[ #]*', ' ', text)  # a phrase may be in two lines
    for pattern, better in PLAINER.items():
        for match in re.finditer(pattern, plain, re.IGNORECASE):
            yield f'{plain[max(match.start() - 40, 0) : match.end() + 20]}  ->  {better}'


def names_and_openings(source: str) -> Iterator[str]:
    """The functions of a module whose name begins with 'of', and docstrings and help that leave their subject out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.strip('_').split('_')[0] == 'of':
            yield f'def {node.name}  ->  a verb, or a noun for what it returns'
        opening = ''
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            opening = ast.get_docstring(node) or ''
        elif isinstance(node, ast.keyword) and node.arg == 'help' and isinstance(node.value, ast.Constant):
            opening = str(node.value.value)
        for words, better in OPENINGS.items():
            if re.match(rf'{words}\b', opening):
                yield f'{opening[:60]}  ->  {better}'


def problems() -> dict[str, list[str]]:
    """The problems of each file."""
    pages = [REPOSITORY / 'README.md', REPOSITORY / 'CONTRIBUTING.md', *REPOSITORY.glob('docs/**/*.md')]
    found = {}
    for path in [*pages, *(REPOSITORY / 'src').rglob('*.py'), *(REPOSITORY / 'src').rglob('*.yaml')]:
        name = str(path.relative_to(REPOSITORY))
        text = path.read_text()
        text = re.sub(r'^```.*?^```', '', text, flags=re.DOTALL | re.MULTILINE) if path.suffix == '.md' else text
        lines = [*phrases(text), *(names_and_openings(text) if path.suffix == '.py' else ())]
        allowed = ALLOWED.get(name, {})
        if lines := [line for line in lines if not any(phrase in line for phrase in allowed)]:
            found[name] = lines
    return found


if __name__ == '__main__':
    found = problems()
    for name, lines in found.items():
        print(f'{name}:', *lines, sep='\n    ')
    sys.exit(1 if found else 0)
