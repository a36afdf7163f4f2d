"""`pretrax generate --prompts FILE --out FILE`: answers to the lines of a file.

A line of the prompts is {"prompt": ...} or {"messages": ...}, with settings of its own (FIELDS) and any other fields. A
line of the answers has the same fields and those of ANSWER. Answers are appended to FILE.partial in the order of the
prompts, and FILE appears when all of them are there. The same command continues a FILE.partial.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pretrax.errors import UserError
from pretrax.infer.answers import Asked, Speed, encode_prompt, write
from pretrax.infer.request import Request
from pretrax.infer.sampling_settings import FIELDS, SETTINGS, Sampling
from pretrax.storage import AnyPath, BucketPath, locate
from pretrax.storage.locate import write_whole
from pretrax.system.locks import lock
from pretrax.weights.loaded import LoadedModel

ANSWER = ('text', 'finish', 'prompt_tokens', 'generated_tokens', 'choice')


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the flags ask for, unless a line says otherwise."""

    sampling: Sampling
    max_tokens: int | None  # None: see `infer.request.answer_length`
    n: int
    stop: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the prompts. `seeded`: it has a seed of its own, so its answers do not depend on its place."""

    number: int
    fields: dict[str, Any]
    wanted: Wanted
    seeded: bool


def answer_file(load: Callable[[], LoadedModel], prompts: str, out: str, wanted: Wanted, slots: int | None) -> None:
    """Answers the lines of a file.

    Args:
        load: the model; called when the prompts have been read.
        prompts: JSON lines, on a disk or in a bucket.
        wanted: what lines ask for that do not say otherwise.
        slots: how many answers are written at once.

    Raises:
        UserError: a line is not as expected, `out` exists, or its partial file is of another command.
    """
    source, target = locate(prompts), locate(out)
    content = _content(source)
    lines = read_lines(content, str(source), wanted)
    if target.exists():
        raise UserError(f'{target} exists\nremove it, or give another --out')
    model = load()
    asked, records = _requests(lines, model, str(source))
    digest = hashlib.sha256(content + repr((model.name, model.compute, wanted)).encode()).hexdigest()
    speed = Speed(model.compute)
    with _answers(target, f'{model.name}, {source}', digest) as answers:
        rest = asked[answers.count :]
        if answers.count:
            print(f'{target}: {answers.count:,} of {len(asked):,} answers are there', file=sys.stderr)
        if rest:
            _answer(model, rest, records[answers.count :], answers, speed, slots)
        answers.finish()
    speed.report()


def _answer(
    model: LoadedModel,
    asked: Sequence[Asked],
    records: Sequence[dict[str, Any]],
    answers: '_InBucket | _OnDisk',
    speed: Speed,
    slots: int | None,
) -> None:
    """Appends the answers, each when those before it are finished."""
    texts: list[list[str]] = [[] for _ in asked]
    counts, finishes, written = [0] * len(asked), [''] * len(asked), 0
    speed.prompt_tokens = sum(len(one.request.prompt) for one in asked)
    for news in write(model.engine_for(asked, slots), model.tokenizer, asked):
        texts[news.answer].append(news.text)
        counts[news.answer] += news.tokens
        speed.tokens += news.tokens
        finishes[news.answer] = news.finish or ''
        while written < len(asked) and finishes[written]:
            answer = {
                'text': ''.join(texts[written]),
                'finish': finishes[written],
                'prompt_tokens': len(asked[written].request.prompt),
                'generated_tokens': counts[written],
            }
            answers.append(records[written] | answer)
            texts[written].clear()
            written += 1


def _content(source: AnyPath) -> bytes:
    try:
        return source.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f'--prompts {source}: {error.strerror}\nexpected a file of JSON lines') from None


def read_lines(content: bytes, name: str, wanted: Wanted) -> list[Line]:
    """The lines of a file of prompts. Blank lines do not count.

    Raises:
        UserError: there are none, or one is not as expected; the message names it.
    """
    lines = [
        _read_line(text, f'{name}, line {number}', number, wanted)
        for number, text in enumerate(content.split(b'\n'), 1)
        if text.strip()
    ]
    if not lines:
        raise UserError(f'{name} has no prompts\nexpected lines such as {{"prompt": "def "}}')
    return lines


def _read_line(text: bytes, where: str, number: int, wanted: Wanted) -> Line:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where}: not JSON: {error}') from None
    if not isinstance(fields, dict) or ('prompt' in fields) == ('messages' in fields):
        raise UserError(
            f'{where}: expected an object with either "prompt" or "messages"\n'
            f'found {text[:60].decode(errors="replace")}'
        )
    if 'prompt' in fields and not isinstance(fields['prompt'], str):
        raise UserError(f'{where}: prompt is {json.dumps(fields["prompt"])[:40]}; expected text')
    messages = fields.get('messages', [{}])
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise UserError(f'{where}: messages: expected a list of objects with "role" and "content"')
    for field, value in fields.items():
        if field in ANSWER:
            raise UserError(f'{where}: {field} is a field of the answers\ngive it another name')
        if field in FIELDS:
            expected, is_right = FIELDS[field]
            if not is_right(value):
                raise UserError(f'{where}: {field} is {json.dumps(value)[:40]}; expected {expected}')
        elif field not in ('prompt', 'messages') and (
            near := difflib.get_close_matches(field, [*FIELDS, 'prompt', 'messages'], 1, 0.85)
        ):
            raise UserError(
                f'{where}: {field} is not a setting; did you mean {near[0]}?\ngive a field of your own another name'
            )
    stop = fields.get('stop', wanted.stop)
    return Line(
        number,
        fields,
        Wanted(
            dataclasses.replace(wanted.sampling, **{name: fields[name] for name in SETTINGS.keys() & fields.keys()}),
            fields.get('max_tokens', wanted.max_tokens),
            fields.get('n', wanted.n),
            (stop,) if isinstance(stop, str) else tuple(stop),
        ),
        seeded='seed' in fields,
    )


def _requests(lines: Sequence[Line], model: LoadedModel, name: str) -> tuple[list[Asked], list[dict[str, Any]]]:
    """The answers to write, and the fields that each answer's line begins with."""
    template = model.chat_template() if any('messages' in line.fields for line in lines) else None
    end = model.end if template is None else (*model.end, *template.end_of_turn)
    asked, records = [], []
    for line in lines:
        wanted = line.wanted
        try:
            if template is not None and 'messages' in line.fields:
                ids, stop_ids = tuple(template.encode(line.fields['messages'])), tuple(dict.fromkeys(end))
            else:
                ids, stop_ids = tuple(encode_prompt(model.tokenizer, line.fields['prompt'])), model.end
            tokens = model.answer_length(ids, wanted.max_tokens)
        except UserError as error:
            raise UserError(f'{name}, line {line.number}: {error}') from None
        for choice in range(wanted.n):
            request = Request(
                prompt=ids,
                max_tokens=tokens,
                sampling=wanted.sampling,
                choice=choice if line.seeded else len(asked),
                stop_ids=stop_ids,
            )
            asked.append(Asked(request, wanted.stop))
            records.append(line.fields | ({'choice': choice} if wanted.n > 1 else {}))
    return asked, records


@contextlib.contextmanager
def _answers(target: AnyPath, title: str, digest: str) -> Iterator['_InBucket | _OnDisk']:
    if not isinstance(target, Path):
        yield _InBucket(target)
        return
    if not target.parent.is_dir():
        raise UserError(f'--out {target}: there is no directory {target.parent}')
    with target.with_name(f'{target.name}.partial').open('a+b') as file:
        yield _OnDisk(target, file, _line({'answers': title, 'sha256': digest}))


class _InBucket:
    """Answers that become an object when all of them are there; nothing remains of a command that is killed."""

    count = 0

    def __init__(self, target: BucketPath):
        self._target = target
        self._lines: list[bytes] = []

    def append(self, record: dict[str, Any]) -> None:
        self._lines.append(_line(record))

    def finish(self) -> None:
        content = b''.join(self._lines)
        if not self._target.create(content):
            own = self._target.with_name(f'{self._target.name}.{secrets.token_hex(4)}')
            own.create(content)
            raise UserError(
                f'{self._target}: another process has written it in the meantime\n'
                f'nothing is lost: the answers are in {own}'
            )


class _OnDisk:
    """Answers in FILE.partial, whose first line says which command they belong to.

    Attributes:
        count: how many answers an earlier command has left.
    """

    def __init__(self, target: Path, file: BinaryIO, header: bytes):
        self._target, self._file = target, file
        try:
            lock(file)
        except BlockingIOError:
            raise UserError(f'{file.name}: another process writes it') from None
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b'\n')]  # the last one may be cut
        self._file.truncate(sum(map(len, whole)))
        if not whole:
            self._file.write(header)
            self._file.flush()
        elif whole[0] != header:
            raise UserError(
                f'{file.name} was begun with another model, other flags or other prompts\n'
                'remove it, or give another --out'
            )
        self.count = max(len(whole) - 1, 0)

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def finish(self) -> None:
        self._file.seek(0)
        write_whole(self._target, self._file.read().partition(b'\n')[2], sync=True)
        Path(self._file.name).unlink()


def _line(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b'\n'
    except UnicodeEncodeError:  # half of a surrogate pair in a field
        return json.dumps(record).encode() + b'\n'
