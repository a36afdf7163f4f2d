"""What the objects of a federation say, as islands, rounds and lines of metrics."""

import json
import math

import pytest

from hand_made_federations import closing, contribution, hold, write_federation
from pretrax.federation.objects import State, closing_path, contribution_path, island_path
from pretrax.federation.registry import is_federation
from pretrax.view.federation.lines import Lines, as_file, metric_lines, spread
from pretrax.view.federation.read import Silence, read_federation
from pretrax.view.federation.tables import open_text, round_records


@pytest.fixture
def place(tmp_path):
    return write_federation(tmp_path / 'fed')


def test_islands_and_the_open_round_are_those_that_were_written(place):
    federation = read_federation(place)
    a, b, c = federation.islands
    assert [one.name for one in federation.islands] == ['a', 'b', 'c']
    assert (a.state, a.round, a.step, a.loss, a.used, a.left_out) == ('training', 4, 40, 1.5, 300, 0)
    assert (b.step, b.loss, b.used, b.late, b.rejected) == (30, 2.0, 500, 0, 0)
    assert (c.state, c.used, c.left_out, c.late, c.rejected) == ('lost', 200, 150 + 50, 1, 1)
    assert a.holder == 'process 71 on node-a since 2026-11-28 10:00:00 UTC'
    assert c.holder == ''
    assert federation.state == ('running', '2 of 3 islands train')
    assert federation.opened.number == 4
    assert list(federation.opened.contributions) == ['a']
    assert federation.waits_for == ['b', 'c']
    assert federation.problems == []


def test_the_state_of_the_whole_follows_from_the_islands(place):
    def say(state, names):
        for name in names:
            (island_path(place, name) / 'state.json').write_bytes(State(round=4, state=state).content())

    say('finished', 'ab')
    assert read_federation(place).state == ('lost', '0 of 3 islands train')
    hold(place, 'c')
    assert read_federation(place).state == ('running', '1 of 3 islands train')
    say('stopped', 'c')
    assert read_federation(place).state == ('stopped', '0 of 3 islands train')
    say('finished', 'abc')
    assert read_federation(place).state == ('finished', '')


def test_an_island_is_silent_that_does_not_renew_its_lease_while_one_watches(place):
    def renew(name, renewals):
        lock = island_path(place, name) / 'lock'
        lock.write_text(json.dumps({'holder': 'process 9 on far', 'seconds': 60, 'token': 'x', 'renewals': renewals}))

    now = 1e6
    silence = Silence(lambda: now)
    for name in 'abc':
        renew(name, 1)
    states = lambda: ''.join(one.state[0] for one in read_federation(place, silence=silence).islands)  # noqa: E731
    assert (states(), silence.wait) == ('ttt', 30)
    now += 29
    renew('a', 2)
    assert states() == 'ttt'
    now += 1
    found = read_federation(place, silence=silence)
    assert [one.state for one in found.islands] == ['training', 'silent', 'silent']
    assert found.state == ('running', '1 of 3 islands train')
    assert open_text(found) == 'round 4 is open: a contributed, it waits for b (silent), c (silent)'
    renew('b', 2)
    assert states() == 'tts'
    now += 60
    assert (states(), read_federation(place, silence=silence).state[0]) == ('sss', 'lost')
    assert read_federation(place).state[0] == 'running'


def test_lines_have_the_numbers_of_a_calculation_by_hand(place):
    lines = metric_lines(read_federation(place))
    assert [(line['step'], line['round/round']) for line in lines] == [
        (10, 1), (10, 1), (20, 2), (20, 2), (30, 3), (30, 3)
    ]  # fmt: skip
    first, found, second, _, third, last = lines
    assert first['loss'] == (100 * 6 + 100 * 4 + 200 * 3) / 400
    assert (first['tokens'], first['tokens_left_out'], first['time']) == (400, 0, 1.7e9 + 1)
    assert first['tokens_per_second'] == 400 / 2
    assert (first['round/members'], first['round/bytes_up']) == (3, 3000)
    assert {key: x for key, x in first.items() if key.startswith('island_loss/')} == {
        'island_loss/a': 6.0, 'island_loss/b': 4.0, 'island_loss/c': 3.0
    }  # fmt: skip
    assert (found['val_loss'], found['round/seconds'], found['round/bytes_down']) == (4.0, 0.5, 4000)
    assert math.isclose(found['round/outer_norm'], math.hypot(2, 2))
    # |D - G|^2 is 8, 8 and 0. The products with G are 8, 8 and 8. Pairs: 0, 8 and 8.
    assert math.isclose(found['round/distance'], math.sqrt((8 + 8) / 4), rel_tol=1e-6)
    norms = (4 / 4, 4 / 4, math.sqrt(8) / 2)
    cosines = (math.sqrt(0.5), math.sqrt(0.5), 1.0)
    assert math.isclose(found['round/cosine'], sum(n * c for n, c in zip(norms, cosines, strict=True)) / sum(norms))
    pairs = norms[0] * norms[1], norms[0] * norms[2], norms[1] * norms[2]
    assert math.isclose(found['round/pair_cosine'], (1 / 8 * 8 + 1 / 8 * 8) / sum(pairs))
    assert (second['tokens'], second['tokens_left_out'], second['round/left_out']) == (600, 150, 1)
    assert (third['loss'], third['tokens'], third['tokens_left_out'], third['round/rejected']) == (2.25, 1000, 200, 1)
    assert (last['val_loss'], last['round/seconds'], last['round/bytes_down']) == (2.0, 1.5, 4000)


def test_rounds_after_the_last_step_have_no_tokens(place):
    """Their contributions weigh one token each, since a round has to have some."""
    last = [contribution(4, name, 1, 1.0, 1.0, step=30, first_batch=30, last_batch=30) for name in 'ab']
    for one in last:
        contribution_path(place, 4, one.name).write_bytes(one.content())
    closing_path(place, 4).write_bytes(closing(4, last, ['a', 'b']).content())
    federation = read_federation(place)
    line = next(line for line in metric_lines(federation) if line['round/round'] == 4)
    assert (line['tokens'], line['round/tokens'], line['island_tokens/a']) == (1000, 0, 0)
    assert 'tokens_per_second' not in line
    assert [one.used for one in federation.islands] == [300, 500, 200]
    assert round_records(federation, 1)[0]['tokens'] == 0


def test_rounds_that_close_while_one_looks_give_the_same_lines(place):
    federation = read_federation(place)
    lines = Lines()
    grown = [line for one in federation.rounds for line in lines.make([one])]
    grown += lines.make([], federation.taken[:1])
    assert (grown[-1]['val_loss'], grown[-1].get('round/seconds')) == (2.0, None)  # island b may say more
    grown += lines.make([], federation.taken)
    assert lines.make([], federation.taken) == []
    merged, expected = {}, {}
    for line in grown:
        merged.setdefault(line['round/round'], {}).update(line)
    for line in metric_lines(federation):
        expected.setdefault(line['round/round'], {}).update(line)
    assert merged == expected
    assert [json.loads(line) for line in as_file(grown).splitlines()] == grown


def test_the_newest_rounds_can_be_read_without_the_others(place):
    federation = read_federation(place, newest=1)
    assert [one.number for one in federation.rounds] == [3]
    assert 'tokens' not in metric_lines(federation)[0]
    assert [len(one.members) for one in read_federation(place, detailed=1).rounds] == [0, 0, 2]
    assert read_federation(place, detailed=1).islands[2].left_out == 200
    (island_path(place, 'c') / 'state.json').write_bytes(State(round=1 << 40, state='training').content())
    assert [one.number for one in read_federation(place, newest=1).rounds] == [1, 2, 3]


@pytest.mark.parametrize(
    ('path', 'shown'),
    [
        (lambda place: closing_path(place, 2), [1]),
        (lambda place: contribution_path(place, 3, 'b'), [1, 2, 3]),
        (lambda place: island_path(place, 'b') / 'state.json', [1, 2, 3]),
    ],
)
def test_a_damaged_object_is_a_problem_and_the_rest_is_shown(place, path, shown):
    path(place).write_bytes(b'{"format": 1, "round": 2}')
    federation = read_federation(place)
    assert [one.number for one in federation.rounds] == shown
    assert len(federation.problems) == 1
    assert path(place).name.removesuffix('.json') in federation.problems[0]
    assert metric_lines(federation)


def test_a_contribution_that_was_replaced_is_not_shown(place):
    contribution_path(place, 1, 'a').write_bytes(contribution(1, 'a', 100, 0.001, 4.0).content())
    federation = read_federation(place)
    assert 'island_loss/a' not in metric_lines(federation)[0]
    assert 'closed.json' in federation.problems[0]


def test_numbers_that_nobody_knows_are_left_out(place):
    assert spread([contribution(1, 'a', 5, 1.0, 2.0)], 2.0) == {}
    assert spread([contribution(1, 'a', 5, 1.0, None), contribution(1, 'b', 5, 1.0, 1.0)], 2.0) == {}
    assert spread([contribution(1, 'a', 5, 1.0, 0.0), contribution(1, 'b', 5, 1.0, 0.0)], 0.0) == {'round/distance': 0}


def test_a_foreign_file_of_this_name_makes_no_federation(tmp_path, place):
    (tmp_path / 'federation.json').write_text('{"servers": []}')
    assert not is_federation(tmp_path)
    assert is_federation(place)
