"""Proposals and their acceptance equal a loop over the tokens of one sequence."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pretrax.infer.speculate import accepted, look_up

SLOTS, LENGTH, PROPOSED = 4, 24, 5
look_up = functools.partial(jax.jit, static_argnames=('proposed', 'ngram'))(look_up)
accepted = jax.jit(accepted)


def continuation(text, ngram):
    """What followed the latest earlier occurrence of the last `ngram` tokens, or of fewer if there is none."""
    for n in range(ngram, 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[len(text) - n :]:
                text = list(text)
                for i in range(PROPOSED):
                    text.append(text[start + n + i])
                return text[-PROPOSED:]
    return [-1] * PROPOSED


@pytest.mark.parametrize('ngram', [1, 3])
@given(texts=st.lists(st.lists(st.integers(0, 2), max_size=LENGTH), min_size=SLOTS, max_size=SLOTS))
@example(texts=[[5, 6, 7, 8, 9, 5, 6], [1, 2, 3, 1, 9, 4, 3, 1], [], [0] * LENGTH])
@example(texts=[[1, 2, 8, 1, 2, 9, 2, 7, 1, 2], [4], [0, 0], list(range(LENGTH))])
def test_proposals_continue_the_latest_occurrence_of_the_last_tokens(ngram, texts):
    history = np.zeros((SLOTS, LENGTH), np.int32)  # what comes after a text is a token too
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    found = look_up(history, lengths, proposed=PROPOSED, ngram=ngram)
    assert found.tolist() == [continuation(text, ngram) for text in texts]


def test_proposals_by_hand():
    text = [7, 8, 9, 1, 2, 3, 4, 5, 8, 9, 6, 8, 9]
    history = np.pad(np.array([text], np.int32), ((0, 0), (0, 5)))
    assert look_up(history, np.array([13]), proposed=3, ngram=3).tolist() == [[6, 8, 9]]
    assert look_up(history, np.array([10]), proposed=4, ngram=3).tolist() == [[1, 2, 3, 4]]
    assert look_up(history, np.array([8]), proposed=3, ngram=3).tolist() == [[-1, -1, -1]]
    assert look_up(np.array([[1, 4, 4]]), np.array([3]), proposed=3, ngram=3).tolist() == [[4, 4, 4]]


some = st.lists(st.integers(-1, 1), min_size=SLOTS * PROPOSED, max_size=SLOTS * PROPOSED)


@given(proposals=some, chosen=some)
def test_proposals_are_accepted_up_to_the_first_difference(proposals, chosen):
    proposals, chosen = (np.array(x, np.int32).reshape(SLOTS, PROPOSED) for x in (proposals, chosen))
    chosen = np.pad(np.abs(chosen), ((0, 0), (0, 1)))  # a token is not negative, and one follows the last proposal
    expected = []
    for row in range(SLOTS):
        count = 0
        while count < PROPOSED and proposals[row, count] == chosen[row, count]:
            count += 1
        expected.append(count)
    assert accepted(proposals, chosen).tolist() == expected
