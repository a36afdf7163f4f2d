"""Tasks that need no text: arithmetic, and copying and retrieval in a context of several lengths."""

import functools
import operator
import random
from collections.abc import Sequence

from pretrax.evaluate.task import Document, Likelihood, Measured, Score, Settings, Task

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
            measure = functools.partial(_accuracy, f'{digits}_digits')
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
            measure = functools.partial(_accuracy, str(length))
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
            measure = functools.partial(_accuracy, str(length))
            documents.append(Document((Likelihood(context, f' {words[asked]}'),), measure, length))
    return documents


def _word(rng: random.Random) -> str:
    return ''.join(rng.choice('bdfgklmnprstvz') + rng.choice('aeiou') for _ in range(2))


def _accuracy(group: str, answers: Sequence[Score]) -> Measured:
    return {f'accuracy/{group}': (float(answers[0].is_greedy), 1.0)}


MADE_TASKS = (
    Task('arithmetic', 'sums and differences of numbers with 1 to 3 digits', arithmetic),
    Task('copying', 'the next word of a sequence seen before', copying),
    Task('retrieval', 'the number of a word, among lines seen before', retrieval),
)
