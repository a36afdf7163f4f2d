"""Selects the rows that become documents: fields, filters, length limits, duplicates and bad rows.

Every row is counted: read = kept + the rows skipped for each reason. A document is kept whole or skipped, never cut.
"""

import collections
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrax.data.corpus.content import Document
from pretrax.data.corpus.conversations import Conversations
from pretrax.errors import UserError

MAX_ERRORS = 10  # bad rows whose messages are kept
BAD, DUPLICATE, NEAR_DUPLICATE, EMPTY = 'bad', 'duplicates', 'near-duplicates', 'empty'

type Scalar = str | bool | int | float


class Filter(BaseModel):
    """Conditions on a field, all of which must hold; other rows are skipped."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    field: str = Field(min_length=1, description='the field; meta.language is a nested field')
    equals: Scalar | None = Field(None, description='the value it must have')
    differs: Scalar | None = Field(None, description='a value it must not have')
    one_of: list[Scalar] | None = Field(None, min_length=1, description='a list of values; it must have one of them')
    at_least: float | None = Field(None, description='the smallest allowed number')
    at_most: float | None = Field(None, description='the largest allowed number')
    matches: str | None = Field(None, description='a regular expression that must occur in it')
    lacks: str | None = Field(None, description='a regular expression that must not occur in it')
    missing: Literal['fail', 'keep', 'drop'] = Field(
        'fail', description='what to do with a row in which the field is missing or null'
    )

    @model_validator(mode='after')
    def _says_something(self) -> Self:
        if not self._conditions():
            names = ', '.join(name for name in type(self).model_fields if name not in ('field', 'missing'))
            raise ValueError(f'the filter on {self.field!r} has no condition; expected one of {names}')
        for name in ('matches', 'lacks'):
            try:
                re.compile(getattr(self, name) or '')
            except re.error as error:
                raise ValueError(f'{name} is not a regular expression: {error}') from None
        return self

    def __str__(self) -> str:
        return f'not {self.field} ' + ' and '.join(
            f'{name} {json.dumps(value, ensure_ascii=False)}' for name, value in self._conditions().items()
        )

    def keeps(self, record: dict[str, Any], origin: str) -> bool:
        """Whether a row meets the conditions. Raises UserError for a missing field or a value of the wrong type."""
        value = _value(record, self.field, origin, self.missing == 'fail')
        if value is None:
            if self.missing == 'fail':
                raise UserError(f'{origin}: field {self.field!r} is null, but a filter needs it{_MISSING_HINT}')
            return self.missing == 'keep'
        return all(self._holds(name, value, operand, origin) for name, operand in self._conditions().items())

    def _conditions(self) -> dict[str, Any]:
        return {
            name: value
            for name in ('equals', 'differs', 'one_of', 'at_least', 'at_most', 'matches', 'lacks')
            if (value := getattr(self, name)) is not None
        }

    def _holds(self, name: str, value: Any, operand: Any, origin: str) -> bool:
        if name in ('matches', 'lacks'):
            if not isinstance(value, str):
                raise self._wrong_type(value, 'a string', origin)
            return bool(re.search(operand, value)) == (name == 'matches')
        if name in ('at_least', 'at_most'):
            number = _as_number(value)
            if number is None:
                raise self._wrong_type(value, 'a number', origin)
            return number >= operand if name == 'at_least' else number <= operand
        if name == 'one_of':
            return any(_same(value, one) for one in operand)
        return _same(value, operand) == (name == 'equals')

    def _wrong_type(self, value: Any, expected: str, origin: str) -> UserError:
        return UserError(f'{origin}: field {self.field!r} is {_shown(value)}\n  the filter needs {expected}')


class NearDuplicates(BaseModel):
    """Which documents are nearly equal."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    threshold: float = Field(
        0.8,
        ge=0.3,
        le=0.99,
        description='Jaccard similarity of the word 5-grams from which on documents are nearly equal',
    )


_MISSING_HINT = '\n  to skip or keep such rows, add missing: drop or missing: keep to the filter'


@dataclass(frozen=True)
class Selection:
    """How rows become documents. `prompt_field` and `answer_field`, or `conversations`, replace `field`."""

    field: str = 'text'
    prompt_field: str | None = None
    answer_field: str | None = None
    filters: tuple[Filter, ...] = ()
    deduplicate: bool = False
    min_characters: int = 0
    max_characters: int | None = None
    on_error: Literal['fail', 'skip'] = 'fail'
    conversations: Conversations | None = None
    near_duplicates: NearDuplicates | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields to read."""
        text = (self.prompt_field, self.answer_field) if self.prompt_field and self.answer_field else (self.field,)
        if self.conversations is not None:
            text = (self.conversations.field,)
        return tuple(dict.fromkeys([*text, *(one.field for one in self.filters)]))

    @property
    def key_for_rows(self) -> str:
        """The first given key that needs rows with fields; '' if there is none."""
        given = {
            'field': self.field != 'text',
            'prompt_field': self.prompt_field,
            'messages_field': self.conversations is not None,
            'filters': self.filters,
        }
        return next((name for name, is_given in given.items() if is_given), '')

    def identity(self, has_fields: bool) -> str:
        """Identifies which documents are kept, as JSON."""
        of_fields = [self.fields, *map(str, self.filters), *(one.missing for one in self.filters)] if has_fields else []
        chat = self.conversations
        of_chat = [] if chat is None else [[chat.source, chat.variables, chat.special_tokens]]
        near = []
        if self.near_duplicates is not None:
            from pretrax.data.corpus.near_duplicates import algorithm  # it imports numpy

            near = [self.near_duplicates.model_dump(), algorithm()]
        return json.dumps([of_fields, self.deduplicate, self.min_characters, self.max_characters, *of_chat, *near])

    def document(self, origin: str, content: str | dict[str, Any] | UserError) -> Document | str:
        """The document in a row, or the reason for skipping the row. Raises UserError for a bad row."""
        if isinstance(content, UserError):
            raise content
        if content == '':
            return EMPTY  # a blank line
        for one in self.filters:
            if not one.keeps(content if isinstance(content, dict) else {}, origin):
                return str(one)
        document = self._document(origin, content)
        n_characters = len(document.text)
        if not n_characters:
            return EMPTY
        if n_characters < self.min_characters:
            return f'under {self.min_characters:,} characters'
        if self.max_characters is not None and n_characters > self.max_characters:
            return f'over {self.max_characters:,} characters'
        return document

    def _document(self, origin: str, content: str | dict[str, Any]) -> Document:
        if isinstance(content, str):
            if self.prompt_field:
                raise UserError(f'{origin}: the file has no fields, but data.prompt_field is given')
            if self.conversations is not None:
                raise UserError(f'{origin}: the file has no fields, but data.messages_field is given')
            return Document(content, origin)
        if self.conversations is not None:
            name = self.conversations.field
            messages = _value(content, name, origin, required=True, key='messages_field')
            return self.conversations.document(messages, origin)
        if self.prompt_field and self.answer_field:
            prompt = _text(content, self.prompt_field, origin, 'prompt_field')
            answer = _text(content, self.answer_field, origin, 'answer_field')
            both = prompt + answer
            return (
                Document(both, origin, ((len(prompt), len(both)),) if answer else ()) if both else Document('', origin)
            )
        return Document(_text(content, self.field, origin, 'field'), origin)


@dataclass
class RowCounts:
    """The number of rows read, of documents kept, and of rows skipped for each reason. RowCounts can be added."""

    read: int = 0
    kept: int = 0
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: list[str] = field(default_factory=list)  # of the first MAX_ERRORS bad rows

    def __add__(self, other: 'RowCounts') -> 'RowCounts':
        return RowCounts(
            self.read + other.read,
            self.kept + other.kept,
            self.left_out + other.left_out,
            (self.errors + other.errors)[:MAX_ERRORS],
        )

    def lines(self) -> list[str]:
        """The summary to print: the totals, and the first bad rows."""
        reasons = ''.join(f' + {n:,} {reason}' for reason, n in sorted(self.left_out.items()))
        return [
            f'documents: {self.read:,} read = {self.kept:,} kept{reasons}',
            *(f'skipped bad row: {error.splitlines()[0]}' for error in self.errors),
            *([f'and {more:,} more bad rows'] if (more := self.left_out[BAD] - len(self.errors)) > 0 else []),
        ]

    def add_bad(self, error: UserError) -> None:
        self.left_out[BAD] += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(str(error))


def documents(
    rows: Iterator[tuple[str, Any]], selection: Selection, counts: RowCounts, exact: Callable[[str], str]
) -> Iterator[Document | None]:
    """Yields the document of each row, or None if the row is skipped. Duplicates are not removed here.

    Raises UserError if a row is bad and `on_error` is 'fail'; the message has the origin that `exact` returns.
    """
    for origin, content in rows:
        counts.read += 1
        try:
            found = selection.document(origin, content)
        except UserError as error:
            message = str(error).replace(origin, exact(origin), 1) if len(counts.errors) < MAX_ERRORS else str(error)
            if selection.on_error == 'fail':
                raise UserError(message) from None
            counts.add_bad(UserError(message))
            yield None
            continue
        if isinstance(found, str):
            counts.left_out[found] += 1
            yield None
        else:
            yield found


def digest(document: Document) -> bytes:
    """A 16-byte digest of the text and the answers."""
    total = hashlib.blake2b(document.text.encode(), digest_size=16)
    if document.answers is not None:
        total.update(b'\xff' + repr(document.answers).encode())  # a byte that does not occur in UTF-8
    return total.digest()


def _text(record: dict[str, Any], name: str, origin: str, key: str) -> str:
    text = record[name] if name in record else _value(record, name, origin, required=True, key=key)
    if not isinstance(text, str):
        raise UserError(f'{origin}: field {name!r} is {_shown(text)}\n  expected a string')
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f'{origin}: field {name!r} has an unpaired surrogate at character {error.start}') from None
    return text


def _value(record: dict[str, Any], name: str, origin: str, required: bool, key: str = '') -> Any:
    """The value of a field or a nested field; None if it is missing and not required."""
    found: Any = record
    for step in [name] if name in record else name.split('.'):
        if not isinstance(found, dict) or step not in found:
            if required:
                raise _missing(record, name, origin, key)
            return None
        found = found[step]
    return found


def _missing(record: dict[str, Any], name: str, origin: str, key: str) -> UserError:
    known = ', '.join(map(repr, list(record)[:12])) or 'none'
    if not key:
        return UserError(f'{origin}: no field {name!r}, but a filter needs it\n  fields found: {known}{_MISSING_HINT}')
    close = difflib.get_close_matches(name, record, n=1) or [other for other, x in record.items() if type(x) is str]
    hint = f'\n  to read {close[0]!r}: data.{key}={close[0]}' if close else ''
    return UserError(f'{origin}: no field {name!r}\n  fields found: {known}{hint}')


def _as_number(value: Any) -> float | None:
    if isinstance(value, str):  # every value of a .csv file is a string
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _same(value: Any, operand: Scalar) -> bool:
    if isinstance(operand, bool) or isinstance(value, bool):
        return value is operand or (isinstance(value, str) and value.lower() == str(operand).lower())
    if isinstance(operand, int | float):
        return _as_number(value) == operand
    return value == operand


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:60]
    except (TypeError, ValueError):
        return f'{value!r}'[:60]
