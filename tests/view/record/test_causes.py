"""What the time of a run was spent on, for people."""

from pretrax.observe.goodput import CAUSES
from pretrax.view.definitions import DEFINITIONS
from pretrax.view.record.causes import FAMILY, shares, shares_text


def test_every_cause_has_a_definition_in_seconds():
    assert {DEFINITIONS[FAMILY + cause].unit for cause in CAUSES} == {'s'}
    assert [key for key in DEFINITIONS if key.startswith(FAMILY)] == [FAMILY + cause for cause in CAUSES]


def test_shares_are_those_of_all_time_and_the_longest_is_first():
    seconds = dict.fromkeys(CAUSES, 0.0) | {'idle': 20.0, 'kept': 70.0, 'lost': 10.0}
    found = [(definition.name, n, share) for definition, n, share in shares(seconds)]
    assert found == [('steps kept', 70.0, '70.0%'), ('idle', 20.0, '20.0%'), ('steps lost', 10.0, '10.0%')]
    assert shares_text(seconds, most=2) == 'steps kept 70.0%, idle 20.0%'
    assert (shares({}), shares_text({})) == ([], '')
