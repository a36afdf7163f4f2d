"""A document on its way from a file to tokens."""

from typing import NamedTuple


class Document(NamedTuple):
    """A text, where it came from, and which of it the model is to learn to write.

    `place` is for messages: 'mail.jsonl:12'. `answers` are character ranges [start, stop), in order and apart: tokens
    that begin in one count in the loss, and so does the end-of-text token. None: all tokens count.
    """

    text: str
    place: str
    answers: tuple[tuple[int, int], ...] | None = None
