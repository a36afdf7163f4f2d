"""Turns the tokens of an engine into the text of an answer, while they arrive."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pretrax.infer.request import Request, Token, Update
from pretrax.infer.text import TextStream

if TYPE_CHECKING:
    from pretrax.data.tokenizers.tokenizer import Tokenizer

_CONTEXT = 64  # tokens before an answer that can change its first letters, and many more


@dataclasses.dataclass
class Delta:
    """What is new in an answer. `offsets`: where each token's text starts in the answer, in characters.

    Every written token is in `tokens`, also the one that ends the answer, and those of a stop string.
    """

    text: str = ''
    tokens: list[Token] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None

    def extend(self, other: 'Delta') -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.offsets += other.offsets
        self.finish = other.finish


class Echo(NamedTuple):
    """The prompt at the beginning of an answer."""

    text: str
    before: int  # how many of its first tokens are before the text: those that begin every text


class Choice:
    """One answer to one prompt.

    Args:
        stops: strings that end the answer, which does not have them.
        index: among the answers.
        prompt_number: among the prompts; several answers may be to the same one.
        echo: the prompt, if the answer is to begin with it.
        hidden: tokens that have no text.

    Attributes:
        whole: everything so far.
        prompt_tokens, cached_tokens, answer_tokens: how many there are, for the usage.
    """

    def __init__(
        self,
        tokenizer: 'Tokenizer',
        request: Request,
        stops: Sequence[str],
        index: int,
        prompt_number: int = 0,
        echo: Echo | None = None,
        hidden: Collection[int] = (),
    ):
        self.index, self.prompt_number, self.whole = index, prompt_number, Delta()
        self.prompt_tokens, self.cached_tokens, self.answer_tokens = len(request.prompt), 0, 0
        self.steps: list[int] = []  # the training steps of the weights that wrote it
        self._tokenizer, self._stop_ids, self._echo = tokenizer, request.stop_ids, echo
        self._text = TextStream(tokenizer, request.prompt[-_CONTEXT:], stops, hidden=hidden)
        self._stops, self._tokens = stops, list[Token]()
        self._given = 0  # tokens in `whole`, without those of the prompt
        self._is_first = True

    def take(self, update: Update) -> Delta:
        """What an update adds to the answer; nothing after its end."""
        if self.whole.finish:
            return Delta()
        delta = self._opening(update) if self._is_first else Delta()
        self._is_first = False
        ids = [token.id for token in update.tokens]
        shown = ids[:-1] if update.finish == 'stop' and ids[-1] in self._stop_ids else ids
        written = len(ids)
        if not self._stops:
            delta.text += self._text.push(shown)
        else:  # one by one, to count those up to the stop string
            for number, token in enumerate(shown, 1):
                delta.text += self._text.push([token])
                if self._text.finished:
                    written = number
                    break
        self._tokens += update.tokens[:written]
        self.answer_tokens += written
        if update.finish:
            delta.text += self._text.flush()
        delta.finish = 'stop' if self._text.finished else update.finish
        start = len(self._echo.text) if self._echo else 0
        offsets = [start + piece.offset for piece in self._text.pieces[self._given :]]
        if delta.finish:  # tokens that are not shown: the end token, and those of the stop string
            end = len(self.whole.text) + len(delta.text)
            offsets += [end] * (len(self._tokens) - self._given - len(offsets))
        delta.tokens += self._tokens[self._given : self._given + len(offsets)]
        delta.offsets += offsets
        self._given += len(offsets)
        if update.weights_step is not None and self.steps[-1:] != [update.weights_step]:
            self.steps.append(update.weights_step)
        self.whole.extend(delta)
        return delta

    def _opening(self, update: Update) -> Delta:
        """The prompt, if it belongs to the answer."""
        self.cached_tokens = update.cached
        if self._echo is None:
            return Delta()
        before = min(self._echo.before, len(update.prompt))
        text = TextStream(self._tokenizer)
        text.push([token.id for token in update.prompt[before:]])
        text.flush()
        offsets = [0] * before + [piece.offset for piece in text.pieces]
        return Delta(self._echo.text, list(update.prompt), offsets)


def token_name(tokenizer: 'Tokenizer', token: int) -> str:
    """The text of a token; for a part of a character, its bytes, such as bytes:\\xf0\\x9f."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in content)
