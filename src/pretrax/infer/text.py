"""The text of an answer while its tokens arrive: whole characters, up to a stop string."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pretrax.data.tokenizers.tokenizer import Tokenizer


class Piece(NamedTuple):
    """The text of one token of an answer; empty if a later token completes its character."""

    text: str
    offset: int  # in the answer, in characters


class TextStream:
    """The text that an answer adds to its prompt, while the tokens of the answer arrive.

    The returned texts, joined, are the text of prompt and answer without the text of the prompt, cut at the first stop
    string. The first one is the one that is complete first; of several that are complete at once, the longest.
    Each token costs the same, however long the answer is.

    Args:
        tokenizer: decodes the tokens.
        prompt: the tokens before the answer.
        stop: strings that end the answer. None is empty.
        include_stop: whether the answer ends with the stop string, or before it.
        hidden: tokens of the answer that have no text.

    Attributes:
        finished: the stop string that was found, or None.
        pieces: the tokens whose text was returned, in order. Joined, they are the returned text, unless a token is only
            partly returned so far. The tokens after a stop string are not there.
    """

    def __init__(
        self,
        tokenizer: 'Tokenizer',
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        hidden: Collection[int] = (),
    ):
        self.finished: str | None = None
        self.pieces: list[Piece] = []
        self._searches = [_Search(text) for text in sorted(stop, key=len, reverse=True)]
        self._include_stop, self._hidden = include_stop, hidden
        self._ids: list[int] = []  # of the answer, if some are hidden
        self._decoding, self._before = tokenizer.decoding(), len(prompt)
        certain = sum(len(text) for _, text in self._decoding.push(prompt))
        self._rest_of_prompt = tokenizer.decode(prompt)[certain:] if len(prompt) else ''
        self._texts: list[str] = []  # of each token, as far as it is certain
        self._offset = 0  # of the first token that is not in `pieces`
        self._held = ''  # certain, but it may begin a stop string
        self._length = 0  # of the text that was returned

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these tokens of the answer; nothing once a stop string was found."""
        if self.finished is not None:
            return ''
        if self._hidden:
            self._ids += ids
        text = self._take(self._decoding.push(ids))
        self._add_pieces(self._decoding.settled - self._before)
        return text

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        if self.finished is not None:
            return ''
        text = self._take(self._decoding.end())
        if self.finished is None:
            rest, self._held = self._held, ''
            text += rest
            self._length += len(rest)
        self._add_pieces(self._decoding.settled - self._before)
        return text

    def _take(self, parts: list[tuple[int, str]]) -> str:
        """What can be returned after these parts."""
        texts, searches = self._texts, self._searches
        for number, part in parts:
            text = self._without_prompt(part) if self._rest_of_prompt else part
            token = number - self._before if number > self._before else 0
            if self._hidden and number >= self._before and self._ids[token] in self._hidden:
                text = ''
            while len(texts) <= token:
                texts.append('')
            texts[token] += text
            for position, letter in enumerate(text if searches else '', 1):
                complete = [search.stop for search in searches if search.ends_with(letter)]
                if complete:
                    self.finished = complete[0]
                    text = (self._held + text[:position]).removesuffix('' if self._include_stop else complete[0])
                    self._held = ''
                    self._length += len(text)
                    return text
            self._held += text
        waits = max(search.matched for search in searches) if searches and not self._include_stop else 0
        certain = len(self._held) - waits
        text, self._held = self._held[:certain], self._held[certain:]
        self._length += certain
        return text

    def _without_prompt(self, text: str) -> str:
        """The text without what is left of the prompt, up to the first letter in which they differ."""
        same = _same(text, self._rest_of_prompt)
        self._rest_of_prompt = self._rest_of_prompt[same:] if same == len(text) else ''
        return text[same:]

    def _add_pieces(self, settled: int) -> None:
        pieces, texts = self.pieces, self._texts
        while len(texts) < settled:
            texts.append('')
        for number in range(len(pieces), len(texts)):
            text, left = texts[number], self._length - self._offset
            if self.finished is not None:
                if not left:
                    return
                text = text[:left]
            elif number >= settled or len(text) > left:
                return
            pieces.append(Piece(text, self._offset))
            self._offset += len(text)


def text_after(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The text that the tokens of an answer add to a prompt."""
    whole = tokenizer.decode([*prompt, *answer])
    return whole[_same(whole, tokenizer.decode(prompt)) :]


def _same(text: str, other: str) -> int:
    """The number of letters with which both begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))


class _Search:
    """Finds a string in a text that comes letter by letter. Knuth, Morris and Pratt 1977, doi:10.1137/0206024."""

    def __init__(self, stop: str):
        assert stop
        self.stop = stop
        self.matched = 0  # letters of the string that the text ends with
        self._shorter = [0]  # for each beginning of the string, the longest shorter one that it ends with
        matched = 0
        for letter in stop[1:]:
            while matched and letter != stop[matched]:
                matched = self._shorter[matched - 1]
            matched += letter == stop[matched]
            self._shorter.append(matched)

    def ends_with(self, letter: str) -> bool:
        """Whether the text ends with the string after this letter. Not called again after it does."""
        while self.matched and letter != self.stop[self.matched]:
            self.matched = self._shorter[self.matched - 1]
        self.matched += letter == self.stop[self.matched]
        return self.matched == len(self.stop)
