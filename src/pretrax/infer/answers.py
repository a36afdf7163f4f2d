"""The texts that an engine writes, and their speed. No JAX here: the tests of the commands need no devices."""

import dataclasses
import sys
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pretrax.errors import unfiltered_output
from pretrax.infer.request import Finish, Request
from pretrax.infer.text import TextStream

if TYPE_CHECKING:
    from pretrax.infer.engine import Engine


@dataclasses.dataclass(frozen=True)
class Asked:
    """An answer to write: a request, and the strings that end its text."""

    request: Request
    stop: tuple[str, ...] = ()


class News(NamedTuple):
    """What is new in an answer. `finish`: None if more will follow."""

    answer: int  # among those that were asked for
    text: str
    tokens: int
    finish: Finish | None


def write(engine: 'Engine', tokenizer: Any, asked: Sequence[Asked]) -> Generator[News]:
    """The texts of answers, piece by piece, in the order in which they are written.

    The token that ends an answer is not part of its text. If the iterator is closed, the answers that are not finished
    are cancelled.

    Raises:
        UserError: the engine can never answer one of the requests.
    """
    for one in asked:
        engine.check(one.request)
    numbers = {engine.add(one.request): answer for answer, one in enumerate(asked)}
    streams = {answer: TextStream(tokenizer, one.request.prompt, one.stop) for answer, one in enumerate(asked)}
    try:
        while streams:
            for update in engine.step():
                answer = numbers.get(update.number, -1)
                if (stream := streams.get(answer)) is None:  # it was cancelled
                    continue
                ids = [token.id for token in update.tokens]
                finish = update.finish
                ends = finish == 'stop' and ids[-1] in asked[answer].request.stop_ids
                text = stream.push(ids[:-1] if ends else ids)
                if finish:
                    text += stream.flush()
                if stream.finished is not None:
                    finish = 'stop'
                    engine.cancel(update.number)
                if finish:
                    del streams[answer]
                yield News(answer, text, len(ids), finish)
    finally:
        for number, answer in numbers.items():
            if answer in streams:
                engine.cancel(number)


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a prompt, with those that begin a text."""
    return begun(tokenizer, tokenizer.encode(prompt))


def begun(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The tokens of a text after those that begin it, unless they are there; an empty one is `start_of_text`."""
    begin = tuple(getattr(tokenizer, 'begin_of_text', ()))
    return (list(ids) if tuple(ids[: len(begin)]) == begin else [*begin, *ids]) or start_of_text(tokenizer)


def start_of_text(tokenizer: Any) -> list[int]:
    """The tokens before the first one of a text: those that begin a text, or else the end of the text before."""
    if begin := getattr(tokenizer, 'begin_of_text', ()):
        return list(begin)
    known = (getattr(tokenizer, 'before_text', None), tokenizer.end_of_text, 0)
    return [next(token for token in known if token is not None)]


class Speed:
    """Counts the tokens of a model, and prints how many a second there were."""

    def __init__(self, compute: str, engine: 'Engine | None' = None):
        self._compute = 'f32' if engine is not None and engine.dtype == 'float32' else compute
        self._began = time.perf_counter()
        self.prompt_tokens = self.tokens = 0

    def report(self) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        print(
            f'{self.tokens:,} tokens in {seconds:.1f} s, compilation included, computed in {self._compute}: '
            f'{self.tokens / seconds:,.1f} tokens/s, '
            f'{self.prompt_tokens / seconds:,.1f} prompt tokens/s',
            file=sys.stderr,
        )


def show(text: str, end: str = '') -> None:
    """Prints text of a model at once: to a terminal without control characters, elsewhere as it is."""
    print(text, end=end, flush=True, file=None if sys.stdout.isatty() else unfiltered_output())
