"""The page of verbs, from the declarations of the command line."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from pretrax import errors
from pretrax.cli import _pretrax
from pretrax.cli._verbs import Group
from reference_maker.markdown import code, prose, table

INTRODUCTION = """\
# Commands

`pretrax VERB --help` prints what this page says of a verb. Arguments of the form `KEY=VALUE` change the
[configuration](../configuration.md); [Keys](keys.md) lists the keys. Options of the form `--flag` belong to the verb.
In the repository, write `uv run` before `pretrax`.

`pretrax --version` prints the version. `pretrax --install-completion` lets your shell complete verbs and options.

## Exit codes

| code | meaning |
|---|---|
"""
# What `--help` prints for a type of value without a name of its own, and what this page writes.
VALUES = {'int': 'INTEGER', 'float': 'NUMBER', 'str': 'TEXT', 'list[str]': 'TEXT', 'path': 'PATH'}
CODES = {
    errors.DONE: 'done, or stopped as asked: by Ctrl-C or SIGTERM, after the state was saved',
    1: 'an exception, with its traceback: a bug. Verbs that compare or check exit with 1 if the result is bad, as '
    'their '
    'description says',
    errors.MISTAKE: 'a mistake in the command, a file or the configuration; the message has at most ten lines and '
    'names the '
    'fix. The same command would fail again',
    errors.TRY_AGAIN: 'start the same command again to continue: a time limit, a hang, a lost process, or a bucket '
    'that did '
    'not answer',
    130: 'Ctrl-C before there was something to save',
}


def page() -> str:
    """The whole page."""
    rows = ''.join(f'| {number} | {meaning} |\n' for number, meaning in CODES.items())
    return INTRODUCTION + rows + '\n' + '\n'.join(_sections(command(), ('pretrax',)))


def command() -> Any:
    """The command `pretrax`."""
    app = typer.Typer(rich_markup_mode=None)
    app.callback(cls=Group, invoke_without_command=True, no_args_is_help=True)(_pretrax)
    return typer.main.get_command(app)


def _sections(group: Any, words: tuple[str, ...]) -> Iterator[str]:
    context = group.make_context(words[-1], [], resilient_parsing=True)
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        line = ' '.join([*words, name])
        if isinstance(verb, Group):
            yield f'## {line}\n\n{prose(inspect.cleandoc(verb.help or ""))}\n'
            yield from _sections(verb, (*words, name))
            continue
        level = '##' if len(words) == 1 else '###'
        inside = verb.make_context(line, [], resilient_parsing=True)
        shown = [record for each in verb.params if (record := each.get_help_record(inside)) and each.name != 'help']
        usage = re.sub(r'\{([^}]*?)(?:\.\.\.)?\}', r'\1', ' '.join(verb.collect_usage_pieces(inside)))
        usage = usage.removeprefix('[OPTIONS]').strip()
        yield f'{level} {line}\n\n{prose(inspect.cleandoc(verb.help or ""))}\n'
        yield code(f'{line} {usage}'.strip()) + '\n'
        if shown:
            yield table(('argument or option', 'default', 'meaning'), [_row(*each) for each in shown])


def _row(usage: str, text: str) -> tuple[str, str, str]:
    """The cells of an argument or option, from what `--help` prints of it."""
    name, _, value = usage.partition(' ')
    for written, shown in VALUES.items():
        value = re.sub(rf'<{re.escape(written)}[^>]*>', shown if name.startswith('-') else '', value)
    value = re.sub(r'<([\w|]+)>', r'\1', value)
    facts = [part for group in re.findall(r'\[([^][]*)\]\s*$|\[(default: [^][]*)\]', text) for part in group if part]
    text = re.sub(r'\[[^][]*\]\s*$|\[default: [^][]*\]', '', re.sub(r'\[[^][]*\]\s*$', '', text)).strip()
    default, limits = '', []
    for fact in '; '.join(facts).split('; '):
        if fact.startswith('default: '):
            default = fact.removeprefix('default: ')
        elif fact == 'required':
            default = fact
        elif fact and (set(fact) & set('<>=')):
            limits.append(_limit(fact))
        elif fact:  # the rest of a default that is a sentence
            default += f'; {fact}'
    meaning = ' '.join([prose(text), *limits])
    return code(f'{name} {value}'.strip()), re.sub(r'^\((.*)\)$', r'\1', default), meaning


def _limit(text: str) -> str:
    """`x>=1` in words."""
    low, high = re.fullmatch(r'(?:([\d.]+)<=)?x(?:<=([\d.]+))?|x>=[\d.]+', text), text.partition('>=')[2]
    if high:
        return f'At least {high}.'
    assert low, text
    return f'From {low[1]} to {low[2]}.' if low[1] and low[2] else f'At most {low[2]}.'
