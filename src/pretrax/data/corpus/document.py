"""A document, as the readers of text pass it to the tokenizer."""

from typing import NamedTuple


class Document(NamedTuple):
    """A text, its origin, and the ranges that count in the loss.

    Attributes:
        text: not empty.
        origin: file and row for messages, such as 'mail.jsonl:12'.
        answers: character ranges [start, stop), in order and disjoint. Tokens that start in one of them count in the
            loss, and so does the end-of-text token. None: all tokens count.
        special_tokens: for a conversation, (start, stop, id) of each special token in the text. Its end-of-text token
            counts only if it is a part of the text. None: the text has no special tokens.
    """

    text: str
    origin: str
    answers: tuple[tuple[int, int], ...] | None = None
    special_tokens: tuple[tuple[int, int, int], ...] | None = None
