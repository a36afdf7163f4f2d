"""Rows as text: where documents begin and end, what counts, and nothing that controls a terminal."""

import numpy as np

from pretrax.data.batches.source import HostBatch
from pretrax.run.seen_batch import row_text


class Letters:
    """Token n is the character with the code n."""

    def decode(self, ids):
        return ''.join(map(chr, ids))


def batch(text, segments, mask, after='?'):
    tokens = np.array([[ord(c) for c in text]], np.int32)
    targets = np.array([[*tokens[0, 1:], ord(after)]], np.int32)
    return HostBatch(tokens, targets, np.array([segments]), tokens * 0, np.array([mask], np.float32))


def test_each_document_has_its_columns_its_counted_targets_and_its_text():
    row = batch('abcdef', [1, 1, 1, 2, 2, 2], [1, 1, 0, 1, 0.5, 1])
    assert list(row_text(row, 0, Letters(), ids=False)) == [
        '  columns 0 to 2: document 1 of the row, 2 of 3 targets count',
        '    | abc',
        '  columns 3 to 5: document 2 of the row, 3 of 3 targets count',
        '    | def?',
    ]
    assert '    ids: 100 101 102 63' in list(row_text(row, 0, Letters(), ids=True))


def test_padding_is_named_and_control_characters_are_replaced():
    row = batch('a\x1b[2J\nb\0\0', [1] * 7 + [2] * 2, [1] * 6 + [0] * 3, after='\0')
    assert list(row_text(row, 0, Letters(), ids=False)) == [
        '  columns 0 to 6: document 1 of the row, 6 of 7 targets count',
        '    | a\ufffd[2J',
        '    | b',
        '  columns 7 to 8: padding',
    ]


def test_without_a_tokenizer_the_ids_are_shown():
    row = batch('ab', [1, 1], [1, 0])
    assert list(row_text(row, 0, None, ids=False))[1:] == ['    ids: 97 98']
