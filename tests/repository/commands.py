"""Checks that a command in a file of the repository would start:
its program, its flags, and the files it names exist.
"""

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
GROUPS = tomllib.loads((REPOSITORY / 'pyproject.toml').read_text())['dependency-groups']
UV_RUN = re.compile(r'uv run ((?:--isolated|--locked|--only-group (?P<group>\w+)) )*')


def check_line(line: str) -> None:
    """Checks each command of a line of a shell: `a && b > file`."""
    for command in re.split(r' && | \|\| ', line):
        check_command(command)


def check_command(command: str) -> None:
    """Raises AssertionError if the command names what does not exist."""
    command = re.sub(r' > \S+$', '', command.strip())
    if command.startswith('rm '):
        return
    uv = UV_RUN.match(command)
    words = shlex.split(command[uv.end() :] if uv else command)
    if uv and uv['group']:  # in an environment of its own: what the group installs
        assert any(package.startswith(words[0]) for package in GROUPS[uv['group']]), command
        return
    check_words(words)


def check_words(words: list[str]) -> None:
    if words[0] in ('uv', 'uvx'):
        check_flags(words[:2], words[2:]) if words[0] == 'uv' else None
        return
    if words[0] == 'python':
        if words[1] != '-m':
            assert (REPOSITORY / words[1]).is_file(), words
            return
        assert importlib.util.find_spec(words[2]), words
        words = words[2:]
    program = words[:1]
    if '/' in program[0]:
        assert os.access(REPOSITORY / program[0], os.X_OK), words
        return
    rest = words[1:]
    while rest and program[0] in ('pretrax', 'ruff', 'just') and re.fullmatch('[a-z-]+', rest[0]) and rest[0][0] != '-':
        program, rest = [*program, rest[0]], rest[1:]
        if program[0] == 'ruff':
            break
    check_flags(program, rest)


def check_flags(program: list[str], words: list[str]) -> None:
    shown = help_of(*program)
    for word in words:
        if word.startswith('-'):
            assert re.search(rf'(?<![\w-]){re.escape(word.partition("=")[0])}(?![\w-])', shown), (program, word)
        elif re.fullmatch(r'[\w.-]+(/[\w.-]+)+', word) and '=' not in word:
            assert (REPOSITORY / word).exists(), word


@functools.cache
def help_of(*program: str) -> str:
    """What the program prints about its flags."""
    own = Path(sys.executable).parent / program[0]
    words = [str(own) if own.exists() else program[0], *program[1:], '--help']
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {'COLUMNS': '200'})
    assert done.returncode == 0, f'{" ".join(words)}\n{done.stdout}{done.stderr}'
    return done.stdout
