"""Writing a block of tokens in every slot, and scoring a text. What requests ask for are arrays: nothing is recompiled.

Letters: S slots, R rows (one on each device that has slots of its own), C columns, P proposed tokens, V columns of the
logits, L the longest sequence, N tokens at most in a block.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.infer.cache import Tables
from pretrax.infer.kernels import Kernel
from pretrax.infer.request import MAX_LOGPROBS, MAX_STOP_IDS
from pretrax.infer.sampling import Seen, SlotSampling, choose, is_penalized, log_probabilities, see_answer, unused_slots
from pretrax.infer.speculate import accepted
from pretrax.model.axes import AXES
from pretrax.shardlib import bool_, f32, i32, pytree_dataclass


class Memory(Protocol):
    """Which slot uses what of the cache, on the host. `pages.SlotPages` has the descriptions."""

    full: np.ndarray
    ring: np.ndarray

    @property
    def pages(self) -> int: ...
    @property
    def used_pages(self) -> int: ...
    @property
    def cached_pages(self) -> int: ...
    def begin(self, slot: int, tokens: Sequence[int]) -> int: ...
    def reserve(self, slot: int, length: int) -> bool: ...
    def advance(self, slot: int, tokens: Sequence[int], length: int) -> None: ...
    def end(self, slot: int) -> None: ...
    def clear_cache(self) -> None: ...


class Reader(Protocol):
    """How a model reads tokens. What it keeps of them is its cache."""

    vocab_size: int
    columns: int  # of the logits: the vocabulary and its padding
    max_length: int
    has_states: bool  # whether `logits` gives hidden states
    kernel: Kernel  # for attention to the cache

    def prepare(self, weights: Any) -> Any:
        """The weights as the other methods use them, on the current mesh."""
        ...

    def new_cache(self) -> Any:
        """An empty cache, on the current mesh."""
        ...

    def new_memory(self) -> Memory:
        """Which slot of a shard uses what of the cache: nothing yet."""
        ...

    def read(self, weights: Any, cache: Any, tokens: jax.Array, positions: jax.Array, tables: Tables) -> Any:
        """The cache after reading tokens i32[R, C] at their positions; -1: padding."""
        ...

    def logits(
        self, weights: Any, cache: Any, tokens: jax.Array, positions: jax.Array, tables: Tables
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """The logits f32[R, C, V], the hidden states [R, C, M] after the last norm, if it has any, and the cache."""
        ...


@pytree_dataclass
class Slots:
    """What each slot is about to write."""

    token: i32['S/r/d/e']  # the last token so far, not yet in the cache
    position: i32['S/r/d/e']  # of this token; -1: nothing is written in this slot
    limit: i32['S/r/d/e']  # position of the last token that may be written
    stop_ids: i32['S/r/d/e stops']  # -1: none
    logprobs: bool_['S/r/d/e']  # whether log probabilities are asked for
    history: i32['S/r/d/e L']  # the prompt and the answer so far
    prompt_length: i32['S/r/d/e']
    sampling: SlotSampling


@pytree_dataclass
class Written:
    """What a block wrote: for each step and slot up to 1 + P tokens; -1 after the last of them."""

    tokens: i32['N S columns']
    logprobs: f32['N S columns']
    top_ids: i32['N S columns top']
    top_logprobs: f32['N S columns top']
    proposed: i32['']
    accepted: i32['']


@pytree_dataclass
class Scored:
    """What the model thinks of the tokens of a text."""

    logprobs: f32['R C']  # of the next token
    top_ids: i32['R C top']
    top_logprobs: f32['R C top']
    states: f32['R C M'] | None  # after the last norm


type Propose = Callable[[Any, Any, Slots, Tables], tuple[jax.Array, Any]]


def empty_slots(slots: int, length: int) -> Slots:
    """Slots without a sequence, in numpy."""
    return Slots(
        token=np.zeros(slots, np.int32),
        position=np.full(slots, -1, np.int32),
        limit=np.full(slots, -1, np.int32),
        stop_ids=np.full((slots, MAX_STOP_IDS), -1, np.int32),
        logprobs=np.zeros(slots, bool),
        history=np.zeros((slots, length), np.int32),
        prompt_length=np.zeros(slots, np.int32),
        sampling=unused_slots(slots),
    )


def score(
    reader: Reader,
    weights: Any,
    cache: Any,
    tokens: jax.Array,
    targets: jax.Array,
    positions: jax.Array,
    tables: Tables,
) -> tuple[Any, Scored]:
    """The cache after reading a part of a text, and the log probability of each token's successor, `targets` [R, C]."""
    logits, states, cache = reader.logits(weights, cache, tokens, positions, tables)
    flat = logits.reshape(-1, logits.shape[-1])
    wanted = jnp.ones(len(flat), bool)
    found = log_probabilities(flat, targets.reshape(-1), wanted, reader.vocab_size)
    parts = [x.reshape(*tokens.shape, *x.shape[1:]) for x in found]
    return cache, Scored(*parts, states=None if states is None else states.astype(jnp.float32))


def draft_tokens(
    drafter: Reader, proposed: int, weights: Any, cache: Any, slots: Slots, tables: Tables
) -> tuple[i32['S P'], Any]:
    """The next tokens as a smaller model chooses them, with the randomness of their positions, and its cache.

    The model chooses with the same randomness, so the two mostly agree where their probabilities do.
    """
    nothing = nothing_seen(slots.token.shape[0], drafter.columns)

    def one(carry: tuple[jax.Array, Any], ahead: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        token, cache = carry
        at = slots.position + ahead
        readable = (slots.position >= 0) & (at < slots.limit)
        positions = jnp.where(readable, at, -1)[:, None]
        logits, _, cache = drafter.logits(weights, cache, token[:, None], positions, tables)
        token = choose(_by_slot(logits)[:, 0], slots.sampling, nothing, at + 1, drafter.vocab_size)
        return (token, cache), token

    # Once more than there are proposals: if all are accepted, the last one is in the draft's cache too.
    (_, cache), tokens = jax.lax.scan(one, (slots.token, cache), jnp.arange(proposed + 1, dtype=jnp.int32))
    return tokens[:-1].T, cache


def nothing_seen(slots: int, columns: int) -> Seen:
    """No token is in a prompt or in an answer."""
    return Seen(jnp.zeros((slots, columns), bool), jnp.zeros((slots, columns), jnp.int32))


def write_block(
    reader: Reader,
    propose: Propose | None,
    proposed: int,
    steps: int,
    weights: Any,
    cache: Any,
    draft: tuple[Any, Any],
    slots: Slots,
    tables: Tables,
    most: i32[''],
) -> tuple[Any, Any, Written]:
    """Writes up to `steps` times 1 to 1 + P tokens in every slot. Returns the caches and the tokens.

    A slot ends at a stop id or at its limit; the block ends early if all have ended.

    Args:
        reader: reader of the model.
        propose: the draft's weights and cache, slots, tables -> the next P tokens [S, P] (-1: none), and the draft's
            cache.
        proposed: P. Every proposal that equals the token chosen at its position saves a step.
        draft: weights and cache of the model that proposes tokens; None and None without one.
        tables: the pages of each slot.
        most: the block ends after this number of steps, even if it is less than N.
    """
    n_slots, columns = slots.token.shape[0], 1 + proposed
    row = jnp.arange(n_slots)
    seen = _seen(slots, reader.columns)
    top = min(MAX_LOGPROBS, reader.vocab_size)
    nothing = Written(
        jnp.full((steps, n_slots, columns), -1, jnp.int32),
        jnp.zeros((steps, n_slots, columns)),
        jnp.zeros((steps, n_slots, columns, top), jnp.int32),
        jnp.zeros((steps, n_slots, columns, top)),
        jnp.int32(0),
        jnp.int32(0),
    )
    how = slots.sampling
    penalized = is_penalized(how)
    draft_weights, draft_cache = draft

    def is_busy(carry: tuple) -> jax.Array:
        step, slots, *_ = carry
        return (step < jnp.minimum(most, steps)) & jnp.any(slots.position >= 0)

    def one(carry: tuple) -> tuple:
        step, slots, cache, draft_cache, seen, written = carry
        tokens = slots.token[:, None]
        if propose is not None:
            proposals, draft_cache = propose(draft_weights, draft_cache, slots, tables)
            # The penalties of a token depend on the tokens before it, which are not known yet.
            proposals = jnp.where(penalized[:, None], -1, proposals)
            tokens = jnp.concatenate([tokens, proposals], axis=1)
        offsets = jnp.arange(columns)
        positions = jnp.where(slots.position[:, None] >= 0, slots.position[:, None] + offsets, -1)
        positions = jnp.where(tokens >= 0, positions, -1)  # only -1 follows a -1
        positions = jnp.where(positions < slots.limit[:, None], positions, -1)
        logits, _, cache = reader.logits(weights, cache, jnp.maximum(tokens, 0), positions, tables)
        logits = _by_slot(logits)
        picked = [choose(logits[:, c], how, seen, slots.position + 1 + c, reader.vocab_size) for c in range(columns)]
        chosen = jnp.stack(picked, axis=1)
        found = [
            log_probabilities(logits[:, c], chosen[:, c], slots.logprobs, reader.vocab_size) for c in range(columns)
        ]
        busy = slots.position >= 0
        count = jnp.where(busy, 1 + accepted(tokens[:, 1:], chosen), 0)
        count = jnp.minimum(count, slots.limit - slots.position)
        stops = jnp.any(chosen[:, :, None] == slots.stop_ids[:, None], axis=2) & (offsets < count[:, None])
        stopped = jnp.any(stops, axis=1)
        count = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, count)
        real = offsets < count[:, None]
        out = jnp.where(real, chosen, -1)
        at = slots.position[:, None] + 1 + offsets
        history = slots.history.at[row[:, None], jnp.where(real, at, reader.max_length)].set(chosen, mode='drop')
        last = jnp.take_along_axis(chosen, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        position = slots.position + count
        ended = stopped | (position >= slots.limit)
        seen = see_answer(seen, chosen[:, 0], busy)
        logprobs, top_ids, top_logprobs = (jnp.stack(part, axis=1) for part in zip(*found, strict=True))
        written = Written(
            written.tokens.at[step].set(out),
            written.logprobs.at[step].set(logprobs),
            written.top_ids.at[step].set(top_ids),
            written.top_logprobs.at[step].set(top_logprobs),
            written.proposed + jnp.sum(positions[:, 1:] >= 0, dtype=jnp.int32),
            written.accepted + jnp.sum(jnp.maximum(count - 1, 0), dtype=jnp.int32),
        )
        slots = dataclasses.replace(slots, token=last, position=jnp.where(busy & ~ended, position, -1), history=history)
        return step + 1, slots, cache, draft_cache, seen, written

    start = jnp.int32(0), slots, cache, draft_cache, seen, nothing
    _, _, cache, draft_cache, _, written = jax.lax.while_loop(is_busy, one, start)
    return cache, draft_cache, written


def _seen(slots: Slots, columns: int) -> Seen:
    """The tokens in the prompt and the answer of each slot, if any slot has a penalty."""
    S, L = slots.history.shape
    nothing = nothing_seen(S, columns)

    def count(seen: Seen) -> Seen:
        row, column = jnp.arange(S)[:, None], jnp.arange(L)
        in_prompt = column < slots.prompt_length[:, None]
        in_answer = ~in_prompt & (column <= slots.position[:, None])
        return Seen(
            seen.prompt.at[row, jnp.where(in_prompt, slots.history, columns)].set(True, mode='drop'),
            seen.answer.at[row, jnp.where(in_answer, slots.history, columns)].add(1, mode='drop'),
        )

    return jax.lax.cond(jnp.any(is_penalized(slots.sampling)), count, lambda seen: seen, nothing)


def _by_slot(logits: jax.Array) -> jax.Array:
    """Each device has the logits of some slots, of the whole vocabulary."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in AXES if mesh.shape[axis] > 1)
    n = int(np.prod([mesh.shape[axis] for axis in axes]))
    spec = PartitionSpec(axes if logits.shape[0] % n == 0 else None)
    return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, spec))
