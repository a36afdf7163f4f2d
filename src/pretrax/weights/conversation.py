"""`pretrax generate --chat`: a conversation in the terminal."""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Sequence

from pretrax.errors import UserError
from pretrax.infer.answers import Asked, Speed, show, write
from pretrax.infer.request import Request
from pretrax.infer.sampling_settings import Sampling
from pretrax.system.children import handling
from pretrax.weights.loaded import LoadedModel

HELP = '/reset starts again, /quit or Ctrl-D ends, Ctrl-C stops an answer'


def chat_with(
    model: LoadedModel, sampling: Sampling, stops: tuple[str, ...], tokens: int | None, max_length: int | None
) -> None:
    """Reads messages from standard input and prints the answers, until the input ends.

    Args:
        sampling: of the answers; each answer has a seed of its own.
        stops: text that ends an answer.
        tokens: of an answer at most; None: as many as fit.
        max_length: tokens of the conversation at most; None: `LoadedModel.longest`.

    Raises:
        UserError: the model has no chat template.
    """
    template = model.chat_template()
    length = max_length or model.longest(slots=1)
    model.answer_length((), length)  # raises
    engine = model.engine(length, slots=1)
    with contextlib.suppress(ImportError):  # it gives `input` a history and editing
        import readline  # noqa: F401
    if sys.stdin.isatty():
        print(f'{model.name}: {HELP}', file=sys.stderr)
    messages: list[dict[str, str]] = []
    answers, speed = 0, Speed(model.compute, engine)
    while (message := _read_message()) is not None:
        if message == '/quit':
            break
        if message == '/reset':
            messages.clear()
            continue
        if not message.strip():
            continue
        asked = [*messages, {'role': 'user', 'content': message}]
        try:
            prompt = tuple(template.encode(asked))
            request = Request(
                prompt=prompt,
                max_tokens=_room(prompt, engine.max_length, tokens),
                sampling=dataclasses.replace(sampling, seed=sampling.seed + answers),
                stop_ids=(*model.end, *(token for token in template.end_of_turn if token not in model.end)),
            )
            engine.check(request)
        except UserError as error:
            print(error.short_text(), file=sys.stderr)
            continue
        answers, answer = answers + 1, ''
        speed.prompt_tokens += len(request.prompt)
        interrupted: list[int] = []
        with (
            # No KeyboardInterrupt, which could leave the engine in the middle of a step
            handling([signal.SIGINT], interrupted.append),
            contextlib.closing(write(engine, model.tokenizer, [Asked(request, stops)])) as all_news,
        ):
            for news in all_news:
                answer += news.text
                speed.tokens += news.tokens
                show(news.text)
                if interrupted:
                    break
        show('\n')
        messages = [*asked, {'role': 'assistant', 'content': answer}]
    speed.report()


def _room(prompt: Sequence[int], max_length: int, tokens: int | None) -> int:
    """The number of tokens that may follow a prompt. Raises UserError if there is no room."""
    room = max_length - len(prompt)
    if room < 1:
        raise UserError(
            f'the conversation has {len(prompt)} tokens; expected less than {max_length}\n'
            '/reset starts again, --max-length N allows more'
        )
    return min(tokens or room, room)


def _read_message() -> str | None:
    """The next line of the user; None at the end. Ctrl-C discards the line."""
    while True:
        try:
            return input('> ' if sys.stdin.isatty() else '')
        except EOFError:
            if sys.stdin.isatty():
                show('\n')
            return None
        except KeyboardInterrupt:
            show('\n')
