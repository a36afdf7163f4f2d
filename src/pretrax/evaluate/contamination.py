"""Word n-grams that tasks share with training text (Brown et al. 2020, arXiv:2005.14165, appendix C). No JAX here."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pretrax.data.corpus.corpus import whole
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.words import split_words
from pretrax.errors import UserError
from pretrax.evaluate.task import Document, Likelihood, Rolling, Settings, Task

SHORTEST = 8  # words: a shorter text is not looked up


def words(text: str) -> list[str]:
    """The words of a text without case and punctuation; each character of a script without spaces is one."""
    return split_words(text.casefold())


class Ngrams:
    """The n-grams of the documents of tasks, numbered.

    A text of fewer than n words, but at least SHORTEST (or n, if that is less), is one n-gram as a whole.

    Args:
        documents: {task: the texts of each of its documents}. An n-gram lies in one text.

    Attributes:
        of_documents: {task: the numbers of the n-grams of each document}.
        longest: words of the longest n-gram.
    """

    def __init__(self, documents: Mapping[str, Sequence[Sequence[str]]], n: int):
        self.n = self.longest = n
        self._ids: dict[str, int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self.of_documents = {task: [self._add(texts, n) for texts in of_task] for task, of_task in documents.items()}
        self._lengths = sorted({len(ngram) for ngram in self._numbers})
        self._words = list(self._ids)

    def _add(self, texts: Sequence[str], n: int) -> set[int]:
        numbers = set()
        for text in texts:
            ids = tuple(self._ids.setdefault(word, len(self._ids)) for word in words(text))
            size = min(n, len(ids))
            if size >= min(n, SHORTEST):
                for start in range(len(ids) - size + 1):
                    ngram = ids[start : start + size]
                    numbers.add(self._numbers.setdefault(ngram, len(self._numbers)))
        return numbers

    def find(self, text: Sequence[str]) -> set[int]:
        """The numbers of the n-grams in the words of a text."""
        found = set()
        for run in self._runs(text):
            for length in self._lengths:
                for start in range(len(run) - length + 1):
                    number = self._numbers.get(tuple(run[start : start + length]))
                    if number is not None:
                        found.add(number)
        return found

    def _runs(self, text: Sequence[str]) -> Iterator[list[int]]:
        """The spans of a text whose words all occur in the tasks, as numbers of words."""
        run: list[int] = []
        for word in text:
            number = self._ids.get(word)
            if number is not None:
                run.append(number)
            elif run:
                yield run
                run = []
        if run:
            yield run

    def text(self, number: int) -> str:
        """The words of an n-gram."""
        [ngram] = [ngram for ngram, found in self._numbers.items() if found == number]
        return ' '.join(self._words[word] for word in ngram)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """A document of a task, some n-grams of which are in the training text."""

    document: int  # its number in the task, from 0
    found: int  # how many of its n-grams were found, of `ngrams`
    ngrams: int
    ngram: str  # the words of one of them
    where: int  # the training document with the lowest number that has it


@dataclasses.dataclass(frozen=True)
class TaskOverlap:
    """What a task shares with the training text. `checked` documents are long enough for an n-gram."""

    documents: int
    checked: int
    overlaps: list[Overlap]


def overlaps(ngrams: Ngrams, places: Mapping[int, int]) -> dict[str, TaskOverlap]:
    """{task: what was found of it}. `places`: {number of an n-gram: number of the first training document with it}."""
    result = {}
    for task, documents in ngrams.of_documents.items():
        found = []
        for number, of_document in enumerate(documents):
            if here := sorted((places[ngram], ngram) for ngram in of_document & places.keys()):
                where, first = here[0]
                found.append(Overlap(number, len(here), len(of_document), ngrams.text(first), where))
        result[task] = TaskOverlap(len(documents), sum(map(bool, documents)), found)
    return result


def texts_of_task(task: Task, settings: Settings) -> list[list[str]]:
    """The text of each document of a task: the question of its first request with the right answer."""

    def text(document: Document) -> str:
        request = document.requests[0]
        if isinstance(request, Rolling):
            return request.text
        return request.context + (request.continuation if isinstance(request, Likelihood) else '')

    return [[text(document)] for document in task.documents(settings)]


def texts_of_files(spec: str) -> list[list[str]]:
    """The texts of the files of a path, a directory or a glob: all strings in each row; other files are one text.

    Raises:
        UserError: a file cannot be read, is not UTF-8, or a row is bad.
    """
    found = []
    for row in itertools.chain.from_iterable(part.rows() for file in find_files(spec) for part in whole(file, ())):
        if isinstance(row.content, UserError):
            raise row.content
        if row.content:
            found.append(list(_strings(row.content)))
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for one in inner:
            yield from _strings(one)


def as_text(found: Mapping[str, TaskOverlap], shown: int) -> str:
    """A table with a line for each task, and for each task the documents that share most."""
    width = max(len(task) for task in (*found, 'task'))
    lines = [f'{"task":{width}}  documents  checked  contaminated']
    for task, one in found.items():
        share = f' ({len(one.overlaps) / one.checked:.1%})' if one.checked else ''
        lines.append(f'{task:{width}}  {one.documents:9,}  {one.checked:7,}  {len(one.overlaps):12,}{share}')
    for task, one in found.items():
        for overlap in sorted(one.overlaps, key=lambda o: -o.found / o.ngrams)[:shown]:
            lines.append(
                f'\n{task}, document {overlap.document:,}: {overlap.found:,} of {overlap.ngrams:,} n-grams; '
                f'training document {overlap.where:,} has\n  {overlap.ngram}'
            )
    return '\n'.join(lines)


def as_json(found: Mapping[str, TaskOverlap], n: int, tokens: str) -> str:
    """The results as JSON, with all documents."""
    tasks = {task: dataclasses.asdict(one) for task, one in found.items()}
    return json.dumps({'tokens': tokens, 'words': n, 'tasks': tasks}, indent=2)
