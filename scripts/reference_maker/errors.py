"""The index of errors: the messages in the source, with what to do and the page that explains it."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from reference_maker.markdown import code, heading, table
from reference_maker.source import calls, files

# Exceptions whose message is for the user, with the position of the message; in a Problem, the advice follows it.
MESSAGES = {
    **dict.fromkeys(('UserError', 'UnavailableError', 'DamagedError', 'SaveError', 'GcloudError', 'ShardingError'), 0),
    'Problem': 1,
}
# ValueError is a mistake of the user in the checks of options, which report it as one.
OF_OPTIONS = (
    'data/options.py',
    'data/corpus/selection.py',
    'model/rope_scaling.py',
    'train/schedule.py',
    'evaluate/task.py',
)
SHORTEST = 9  # characters of a message that do not vary; a shorter one cannot be searched for

# For each part of the source: what its messages are about, and the page that explains it.
AREAS = {
    'config': ('Configuration', 'configuration.md'),
    'data': ('Data and tokenizers', 'data.md'),
    'model': ('Models', 'models.md'),
    'huggingface': ('Checkpoints of Hugging Face', 'bring-your-model.md'),
    'train': ('Optimizers and schedules', 'configuration.md#optimizer-and-schedule'),
    'weights': ('Weights of checkpoints', 'reliability.md#starting-from-another-run'),
    'distill': ('Distillation', 'research.md#distillation'),
    'run': ('Starting and resuming runs', 'reliability.md'),
    'checkpoint': ('Checkpoints', 'reliability.md#checkpoints'),
    'federation': ('Runs that share only a bucket', 'storage.md'),
    'storage': ('Buckets', 'storage.md'),
    'plan': ('Planning and compiling ahead', 'scaling.md'),
    'hlo': ('Compiled programs', 'scaling.md'),
    'cost': ('Hardware and formulas', 'scaling.md'),
    'experiments': ('Sweeps, searches and scaling laws', 'research.md'),
    'translate': ('Configurations of other tools', 'index.md#coming-from'),
    'launch': ('Starting processes', 'clusters.md'),
    'doctor': ('Checks of machines', 'clusters.md'),
    'evaluate': ('Evaluation', 'evaluation.md'),
    'infer': ('Generating text', 'inference.md'),
    'chat': ('Chat templates', 'serving.md'),
    'serve': ('Serving', 'serving.md'),
    'view': ('Reports, comparisons and traces', 'see.md'),
    'observe': ('Metrics and trackers', 'metrics.md'),
    'system': ('Files, locks and devices of this machine', 'reliability.md'),
    'library.py': ('The Python library', 'library.md'),
    'cli': ('The command line', 'reference.md#commands'),
    'shardlib': ('shardlib', 'shardlib.md'),
}
INTRODUCTION = """\
# Errors

Messages of pretrax for mistakes that a user can fix, by area. Search this page for a part of the message that has no
name, number or path of yours: capital letters such as `PATH` stand for those, and `…` for what depends on the case. A
message has the advice in its later lines; *what to do* repeats it. The [exit code](verbs.md#exit-codes) is 2, unless a
service did not answer.

A message that begins with a key of the configuration, such as `batch.tokens is ...`, is listed without the key.

An exception with a traceback is a bug of pretrax.
"""


class Message(NamedTuple):
    """A message in the source: its first line, its other lines, and the file below src/pretrax/."""

    text: str
    advice: str
    file: str


def page() -> str:
    """The whole page."""
    found = sorted(set(messages()), key=lambda each: (_searched(each.text), each))
    parts = [INTRODUCTION]
    for area, (title, target) in AREAS.items():
        rows = [each for each in found if each.file.partition('/')[0] == area]
        if rows:
            parts.append(f'## {title}\n\nExplained in [{heading(target)}](../{target}).\n')
            parts.append(table(('message', 'what to do', 'file'), [_row(each) for each in rows]))
    return '\n'.join(parts)


def messages() -> Iterator[Message]:
    """Every message that can be searched for."""
    for file in files():
        for node in calls(file):
            name = getattr(node.func, 'id', getattr(node.func, 'attr', ''))
            at = 0 if name == 'ValueError' and file in OF_OPTIONS else MESSAGES.get(name)
            if at is None or len(node.args) <= at:
                continue
            text = _template(node.args[at])
            advice = _template(node.args[at + 1]) if name == 'Problem' and len(node.args) > at + 1 else ''
            advice = advice or next((_template(each.value) for each in node.keywords if each.arg == 'fix'), '')
            first, _, rest = text.partition('\n')
            if sum(character.islower() for character in first) >= SHORTEST:
                yield Message(_line(first), _line('; '.join(filter(None, f'{rest}\n{advice}'.split('\n')))), file)


def _template(node: ast.expr) -> str:
    """The text of a message, with names in capitals for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        text = ''
        for each in node.values:
            part = _template(each)
            is_hint = isinstance(each, ast.FormattedValue) and re.search(r'[a-z]\)?$', text) and part.isupper()
            text += '…' if is_hint else part  # a hint begins with its own separator
        return text
    if isinstance(node, ast.FormattedValue):
        return _placeholder(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == 'join':
        [lines] = node.args
        if isinstance(lines, ast.List) and isinstance(node.func.value, ast.Constant):
            return str(node.func.value.value).join(_template(each) for each in lines.elts)
    return '…'


def _placeholder(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute) and node.attr == 'strerror':
        return 'REASON'
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return name.strip('_').upper() if len(name) > 1 else 'N'
    if isinstance(node, ast.Call):
        name = getattr(node.func, 'id', getattr(node.func, 'attr', ''))
        if name in ('shown', 'len', 'str', 'repr', 'size', 'first_line') and node.args:
            return _placeholder(node.args[0]) if name != 'len' else 'N'
        if name == 'install_extra':
            return f'in the repository: uv sync --inexact --extra {_template(node.args[0])} --no-dev'
    return '…'


def _line(text: str) -> str:
    text = ' '.join(re.sub('…(\\s*…)+', '…', text).split())
    return '' if text == '…' else text


def _searched(text: str) -> str:
    """The letters of a message that do not vary."""
    return ''.join(character for character in text if character.islower())


def _row(each: Message) -> tuple[str, ...]:
    return code(each.text), code(each.advice) if each.advice else '', code(each.file)
