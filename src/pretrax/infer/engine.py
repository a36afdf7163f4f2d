"""The engine: requests join and leave a fixed number of slots, between blocks of tokens.

Continuous batching: Yu et al. 2022, "Orca", section 3. A call of `step` reads parts of waiting prompts, and then writes
a block of tokens in every slot whose prompt has been read. Every program is compiled before the engine is ready.
"""

import collections
import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import jax
import numpy as np

from pretrax.errors import UserError
from pretrax.infer.block import Memory, Scored, Written, empty_slots
from pretrax.infer.cached import CachedDecoder
from pretrax.infer.programs import Programs
from pretrax.infer.request import POOLINGS, EngineStatus, Finish, Request, Token, Update, check_request
from pretrax.infer.sampling import slot_row

_FIRST_SECONDS = 0.02  # for which a block goes on after the first token of an answer
_COMPILED = '/jax/core/compile/backend_compile_duration'


class _Compilations:
    """Counts the programs that JAX compiles in this process."""

    count = 0

    def __call__(self, event: str, duration: float, **_: Any) -> None:
        del duration
        self.count += event == _COMPILED


@functools.cache
def _compilations() -> _Compilations:
    """The counter of this process. The first call starts it."""
    counter = _Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    return counter


@dataclasses.dataclass
class _Sequence:
    """A request in a slot."""

    number: int
    request: Request
    tokens: list[int]  # the prompt and the answer so far
    slot: int = -1  # -1: it waits for one
    read: int = 0  # tokens that the cache has
    cached: int = 0  # tokens of the prompt that it had already
    is_new: bool = True  # no update yet
    prompt: list[Token] = dataclasses.field(default_factory=list)
    states: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def is_scored(self) -> bool:
        """Whether all tokens of the prompt are read: they are scored, or no answer follows."""
        request = self.request
        return request.max_tokens == 0 or request.prompt_logprobs is not None or request.embedding is not None

    @property
    def unread(self) -> int:
        """Tokens to read before the next one can be written, which reads the last one itself."""
        return len(self.tokens) - (self.request.max_tokens > 0) - self.read

    @property
    def limit(self) -> int:
        """The position of the last token of the longest answer."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    def keep(self, scored: Scored, row: int, real: np.ndarray) -> None:
        """Keeps the scores and the hidden states of a chunk of the prompt."""
        if self.request.embedding:
            assert scored.states is not None
            self.states.append(np.asarray(scored.states)[row, real])
        if self.request.prompt_logprobs is not None:
            for i in np.nonzero(real)[0]:
                at = row, int(i)
                following = len(self.prompt) + 1
                if following < len(self.request.prompt):
                    token = self.request.prompt[following]
                    self.prompt.append(_token(token, scored, at, self.request.prompt_logprobs))

    def scores(self) -> tuple[Token, ...]:
        """The tokens of the prompt with their log probabilities, if they were asked for."""
        if self.request.prompt_logprobs is None:
            return ()
        return (Token(self.request.prompt[0]), *self.prompt)

    def embedding(self) -> np.ndarray | None:
        """One vector from the hidden states of all tokens, if it was asked for."""
        if self.request.embedding is None:
            return None
        return POOLINGS[self.request.embedding](np.concatenate(self.states))


class Engine:
    """Answers requests with a model. All calls come from one thread (of each process, with the same requests).

    Args:
        programs: the compiled programs, of a model on a mesh.
        weights: weights of the model, on any mesh.
        weights_step: training step of the weights.
        draft: weights of the model that proposes tokens, if `programs` has one.
        warm_up: whether all programs are compiled now, not when they are first needed.

    Attributes:
        max_length: the most tokens of a prompt and its answer together.
        dtype: of the products of a written token; None: without a cache, the compute dtype of the model.
    """

    def __init__(
        self, programs: Programs, weights: Any, weights_step: int | None = None, draft: Any = None, warm_up: bool = True
    ):
        self._programs, self._memories = programs, programs.new_memories()
        self.max_length, self.vocab_size = programs.options.max_length, programs.reader.vocab_size
        self.dtype = np.dtype(programs.reader.dtype) if isinstance(programs.reader, CachedDecoder) else None
        self._slots: list[_Sequence | None] = [None] * programs.slots
        self._waiting: collections.deque[_Sequence] = collections.deque()
        self._cancelled: set[int] = set()
        self._step_seconds = math.inf  # of a step of the newest block
        self._numbers, self._counts = itertools.count(), collections.Counter[str]()
        self._rows, self._empty_row = (empty_slots(n, self.max_length) for n in (programs.slots, 1))
        self._draft = programs.prepare_draft(draft)
        self.swap(weights, weights_step)
        self._caches = programs.new_caches()
        if warm_up:
            self._caches = programs.warm_up(self._weights, self._caches)
        self._compiled_before = _compilations().count

    def swap(self, weights: Any, weights_step: int | None) -> None:
        """Continues with other weights. Running requests keep what they have read and written."""
        self._weights = self._programs.prepare(weights), self._draft
        self._weights_step = weights_step
        for memory in self._memories:
            memory.clear_cache()

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self._waiting and not any(self._slots)

    def check(self, request: Request) -> None:
        """Raises UserError for a request that can never run: empty, too long, a token outside the vocabulary."""
        check_request(request, self.max_length, self.vocab_size)
        if request.embedding and not self._programs.reader.has_states:
            raise UserError(
                'this model has no embeddings: it gives logits and no hidden states\n'
                'use a run with model.name=transformer'
            )

    def add(self, request: Request) -> int:
        """Adds a request to the queue and returns its number. Raises UserError as `check` does."""
        self.check(request)
        number = next(self._numbers)
        self._waiting.append(_Sequence(number, request, list(request.prompt)))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request. Its slot is free after the current block. Unknown and finished numbers are ignored."""
        self._cancelled.add(number)

    def step(self) -> list[Update]:
        """Reads a chunk of waiting prompts and writes a block of tokens in every busy slot."""
        updates = self._drop_cancelled()
        self._admit()
        if not any(self._slots):
            return updates
        self._counts['blocks'] += 1
        return updates + self._read_prompts() + self._write()

    def status(self) -> EngineStatus:
        """A snapshot of the engine."""
        return EngineStatus(
            slots=len(self._slots),
            busy_slots=sum(sequence is not None for sequence in self._slots),
            waiting=len(self._waiting),
            pages=sum(memory.pages for memory in self._memories),
            used_pages=sum(memory.used_pages for memory in self._memories),
            cached_pages=sum(memory.cached_pages for memory in self._memories),
            blocks=self._counts['blocks'],
            prompt_tokens=self._counts['prompt'],
            cached_prompt_tokens=self._counts['cached'],
            generated_tokens=self._counts['generated'],
            proposed_tokens=self._counts['proposed'],
            accepted_tokens=self._counts['accepted'],
            compilations=_compilations().count - self._compiled_before,
        )

    def _memory_of(self, sequence: _Sequence) -> tuple[Memory, int]:
        """The memory of the sequence's slot, and the number of the slot there."""
        shard, row = divmod(sequence.slot, len(self._slots) // len(self._memories))
        return self._memories[shard], row

    def _drop_cancelled(self) -> list[Update]:
        dropped = [one for one in (*self._slots, *self._waiting) if one and one.number in self._cancelled]
        for sequence in dropped:
            if sequence.slot >= 0:
                self._free(sequence)
            else:
                self._waiting.remove(sequence)
        self._cancelled.clear()
        return [self._update(sequence, [], 'cancelled') for sequence in dropped]

    def _admit(self) -> None:
        """Gives waiting sequences a slot, first come, first served."""
        free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
        for slot in free:
            if not self._waiting:
                return
            sequence = self._waiting[0]
            sequence.slot = slot
            memory, row = self._memory_of(sequence)
            # Scores need every token of the prompt to be read.
            known = memory.begin(row, () if sequence.is_scored else sequence.tokens)
            if not memory.reserve(row, min(len(sequence.tokens), known + self._programs.chunks[-1])):
                memory.end(row)
                sequence.slot = -1
                continue
            self._waiting.popleft()
            self._slots[slot] = sequence
            sequence.read = known
            if sequence.is_new:
                sequence.cached = known
                self._counts['prompt'] += len(sequence.request.prompt)
                self._counts['cached'] += known
            self._fill_row(sequence)

    def _make_room(self, sequence: _Sequence, length: int) -> None:
        """Room in the cache for `length` tokens. If there is none, the newest other sequence waits and is reread."""
        memory, row = self._memory_of(sequence)
        while not memory.reserve(row, length):
            others = [one for one in self._slots if one and one is not sequence and self._memory_of(one)[0] is memory]
            newest = max(others, key=lambda one: one.number)
            self._free(newest)
            newest.slot, newest.read = -1, 0
            newest.prompt.clear()
            newest.states.clear()
            self._waiting.appendleft(newest)

    def _fill_row(self, sequence: _Sequence) -> None:
        """Writes what the programs need to know about a sequence."""
        rows, slot, request = self._rows, sequence.slot, sequence.request
        rows.limit[slot] = sequence.limit
        rows.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        rows.logprobs[slot] = request.logprobs is not None
        rows.prompt_length[slot] = len(request.prompt)
        rows.history[slot, : len(sequence.tokens)] = sequence.tokens
        jax.tree.map(
            lambda rows, row: rows.__setitem__(slot, row), rows.sampling, slot_row(request.sampling, request.choice)
        )

    def _free(self, sequence: _Sequence) -> None:
        memory, row = self._memory_of(sequence)
        memory.end(row)
        self._slots[sequence.slot] = None
        jax.tree.map(lambda rows, row: rows.__setitem__(sequence.slot, row[0]), self._rows, self._empty_row)

    def _read_prompts(self) -> list[Update]:
        """Reads parts of prompts, oldest first: a limited number of tokens, so that other slots soon write again."""
        updates, budget = [], self._programs.options.chunk
        while budget > 0 and any(sequence.unread > 0 for sequence in filter(None, self._slots)):
            size, rows, chosen = self._next_to_read()
            updates += self._read_chunk(chosen, size, rows)
            budget -= size * rows
        return updates

    def _next_to_read(self) -> tuple[int, int, list[_Sequence]]:
        """The size of the next chunk, its rows on each device, and the sequences that are read, oldest first.

        The oldest sequence of each shard is read, with others of the shard whose rest fits the same size.
        """
        shards: dict[int, list[_Sequence]] = {}
        for sequence in sorted(filter(None, self._slots), key=lambda sequence: sequence.number):
            if sequence.unread > 0:
                shards.setdefault(id(self._memory_of(sequence)[0]), []).append(sequence)
        oldest = [sequences[0] for sequences in shards.values()]
        if any(sequence.is_scored for sequence in oldest):
            return self._programs.score_size, 1, oldest
        longest = max(sequence.unread for sequence in oldest)
        size = next((size for size in self._programs.chunks if size >= longest), self._programs.chunks[-1])
        together = [
            [first, *(one for one in others if one.unread <= size and not one.is_scored)]
            for first, *others in shards.values()
        ]
        rows = self._programs.rows_to_read(size, max(map(len, together)))
        return size, rows, [sequence for sequences in together for sequence in sequences[:rows]]

    def _read_chunk(self, chosen: list[_Sequence], size: int, rows: int) -> list[Update]:
        for sequence in chosen:
            if sequence.slot >= 0:  # it has not made room for an older one
                self._make_room(sequence, sequence.read + min(size, sequence.unread))
        chosen = [sequence for sequence in chosen if sequence.slot >= 0]
        chunk = self._programs.empty_chunk(size, rows, [sequence.slot for sequence in chosen])
        row_of = {slot: row for row, slot in enumerate(chunk.slots.tolist())}
        for sequence in chosen:
            row, start, count = row_of[sequence.slot], sequence.read, min(size, sequence.unread)
            following = sequence.tokens[start + 1 : start + 1 + count]
            chunk.tokens[row, :count] = sequence.tokens[start : start + count]
            chunk.targets[row, : len(following)] = following
            chunk.positions[row, :count] = range(start, start + count)
        if any(sequence.is_scored for sequence in chosen):
            self._caches, scored = self._programs.score(self._weights, self._caches, chunk, self._memories)
            for sequence in chosen:
                row = row_of[sequence.slot]
                sequence.keep(scored, row, chunk.positions[row] >= 0)
        else:
            self._caches = self._programs.read(self._weights, self._caches, chunk, self._memories)
        updates = []
        for sequence in chosen:
            self._advance(sequence, sequence.read + int(np.sum(chunk.positions[row_of[sequence.slot]] >= 0)))
            if sequence.unread <= 0 and sequence.request.max_tokens == 0:
                updates.append(self._update(sequence, [], 'length'))
                self._free(sequence)
        return updates

    def _advance(self, sequence: _Sequence, read: int) -> None:
        """Notes that the cache has the first `read` tokens."""
        memory, row = self._memory_of(sequence)
        # The last token is read again when the next one is written: then its window has to be there.
        memory.advance(row, sequence.tokens, min(read, len(sequence.tokens) - 1))
        sequence.read = read

    def _write(self) -> list[Update]:
        """Writes a block in every slot whose tokens have been read."""
        rows = self._rows
        rows.position[:] = -1
        ready = [sequence for sequence in self._slots if sequence and sequence.unread <= 0]
        for sequence in sorted(ready, key=lambda sequence: sequence.number):
            if sequence.slot >= 0:  # it has not made room for an older one
                last = len(sequence.tokens) - 1
                self._make_room(sequence, min(last + self._programs.longest_block, sequence.limit) + 1)
                rows.token[sequence.slot], rows.position[sequence.slot] = sequence.tokens[last], last
        writing = [sequence for sequence in ready if sequence.slot >= 0]
        if not writing:
            return []
        steps = self._choose_steps(any(len(one.tokens) == len(one.request.prompt) for one in writing))
        start = time.perf_counter()
        self._caches, written = self._programs.write(self._weights, self._caches, rows, self._memories, steps)
        self._step_seconds = (time.perf_counter() - start) / np.sum(np.any(written.tokens >= 0, axis=(1, 2)))
        self._counts['proposed'] += int(written.proposed)
        self._counts['accepted'] += int(written.accepted)
        return [self._continue(sequence, written) for sequence in writing]

    def _choose_steps(self, is_first: bool) -> int:
        """The steps of the next block, alike in all processes, whatever time each takes.

        Args:
            is_first: whether a sequence waits for its first token. It does not wait for steps that take long.
        """
        options = self._programs.options
        if jax.process_count() > 1:
            return options.block
        seconds = _FIRST_SECONDS if is_first else options.block_seconds
        return max(1, min(options.block, int(seconds / self._step_seconds)))

    def _continue(self, sequence: _Sequence, written: Written) -> Update:
        """Adds what a block wrote in a slot to its sequence."""
        ids = written.tokens[:, sequence.slot]
        tokens, request = [], sequence.request
        for step, column in zip(*np.nonzero(ids >= 0), strict=True):
            at = int(step), sequence.slot, int(column)
            tokens.append(_token(int(written.tokens[at]), written, at, request.logprobs))
        ids = [token.id for token in tokens]
        start = len(sequence.tokens)
        sequence.tokens += ids
        self._rows.history[sequence.slot, start : start + len(ids)] = ids
        self._counts['generated'] += len(ids)
        self._advance(sequence, len(sequence.tokens) - 1)
        finish: Finish | None = None
        if ids[-1] in request.stop_ids:
            finish = 'stop'
        elif len(sequence.tokens) - 1 >= sequence.limit:
            finish = 'length'
        update = self._update(sequence, tokens, finish)
        if finish:
            self._free(sequence)
        return update

    def _update(self, sequence: _Sequence, tokens: list[Token], finish: Finish | None) -> Update:
        first, sequence.is_new = sequence.is_new, False
        is_read = first and finish != 'cancelled'
        return Update(
            number=sequence.number,
            tokens=tuple(tokens),
            finish=finish,
            weights_step=self._weights_step,
            cached=sequence.cached if first else 0,
            prompt=sequence.scores() if is_read else (),
            embedding=sequence.embedding() if is_read else None,
        )


def _token(token: int, found: Scored | Written, at: tuple[int, ...], count: int | None) -> Token:
    """A token with its log probability and the `count` likeliest ones; None: it was not asked for."""
    if count is None:
        return Token(token)
    top = zip(found.top_ids[at][:count].tolist(), found.top_logprobs[at][:count].tolist(), strict=True)
    return Token(token, float(found.logprobs[at]), tuple(top))
