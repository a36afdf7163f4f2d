"""An island without weights, as a process: it contributes to rounds until a number of rounds is closed.

    python bare_island.py PLACE NAME ISLANDS ROUNDS PATIENCE CLOCK

It prints `joined`, and the members of each round that it took. It is started again from nothing. CLOCK is added to its
clock.
"""

import hashlib
import sys
import time

from pretrax.federation.objects import ISLANDS, Contribution, Piece
from pretrax.federation.registry import join
from pretrax.federation.rounds import Due, Rounds, Waiting
from pretrax.storage.shared_path import locate_shared


def persistently(request, *arguments):
    """The answer to a request, which is made until it succeeds."""
    while True:
        try:
            return request(*arguments)
        except OSError as error:
            print(f'OSError: {error}', file=sys.stderr, flush=True)
            time.sleep(0.05)


def contribution(membership, number, first, anchor):
    name, attempt = membership.name, membership.attempt
    digest = hashlib.md5(f'{name} {number} {first} {anchor}'.encode()).hexdigest()
    piece = Piece(object=f'rounds/{number}/{name}/{attempt}/0/x', size=1, xxh3=digest)
    return Contribution(
        round=number, name=name, attempt=attempt, base=number - 1, step=first + 1, first_batch=first,
        last_batch=first + 1, tokens=1, anchor=anchor, encoding='f32', pieces={'0': [piece]},
    )  # fmt: skip


def anchor_after(rounds, newest):
    """A digest of the members of all rounds, as that of weights would be."""
    total = hashlib.md5()
    for number in range(1, newest + 1):
        total.update(repr(sorted(persistently(rounds.members, rounds.closing(number)))).encode())
    return total.hexdigest()


def run(place, name, islands, count, patience, clock):
    place = locate_shared(place)
    with join(place, name, {ISLANDS: islands, 'clock': None}, 5, print) as membership:
        print('joined', flush=True)
        rounds = Rounds(membership, patience, print, lambda: time.monotonic() + clock)
        number, batch, is_left_out = 0, 0, True
        while number <= count:
            if is_left_out:
                number, batch = came_in(rounds, batch)
                if number > count:
                    break
                persistently(rounds.announce, number, 'training')
            own = contribution(membership, number, batch, anchor_after(rounds, number - 1))
            persistently(rounds.contribute, own)
            closing = closed(rounds, number)
            print('round', number, *closing.in_order(), flush=True)
            is_left_out = not closing.lists(own)
            number, batch = number + 1, batch + 1
            persistently(rounds.announce, number, 'training')
        persistently(rounds.announce, number, 'finished')
    print('ended', flush=True)


def came_in(rounds, batch):
    """The round to train for, and the first batch."""
    newest = persistently(rounds.newest)
    if newest:
        batch = max(batch, rounds.closing(newest).step)
    return newest + 1, batch


def closed(rounds, number):
    while True:
        found = persistently(rounds.poll, number)
        if isinstance(found, Due):
            found = persistently(rounds.close, found, {})
        if not isinstance(found, Waiting):
            return found
        time.sleep(min(found.pause, 0.02))


if __name__ == '__main__':
    where, who, *numbers = sys.argv[1:]
    run(where, who, *(float(number) if '.' in number else int(number) for number in numbers))
