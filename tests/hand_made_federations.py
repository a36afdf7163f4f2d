"""A federation of three islands written by hand: three rounds are closed, and the fourth one is open.

Round 1 has the differences (4, 0), (0, 4) and (2, 2), whose weights are 1/4, 1/4 and 1/2, and whose mean is (2, 2). In
round 2, island c was late, and its 150 tokens count for nothing. In round 3 its numbers were rejected.
"""

import json
import math

import xxhash

from pretrax.federation.objects import (
    Closing,
    Contribution,
    Member,
    Piece,
    State,
    Table,
    Taken,
    closing_path,
    contribution_path,
    island_path,
    table_path,
)
from pretrax.storage.shared_path import SharedPath
from pretrax.system.launchers import identity

NAMES = {'a': 0, 'b': 1, 'c': 2}


def contribution(number, name, tokens, loss, norm, took=None, **changes):
    piece = Piece(object=f'rounds/{number}/{name}/5f/0/index.json', size=8, xxh3='0' * 32)
    fields = {
        'round': number, 'name': name, 'attempt': '5f', 'base': number - 1, 'step': 10 * number,
        'first_batch': 10 * (number - 1), 'last_batch': 10 * number, 'tokens': tokens, 'anchor': '0' * 32,
        'encoding': 'bf16', 'pieces': {'0': [piece]}, 'norm': norm, 'loss': loss, 'seconds': 2.0, 'bytes': 1000,
        'time': 1.7e9 + number, 'took': took,
    }  # fmt: skip
    return Contribution(**(fields | changes))


def closing(number, contributions, names, rejected=(), left_out=(), shares=NAMES):
    members = {
        one.name: Member(
            share=shares[one.name],
            xxh3=xxhash.xxh3_128_hexdigest(one.content()),
            learned=one.learned(),
            tokens=one.tokens,
            step=one.step,
        )
        for one in contributions
        if one.name in names
    }
    return Closing(
        round=number,
        by=names[0],
        members=members,
        rejected=dict(rejected),
        left_out=list(left_out),
        tokens=sum(one.tokens for one in members.values()),
        step=10 * number,
    )


def hold(place, name, released=False):
    """Writes the lease of an island, as this process would."""
    lease = {'holder': f'process 71 on node-{name}', 'since': '2026-11-28 10:00:00 UTC', 'seconds': 60}
    lease |= {'released': released, 'token': '5f', 'renewals': 3, 'process': identity()}
    (island_path(place, name) / 'lock').write_bytes(json.dumps(lease).encode())


def write_federation(directory, names=NAMES):
    """Writes the federation. `names`: those of the islands instead of a, b and c."""
    place = SharedPath(directory)
    a, b, c = names
    terms = {'federation.islands': 3, 'federation.every': 10, 'steps': 100}
    table_path(place).write_bytes(Table(founder=a, terms=terms, islands=names).content())
    facts = {
        number: Taken(round=number, norm=norm, val_loss=5.0 - number, seconds=0.5 * number, bytes=2000)
        for number, norm in ((1, math.sqrt(8)), (2, 3.0), (3, 1.0))
    }
    rounds = {
        1: [
            contribution(1, a, 100, 6.0, 4.0),
            contribution(1, b, 100, 4.0, 4.0),
            contribution(1, c, 200, 3.0, math.sqrt(8)),
        ],
        2: [contribution(2, name, 100, 3.5, 3.0, facts[1]) for name in (a, b)] + [contribution(2, c, 150, 9.0, 1.0)],
        3: [
            contribution(3, a, 100, 3.0, 2.0, facts[2]),
            contribution(3, b, 300, 2.0, 2.0),
            contribution(3, c, 50, None, None),
        ],
        4: [contribution(4, a, 100, 1.5, 2.0)],
    }
    for number, contributions in rounds.items():
        for one in contributions:
            contribution_path(place, number, one.name).create(one.content())
    closings = [
        closing(1, rounds[1], [a, b, c], shares=names),
        closing(2, rounds[2], [a, b], left_out=[c], shares=names),
        closing(3, rounds[3], [b, a], rejected={c: 'chunk 0 is not finite'}, shares=names),
    ]
    for one in closings:
        closing_path(place, one.round).create(one.content())
    for name in (a, b):
        (island_path(place, name) / 'state.json').write_bytes(State(round=4, state='training', took=facts[3]).content())
        hold(place, name)
    (island_path(place, c) / 'state.json').write_bytes(State(round=4, state='training').content())
    hold(place, c, released=True)
    return place
