"""Tasks made from local text: bits per byte, cloze, multiple choice, and code that parses; and tasks without text:
arithmetic, and copying and retrieval in a context of several lengths.

Every machine has the text: it is of Python's own installation, and the built-in corpus (`text: stdlib`) leaves it out.
"""

import ast
import functools
import math
import operator
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from pretrax.errors import UserError, system_errors
from pretrax.evaluate.contamination import texts_of_files
from pretrax.evaluate.task import Document, Generate, Likelihood, Measured, Rolling, Score, Settings, Task

_EXCERPT = 2_000  # characters of a text whose bits are counted
_CHOICES = 4
_WRITTEN = 64  # tokens of code
_PLACES = ('idlelib/idle_test', 'test', 'turtledemo')  # the first that is there; some installations have no tests
_SMALLEST, _LARGEST = 2_000, 200_000  # bytes


def bits_per_byte(texts: Sequence[str], name: str, settings: Settings) -> list[Document]:
    """Excerpts of some texts: the bits of all of them over their bytes, and the loss in nats per token."""
    rng = settings.random(name)
    documents = []
    for text in rng.sample(texts, min(settings.limit, len(texts))):
        start = rng.randrange(max(1, len(text) - _EXCERPT))
        start = text.rfind('\n', 0, start) + 1  # the beginning of a line
        excerpt = text[start : start + _EXCERPT]
        documents.append(Document((Rolling(excerpt),), functools.partial(_bits_of, len(excerpt.encode()))))
    return documents


def _bits_of(n_bytes: int, answers: Sequence[Score]) -> Measured:
    nats = -answers[0].logprob
    return {'bits_per_byte': (nats / math.log(2), n_bytes), 'loss': (nats, answers[0].tokens)}


def cloze(settings: Settings) -> list[Document]:
    """The last word of a paragraph, which occurs in it before. Paperno et al. 2016, arXiv:1606.06031 (LAMBADA)."""
    found = []
    for _, text in _paragraphs():
        match = re.fullmatch(r'(.{80,600}) ([A-Za-z]{4,})\.', text)
        if match and re.search(rf'\b{match[2]}\b', match[1]):
            found.append(match.groups())
    chosen = settings.random('cloze').sample(found, min(settings.limit, len(found)))
    return [Document((Likelihood(context, f' {word}'),), _accuracy) for context, word in chosen]


def multiple_choice(settings: Settings) -> list[Document]:
    """How a paragraph goes on: its own second half, or those of paragraphs about other topics."""
    rng = settings.random('multiple_choice')
    halves = []
    for topic, text in _paragraphs():
        words = text.split(' ')
        if 24 <= len(words) <= 80:
            middle = len(words) // 2
            halves.append((topic, ' '.join(words[:middle]), ' ' + ' '.join(words[middle:])))
    documents = []
    for topic, context, right in rng.sample(halves, min(settings.limit, len(halves))):
        wrong = rng.sample([half for other, _, half in halves if other != topic], _CHOICES - 1)
        choices = (right, *wrong)
        requests = tuple(Likelihood(context, half) for half in choices)
        documents.append(Document(requests, functools.partial(_first_of, choices)))
    return documents


def code_parses(settings: Settings) -> list[Document]:
    """The body of a function after its signature: whether its whole lines parse. Nothing is executed."""
    prompts = []
    for text in _python_files():
        for node in ast.walk(_parsed(text) or ast.Module([], [])):
            if isinstance(node, ast.FunctionDef) and node.body and node.body[0].lineno > node.lineno:
                lines = textwrap.dedent('\n'.join(text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]))
                if lines.startswith('def ') and lines.rstrip().endswith(':') and len(lines) < 200:
                    prompts.append(lines.rstrip() + '\n    ')
    prompts = sorted(set(prompts))
    chosen = settings.random('code_parses').sample(prompts, min(settings.limit, len(prompts)))

    def measure(prompt: str, answers: Sequence[str]) -> Measured:
        return {'parses': (float(parses(prompt, answers[0])), 1.0)}

    stops = ('\ndef ', '\nclass ')
    return [Document((Generate(one, _WRITTEN, stops),), functools.partial(measure, one)) for one in chosen]


def parses(prompt: str, answer: str) -> bool:
    """Whether the prompt and the whole lines of the answer are Python. The last line counts if it is the only one."""
    whole = answer[: answer.rfind('\n')] if '\n' in answer.strip('\n') else answer
    return _parsed(prompt + whole) is not None


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # such as an invalid escape sequence
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _accuracy(answers: Sequence[Score]) -> Measured:
    """Whether the continuation is what the model would write, and its log probability."""
    return {'accuracy': (float(answers[0].is_greedy), 1.0), 'logprob': (answers[0].logprob, 1.0)}


def _first_of(choices: Sequence[str], answers: Sequence[Score]) -> Measured:
    """Whether the first choice is the likeliest, also per byte: `acc` and `acc_norm` of lm-evaluation-harness."""
    logprobs = [answer.logprob for answer in answers]
    by_byte = [logprob / len(choice.encode()) for logprob, choice in zip(logprobs, choices, strict=True)]
    return {
        'accuracy': (float(logprobs.index(max(logprobs)) == 0), 1.0),
        'accuracy_per_byte': (float(by_byte.index(max(by_byte)) == 0), 1.0),
    }


def own_texts(given: Sequence[str]) -> dict[str, Task]:
    """The tasks of texts that are given as 'NAME=PATH': bits per byte of excerpts of the files.

    Raises:
        UserError: the form or the name is not right, or the file cannot be read, is not UTF-8 or has no text.
    """
    tasks = {}
    for one in given:
        name, _, path = one.partition('=')
        if not re.fullmatch(r'\w[\w.-]*', name) or not path:
            raise UserError(f'--text {one}: expected a name and a file or a directory, such as law=held_out/law.txt')
        if name in tasks or any(name == task.name for task in TEXT_TASKS):
            raise UserError(f'--text {one}: there is another task {name}\n  give it another name')
        tasks[name] = own_text(name, (text for texts in texts_of_files(path) for text in texts), path)
    return tasks


def own_text(name: str, texts: Iterable[str], source: str) -> Task:
    """The task of some texts from `source`: bits per byte of excerpts. Raises UserError if there is no text."""
    excerpts = tuple(text[start : start + _EXCERPT] for text in texts for start in range(0, len(text), _EXCERPT))
    if not excerpts:
        raise UserError(f'{source} has no text')
    return Task(name, f'bits per byte of {source}', functools.partial(bits_per_byte, excerpts, name))


TEXT_TASKS = (
    Task(
        'documentation',
        "bits per byte of Python's language reference",
        lambda settings: bits_per_byte(_documentation(), 'documentation', settings),
    ),
    Task('python', 'bits per byte of Python files', lambda s: bits_per_byte(_python_files(), 'python', s)),
    Task('cloze', 'the last word of a paragraph', cloze),
    Task('multiple_choice', 'how a paragraph goes on, of 4 ways', multiple_choice),
    Task('code_parses', 'written function bodies that parse', code_parses),
)


@functools.cache
def _documentation() -> tuple[str, ...]:
    """The topics of Python's language reference, English prose with some code, in the order of their names."""
    path = Path(sysconfig.get_path('stdlib')) / 'pydoc_data' / 'topics.py'
    with system_errors(str(path), '; these tasks are made from it'):
        tree = ast.parse(path.read_text(encoding='utf-8'))
    [values] = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    topics: dict[str, str] = ast.literal_eval(values)
    return tuple(dict.fromkeys(topics[name] for name in sorted(topics)))


@functools.cache
def _python_files() -> tuple[str, ...]:
    """Source files in the order of their paths."""
    root = Path(sysconfig.get_path('stdlib'))
    for place in _PLACES:
        paths = sorted(path for path in (root / place).glob('*.py') if _SMALLEST <= path.stat().st_size <= _LARGEST)
        if paths:
            return tuple(path.read_text(encoding='utf-8', errors='replace') for path in paths)
    raise UserError(f'{root} has none of {", ".join(_PLACES)}; these tasks are made from their files')


@functools.cache
def _paragraphs() -> tuple[tuple[int, str], ...]:
    """The paragraphs of prose of the documentation on one line each, with the number of their topic."""
    found = {}
    for number, topic in enumerate(_documentation()):
        for block in topic.split('\n\n'):
            is_prose = not block.startswith((' ', '*', '>')) and block.endswith('.')
            if is_prose and '::=' not in block and '====' not in block:
                found.setdefault(' '.join(block.split()), number)
    return tuple((number, text) for text, number in found.items())


LENGTHS = (8, 32, 128)  # words to copy, or lines to search
_SHOTS = 4  # solved examples before a question
_OPERATIONS = {'+': operator.add, '-': operator.sub}


def arithmetic(settings: Settings) -> list[Document]:
    """Sums and differences of numbers with 1 to 3 digits, after four solved ones. Brown et al. 2020, section 3.9.1."""
    rng = settings.random('arithmetic')
    documents = []
    for digits in (1, 2, 3):
        for _ in range(settings.limit):
            *shots, (question, answer) = (_problem(rng, digits) for _ in range(_SHOTS + 1))
            context = ''.join(f'{asked}{said}\n' for asked, said in shots) + question
            measure = functools.partial(_accuracy_of, f'{digits}_digits')
            documents.append(Document((Likelihood(context.rstrip(), f' {answer}\n'),), measure))
    return documents


def _problem(rng: random.Random, digits: int) -> tuple[str, int]:
    a, b = (rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits) for _ in range(2))
    sign = rng.choice(sorted(_OPERATIONS))
    return f'{a} {sign} {b} = ', _OPERATIONS[sign](a, b)


def copying(settings: Settings) -> list[Document]:
    """A sequence of made-up words, and its beginning again: the next word. Olsson et al. 2022, arXiv:2209.11895."""
    rng = settings.random('copying')
    documents = []
    for length in settings.lengths or LENGTHS:
        for _ in range(settings.limit):
            words = [_word(rng) for _ in range(length)]
            at = rng.randrange(1, length) if length > 1 else 0
            context = ' '.join(words) + '\n' + ' '.join(words[:at])
            continuation = f' {words[at]}' if at else words[at]
            measure = functools.partial(_accuracy_of, str(length))
            documents.append(Document((Likelihood(context, continuation),), measure, length))
    return documents


def retrieval(settings: Settings) -> list[Document]:
    """Lines with a word and a number, and one of the words once more: its number."""
    rng = settings.random('retrieval')
    documents = []
    for length in settings.lengths or LENGTHS:
        for _ in range(settings.limit):
            words: dict[str, int] = {}
            while len(words) < length:
                words[_word(rng)] = rng.randrange(1000, 10_000)
            asked = rng.choice(list(words))
            context = ''.join(f'{word}: {number}\n' for word, number in words.items()) + f'{asked}:'
            measure = functools.partial(_accuracy_of, str(length))
            documents.append(Document((Likelihood(context, f' {words[asked]}'),), measure, length))
    return documents


def _word(rng: random.Random) -> str:
    return ''.join(rng.choice('bdfgklmnprstvz') + rng.choice('aeiou') for _ in range(2))


def _accuracy_of(group: str, answers: Sequence[Score]) -> Measured:
    return {f'accuracy/{group}': (float(answers[0].is_greedy), 1.0)}


MADE_TASKS = (
    Task('arithmetic', 'sums and differences of numbers with 1 to 3 digits', arithmetic),
    Task('copying', 'the next word of a sequence seen before', copying),
    Task('retrieval', 'the number of a word, among lines seen before', retrieval),
)
