"""Pages, docstrings, messages and names have no phrase that `scripts/check_english.py` finds."""

import check_english


def test_no_phrase_has_to_be_read_twice():
    assert not check_english.problems()


def test_every_exception_is_used():
    for name, allowed in check_english.ALLOWED.items():
        text = (check_english.REPOSITORY / name).read_text()
        assert all(any(phrase in line for line in check_english.phrases(text)) for phrase in allowed)


def test_phrases_are_found_across_lines():
    assert [*check_english.phrases('stops after so\n    # many steps')]
    assert [*check_english.phrases('It depends on the batch\nalone.')]
    assert [*check_english.phrases('It adds up. Of each row, the last counts.')]
    assert not [
        *check_english.phrases(
            'as many as there are; shard the weights; told_you = 1; a student trained alone; of course'
        )
    ]


def test_names_and_openings_are_found():
    assert len([*check_english.names_and_openings('def _of_rows():\n    """Of each row, the sum."""')]) == 2
    assert [*check_english.names_and_openings("Option(help='Of the choice of documents.')")]
    assert not [*check_english.names_and_openings('def office():\n    """Offers a room."""')]
