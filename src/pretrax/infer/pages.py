"""Which pages of the cache belong to which slot. All on the host, without JAX: the tables are sent to the device.

A prompt that begins like an earlier one shares its full pages. Pages without a user stay cached until they are needed,
least recently used first. Kwon et al. 2023, arXiv:2309.06180, section 4; Zheng et al. 2024, arXiv:2312.07104.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np


class PagePool:
    """Pages with reference counts. Page 0 belongs to nobody: what is padding is written there."""

    def __init__(self, pages: int):
        self.size = pages - 1
        self._free = list(range(self.size, 0, -1))
        self._users = [0] * pages
        self._key: dict[int, bytes] = {}  # of pages with known contents
        self._page: dict[bytes, int] = {}
        self._unused: dict[int, None] = {}  # cached pages without a user, the least recently used first

    @property
    def available(self) -> int:
        """Pages that can be allocated."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        return self.size - self.available

    @property
    def cached(self) -> int:
        """Pages that nobody uses, kept for later."""
        return len(self._unused)

    def allocate(self) -> int:
        """A page for one user. The cache loses its least recently used page if no other is left."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._unused))
            del self._unused[page]
            self._forget(page)
        self._users[page] = 1
        return page

    def share(self, key: bytes) -> int:
        """Adds a user to the page that was registered under a key, and returns the page."""
        page = self._page[key]
        self._unused.pop(page, None)
        self._users[page] += 1
        return page

    def release(self, page: int) -> None:
        """Removes a user from a page. Without users, it stays in the cache if it is registered there."""
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._key:
                self._unused[page] = None
            else:
                self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Makes a page known by what it contains, unless another page with the same contents is known."""
        if key not in self._page:
            self._page[key] = page
            self._key[page] = key

    def __contains__(self, key: bytes) -> bool:
        return key in self._page

    def clear_cache(self) -> None:
        """Forgets what all pages contain. Pages in use stay with their users."""
        for page in list(self._page.values()):
            self._forget(page)
        self._free.extend(self._unused)
        self._unused.clear()

    def _forget(self, page: int) -> None:
        key = self._key.pop(page)
        del self._page[key]


@dataclasses.dataclass
class _Layers:
    """The layers that see all tokens, or those with a window: their pages, and the table of each slot."""

    pool: PagePool
    table: np.ndarray  # block b of a slot is entry b % length
    window: int  # the most tokens that a layer sees, the query's own included
    page_size: int

    def oldest(self, length: int) -> int:
        """The first block that the token at position `length` sees."""
        return max(length - self.window + 1, 0) // self.page_size

    def give(self, slot: int, blocks: dict[int, int], block: int, page: int) -> None:
        blocks[block] = self.table[slot, block % self.table.shape[1]] = page


@dataclasses.dataclass
class _Slot:
    length: int  # tokens in the cache
    key: bytes  # of the last full block
    version: int  # of the cache, when the slot began
    pages: list[dict[int, int]]  # block -> page, in ascending order, for each kind of layers


class SlotPages:
    """The pages of the slots on one device, for the layers that see all tokens and for those with a window.

    A slot begins with the cached pages of its prompt. Call `reserve` before tokens are written into the cache, and
    `advance` after it. A slot without enough pages can end, and begin again later with the tokens that it has by then.

    Args:
        page_size: tokens in a page.
        max_length: the most tokens in a slot.
        pages: pages of the layers that see all tokens, page 0 included; 0: there are no such layers.
        ring_pages: ring pages of the layers with a window, page 0 included; 0: there are no such layers.
        ring_blocks: length of a slot's ring: the most blocks that one program sees and writes.
        window: the most tokens that a layer with a window sees, the query's own included.
        reuse: whether a slot begins with the cached pages of its prompt.

    Attributes:
        full: i32[slots, blocks], the page of each block of `page_size` tokens; 0: none.
        ring: i32[slots, ring_blocks], the same for layers with a window: block b is entry b % ring_blocks.
    """

    def __init__(
        self,
        slots: int,
        page_size: int,
        max_length: int,
        *,
        pages: int,
        ring_pages: int = 0,
        ring_blocks: int = 1,
        window: int = 0,
        reuse: bool = True,
    ):
        self.full = np.zeros((slots, math.ceil(max_length / page_size)), np.int32)
        self.ring = np.zeros((slots, ring_blocks), np.int32)
        self._page_size, self._reuse = page_size, reuse
        self._layers = []
        if pages:
            self._layers.append(_Layers(PagePool(pages), self.full, max_length, page_size))
        if ring_pages:
            self._layers.append(_Layers(PagePool(ring_pages), self.ring, window, page_size))
        self._slots: dict[int, _Slot] = {}
        self._version = 0

    @property
    def pages(self) -> int:
        """Pages that slots can have, in both kinds of layers."""
        return sum(layers.pool.size for layers in self._layers)

    @property
    def used_pages(self) -> int:
        return sum(layers.pool.used for layers in self._layers)

    @property
    def cached_pages(self) -> int:
        """Pages that no slot uses, kept for later prompts."""
        return sum(layers.pool.cached for layers in self._layers)

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """The number of leading tokens of a prompt that are in the cache, without the last: that has to be read."""
        return len(self._find_prefix(prompt)) * self._page_size

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        """Gives a free slot the cached pages of a prompt. Returns how many tokens they hold, which need not be read."""
        assert slot not in self._slots
        keys = self._find_prefix(prompt)
        length = len(keys) * self._page_size
        state = _Slot(length, keys[-1] if keys else b'', self._version, [{} for _ in self._layers])
        self._slots[slot] = state
        for layers, pages in zip(self._layers, state.pages, strict=True):
            for block in range(layers.oldest(length), len(keys)):
                layers.give(slot, pages, block, layers.pool.share(keys[block]))
        return length

    def reserve(self, slot: int, length: int) -> bool:
        """Gives a slot the pages for its first `length` tokens. False if too few are left: then nothing changes."""
        state = self._slots[slot]
        end = math.ceil(length / self._page_size)
        lacking = []
        for layers, pages in zip(self._layers, state.pages, strict=True):
            oldest = layers.oldest(state.length)
            assert end - oldest <= layers.table.shape[1], 'the table is too short'
            lacking.append(range(max(pages, default=oldest - 1) + 1, end))
        if any(len(blocks) > layers.pool.available for layers, blocks in zip(self._layers, lacking, strict=True)):
            return False
        for layers, pages, blocks in zip(self._layers, state.pages, lacking, strict=True):
            for block in blocks:
                layers.give(slot, pages, block, layers.pool.allocate())
        return True

    def advance(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Records that the first `length` tokens of a slot are in the cache. Later prompts can share its full pages.

        Args:
            tokens: tokens of the slot, the prompt and the answer so far.
            length: how many of them are in the cache. What was written after them is not counted, and written again.
        """
        state = self._slots[slot]
        for block in range(state.length // self._page_size, length // self._page_size):
            state.key = self._key(state.key, tokens, block)
            if self._reuse and state.version == self._version:
                for layers, pages in zip(self._layers, state.pages, strict=True):
                    layers.pool.register(pages[block], state.key)
        state.length = length
        for layers, pages in zip(self._layers, state.pages, strict=True):
            for block in [block for block in pages if block < layers.oldest(length)]:
                layers.pool.release(pages.pop(block))
                layers.table[slot, block % layers.table.shape[1]] = 0

    def end(self, slot: int) -> None:
        """Takes the pages of a slot away."""
        for layers, pages in zip(self._layers, self._slots.pop(slot).pages, strict=True):
            # The last blocks are evicted first: nobody finds a block without those before it.
            for page in reversed(pages.values()):
                layers.pool.release(page)
            layers.table[slot] = 0

    def clear_cache(self) -> None:
        """Forgets what is in the cache: new weights compute something else. Slots keep their pages, but share none."""
        self._version += 1
        for layers in self._layers:
            layers.pool.clear_cache()

    def _find_prefix(self, prompt: Sequence[int]) -> list[bytes]:
        """The keys of the longest sequence of cached blocks with which a prompt begins, its last token left out.

        Every kind of layers needs the blocks that the next token sees.
        """
        keys, key, usable = [], b'', 0
        if not self._reuse:
            return keys
        last = [0] * len(self._layers)  # consecutive blocks up to the current one that are cached
        for block in range((len(prompt) - 1) // self._page_size):
            key = self._key(key, prompt, block)
            keys.append(key)
            last = [n + 1 if key in layers.pool else 0 for n, layers in zip(last, self._layers, strict=True)]
            seen = [len(keys) - layers.oldest(len(keys) * self._page_size) for layers in self._layers]
            if all(cached >= needed for cached, needed in zip(last, seen, strict=True)):
                usable = len(keys)
        return keys[:usable]

    def _key(self, previous: bytes, tokens: Sequence[int], block: int) -> bytes:
        """Identifies the tokens of a block and of all blocks before it."""
        start = block * self._page_size
        own = np.asarray(tokens[start : start + self._page_size], np.int32)
        return hashlib.blake2b(previous + own.tobytes(), digest_size=16).digest()
