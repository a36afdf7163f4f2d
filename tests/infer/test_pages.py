"""Slots share the pages of equal beginnings, and no page is written by one slot while another one uses it."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pretrax.infer.pages import PagePool, SlotPages

SLOTS, PAGE, LENGTH = 3, 4, 40
LONGEST_WRITE = 9
some_tokens = st.lists(st.integers(0, 1), max_size=LONGEST_WRITE)  # two tokens: beginnings are often equal


class Slots(RuleBasedStateMachine):
    """Writes into a cache through the tables, as an engine does, and compares what is there with what was written.

    The cache holds at each place what a real one depends on: all tokens up to there, and the weights that read them.
    """

    @initialize(
        pages=st.integers(8, 20), ring_pages=st.integers(6, 14), window=st.integers(1, 9), kinds=st.integers(1, 3)
    )
    def start(self, pages, ring_pages, window, kinds):
        self.window = window
        ring_blocks = -(-(window + LONGEST_WRITE - 1) // PAGE) + 1
        sizes = {}
        if kinds & 1:
            sizes |= {'pages': 1 + pages}
        if kinds & 2:
            sizes |= {'ring_pages': 1 + ring_pages, 'ring_blocks': ring_blocks, 'window': window}
        self.slots = SlotPages(SLOTS, PAGE, LENGTH, **({'pages': 0} | sizes))
        self.total = sum(n - 1 for name, n in sizes.items() if name in ('pages', 'ring_pages'))
        self.cache = {'full': {}, 'ring': {}}  # (page, offset) -> what is there
        self.kinds = [kind for kind, bit in (('full', 1), ('ring', 2)) if kinds & bit]
        self.running = {}  # slot -> its tokens, and what was written at each position
        self.weights = 0
        self.read = set()  # beginnings, and the weights that read them

    def place(self, kind, slot, position):
        table = getattr(self.slots, kind)[slot]
        page = int(table[position // PAGE % len(table)])
        assert page != 0
        return page, position % PAGE

    def seen(self, kind, length):
        """Positions that the next token sees."""
        return range(0 if kind == 'full' else max(0, length - self.window + 1), length)

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(data=st.data(), like=st.integers(0, SLOTS - 1), more=some_tokens, shorter=st.integers(0, 9))
    def begin(self, data, like, more, shorter):
        """With a random prompt, or with one that begins like a running one."""
        slot = data.draw(st.sampled_from([slot for slot in range(SLOTS) if slot not in self.running]))
        tokens, _ = self.running.get(like, ([], []))
        prompt = (tokens[: max(0, len(tokens) - shorter)] + more + [0])[: LENGTH - LONGEST_WRITE]
        expected = self.slots.cached_tokens(prompt)
        cached = self.slots.begin(slot, prompt)
        assert cached == expected < len(prompt)
        assert cached % PAGE == 0
        written = [(tuple(prompt[: i + 1]), (self.weights,)) for i in range(cached)]
        self.running[slot] = prompt[:cached], written
        assert cached == 0 or written[-1] in self.read

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=some_tokens, rejected=st.integers(0, 3))
    def write(self, data, tokens, rejected):
        """Writes tokens. The last ones are proposals, and may be rejected."""
        slot = data.draw(st.sampled_from(sorted(self.running)))
        known, written = self.running[slot]
        tokens = tokens[: LENGTH - len(known)]
        kept = max(0, len(tokens) - rejected)
        before = self.snapshot()
        if not self.slots.reserve(slot, len(known) + len(tokens)):
            assert before == self.snapshot()
            assert self.needs_more(slot, len(known) + len(tokens))
            return
        weights = self.weights
        for i, token in enumerate(tokens):
            known.append(token)
            versions = tuple(sorted({weights, *(written[-1][1] if written else ())}))
            written.append((tuple(known), versions))
            for kind in self.kinds:
                self.cache[kind][self.place(kind, slot, len(known) - 1)] = written[-1]
            if i < kept:
                self.read.add(written[-1])
        del known[len(known) - (len(tokens) - kept) :], written[len(written) - (len(tokens) - kept) :]
        self.slots.advance(slot, [*known, 0, 1], len(known))

    def needs_more(self, slot, length):
        """Whether a pool has fewer pages without a user than the slot lacks."""
        for kind in self.kinds:
            table = getattr(self.slots, kind)
            pool = self.slots._layers[self.kinds.index(kind)].pool
            first = 0 if kind == 'full' else max(0, len(self.running[slot][0]) - self.window + 1) // PAGE
            lacking = -(-length // PAGE) - first - np.count_nonzero(table[slot])
            if lacking > pool.size - len(set(table.flat) - {0}):
                return True
        return False

    def snapshot(self):
        return self.slots.full.tolist(), self.slots.ring.tolist(), self.slots.used_pages, self.slots.cached_pages

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        self.slots.end(slot)
        del self.running[slot]

    @rule()
    def swap_weights(self):
        self.slots.clear_cache()
        self.weights += 1
        assert self.slots.cached_pages == 0

    @invariant()
    def every_slot_sees_what_it_wrote_or_found(self):
        for slot, (known, written) in getattr(self, 'running', {}).items():
            for kind in self.kinds:
                for position in self.seen(kind, len(known)):
                    assert self.cache[kind][self.place(kind, slot, position)] == written[position]

    @invariant()
    def used_pages_are_those_in_the_tables(self):
        if hasattr(self, 'running'):
            used = sum(len(set(getattr(self.slots, kind).flat) - {0}) for kind in ('full', 'ring'))
            assert self.slots.used_pages == used
            assert 0 <= self.slots.cached_pages <= self.total - used

    def teardown(self):
        if hasattr(self, 'running'):
            for slot in self.running:
                self.slots.end(slot)
            assert self.slots.used_pages == 0
            assert not self.slots.full.any()
            assert not self.slots.ring.any()
            for layers in self.slots._layers:
                every = {layers.pool.allocate() for _ in range(layers.pool.size)}
                assert every == set(range(1, layers.pool.size + 1))


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)


def read(slots, slot, tokens, *, end=True):
    """Reads a prompt to the end. Returns the number of tokens that were cached."""
    cached = slots.begin(slot, tokens)
    assert slots.reserve(slot, len(tokens))
    slots.advance(slot, tokens, len(tokens))
    if end:
        slots.end(slot)
    return cached


def test_a_prompt_finds_the_full_pages_of_an_equal_beginning():
    slots = SlotPages(4, 4, 40, pages=30)
    text = list(range(100, 130))
    assert read(slots, 0, text[:10], end=False) == 0
    assert read(slots, 1, text[:10], end=False) == 8
    assert slots.full[1, :2].tolist() == slots.full[0, :2].tolist()
    assert slots.full[1, 2] != slots.full[0, 2]
    assert slots.used_pages == 4
    assert read(slots, 2, text[:8]) == 4  # the last token has to be read
    assert read(slots, 2, text[:9]) == 8
    assert read(slots, 2, [*text[:5], 7, *text[6:12]]) == 4
    assert read(slots, 2, text[4:12]) == 0  # the same tokens after others
    slots.end(0)
    slots.end(1)
    assert read(slots, 0, text) == 8
    assert read(slots, 0, text) == 28


def test_the_least_recently_used_prompt_is_evicted_from_its_end():
    slots = SlotPages(2, 4, 40, pages=1 + 6)
    first, second, third = ([n] * 9 for n in range(3))
    assert read(slots, 0, first) == read(slots, 0, second) == 0
    assert slots.cached_pages == 4
    assert read(slots, 0, first) == 8  # now `second` is older
    assert read(slots, 0, third) == 0  # needs three pages; two are free
    assert slots.cached_tokens(first) == slots.cached_tokens(third) == 8
    assert slots.cached_tokens(second) == 4


def test_pages_in_use_are_never_evicted():
    slots = SlotPages(3, 4, 40, pages=1 + 5)
    assert read(slots, 0, [1] * 12, end=False) == 0
    assert slots.begin(1, [2] * 12) == 0
    assert not slots.reserve(1, 12)
    assert slots.used_pages == 3
    assert slots.reserve(1, 8)
    slots.advance(1, [2] * 12, 8)
    assert not slots.reserve(1, 9)
    slots.end(1)  # interrupted, to begin again when there is room
    slots.end(0)
    assert read(slots, 1, [2] * 12) == 8


@pytest.mark.parametrize(('pages', 'ring_pages'), [(1 + 3, 1 + 9), (1 + 9, 1 + 3)])
def test_a_slot_waits_for_pages_of_both_kinds(pages, ring_pages):
    slots = SlotPages(2, 4, 40, pages=pages, ring_pages=ring_pages, ring_blocks=5, window=8)
    slots.begin(0, [1] * 9)
    assert slots.reserve(0, 8)
    slots.begin(1, [2] * 9)
    assert slots.used_pages == 4
    assert not slots.reserve(1, 8)
    assert slots.used_pages == 4
    assert not slots.full[1].any()
    assert not slots.ring[1].any()
    slots.end(0)
    assert slots.reserve(1, 8)


def test_new_weights_find_nothing_of_the_old_ones():
    slots = SlotPages(3, 4, 40, pages=30)
    text = list(range(24))
    assert read(slots, 0, text[:9]) == 0
    assert read(slots, 1, text[:12], end=False) == 8
    slots.clear_cache()
    assert slots.cached_tokens(text) == 0
    assert slots.reserve(1, 24)
    slots.advance(1, text, 24)  # with new weights, after keys and values of the old ones
    assert slots.cached_tokens(text) == 0
    slots.end(1)
    assert slots.used_pages == slots.cached_pages == 0
    assert read(slots, 2, text) == 0
    assert read(slots, 2, text) == 20


def test_a_ring_keeps_what_the_window_sees():
    """A window of 6 tokens, written 5 at a time: at most 4 blocks of 4 are seen or written."""
    slots = SlotPages(1, 4, 60, pages=0, ring_pages=1 + 4, ring_blocks=4, window=6)
    text = list(range(60))
    assert slots.begin(0, text) == 0
    for length in range(5, 61, 5):
        assert slots.reserve(0, length)
        slots.advance(0, text, length)
        kept = {block % 4 for block in range((length - 5) // 4, -(-length // 4))}
        assert set(np.flatnonzero(slots.ring[0])) == kept
        assert slots.used_pages == len(kept)
    assert not slots.full.any()


@pytest.mark.parametrize(('evicted', 'usable'), [(0, 16), (2, 16), (3, 0), (4, 0)])
def test_a_prefix_needs_the_window_at_its_end_alone(evicted, usable):
    """Of 16 tokens in 4 pages, the last two are in the window of 6 of token 16."""
    sizes = {'pages': 30, 'ring_pages': 1 + 5, 'ring_blocks': 5, 'window': 6}
    slots = SlotPages(2, 4, 60, **sizes)
    text = list(range(18))
    assert read(slots, 0, text) == 0
    assert slots.cached_pages == 4 + 4
    ring = slots._layers[1].pool
    for _ in range(1 + evicted):  # one is free
        ring.allocate()
    assert slots.cached_tokens(text) == usable
    if usable:
        slots.begin(0, text)
        assert np.count_nonzero(slots.full[0]) == 4
        assert np.flatnonzero(slots.ring[0]).tolist() == [2, 3]


def test_a_shorter_prefix_is_found_when_the_window_of_a_longer_one_is_gone():
    slots = SlotPages(2, 4, 60, pages=30, ring_pages=1 + 8, ring_blocks=8, window=4)
    text = list(range(25))
    read(slots, 0, text)
    assert read(slots, 0, [*text[:20], 7, 7, 7]) == 20  # uses the fifth page again, but not the sixth
    read(slots, 0, [9] * 28)  # evicts five pages
    assert slots.cached_tokens(text) == 20


def test_what_was_written_beyond_the_tokens_is_not_shared():
    """Proposals fill a page, but only one token of it is kept."""
    slots = SlotPages(2, 4, 40, pages=30)
    slots.begin(0, [1] * 5)
    assert slots.reserve(0, 8)
    slots.advance(0, [1] * 8, 5)
    assert slots.cached_tokens([1] * 9) == 4
    slots.advance(0, [1, 1, 1, 1, 1, 2, 2, 2], 8)
    assert slots.cached_tokens([1] * 9) == 4
    assert slots.cached_tokens([1, 1, 1, 1, 1, 2, 2, 2, 2]) == 8


def test_a_pool_gives_each_page_to_one_user_and_keeps_page_0():
    pool = PagePool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.available == 0
    pool.register(2, b'a')
    assert pool.share(b'a') == 2
    pool.release(2)
    assert pool.available == 0
    pool.release(2)
    assert (pool.available, pool.cached) == (1, 1)
    assert pool.allocate() == 2
    assert b'a' not in pool
