"""A document, as the readers of text pass it to the tokenizer."""

from typing import NamedTuple


class Document(NamedTuple):
    """A text, its origin, and the ranges that count in the loss.

    Attributes:
        text: not empty.
        origin: file and row for messages, such as 'mail.jsonl:12'.
        answers: character ranges [start, stop), in order and disjoint. Tokens that start in one of them count in the
            loss, and so does the end-of-text token. None: all tokens count.
    """

    text: str
    origin: str
    answers: tuple[tuple[int, int], ...] | None = None
