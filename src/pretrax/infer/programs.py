"""The programs of an engine, compiled for a model on a mesh. They are kept, so that another engine starts at once."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pretrax.errors import UserError
from pretrax.infer.block import Memory, Reader, Scored, Slots, Written, draft_tokens, empty_slots, score, write_block
from pretrax.infer.cache import CacheKind, Tables
from pretrax.infer.cached import CachedDecoder
from pretrax.infer.recompute import Recomputed
from pretrax.infer.speculate import look_up
from pretrax.infer.weights import WeightKind, decoding_dtype
from pretrax.model.axes import AXES, ROWS, along
from pretrax.model.base import Model
from pretrax.model.transformer import Transformer
from pretrax.shardlib import i32, make_shardings

_CPU_CACHE = 1 << 30  # bytes that each step may read
_SHORT = 1024  # tokens; no cache is too large for them
_SMALLEST_CHUNK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs."""

    max_length: int  # the most tokens of a prompt and its answer
    slots: int = 8  # sequences at a time; rounded up to what the mesh needs
    block: int = 8  # steps of a slot before requests may join and leave
    block_seconds: float = 0.1  # a block of slow steps has fewer of them, so that streams are smooth
    chunk: int = 256  # tokens of prompts read at once
    page: int = 16  # tokens in a page of the cache
    kept: int = 1  # prompts of the greatest length that the cache keeps although no slot uses them
    cache: CacheKind = 'compute'
    weights: WeightKind = 'compute'
    proposed: int = 0  # tokens proposed at a time, by a draft or by looking them up in the sequence
    ngram: int = 3  # tokens that a proposal from the sequence follows


@dataclasses.dataclass
class Chunk:
    """Parts of prompts, one in each row: as many rows for each shard of the slots. numpy."""

    tokens: np.ndarray  # i32[rows, size]
    targets: np.ndarray  # their successors
    positions: np.ndarray  # -1: padding
    slots: np.ndarray  # i32[rows], ascending: the slot of each row


def serving_mesh(mesh: Mesh, width: int) -> Mesh:
    """A mesh of the same devices with only the axes that the engine uses: r, d, e and t.

    Args:
        mesh: such as the one of training.
        width: of the model and of its draft, their common divisor, which d has to divide.
    """
    assert mesh.axis_names == AXES
    r, d, e, c, t, p = mesh.devices.shape
    dense = math.gcd(d * c * p, width)
    devices = mesh.devices.transpose(0, 1, 3, 5, 2, 4).reshape(r * d * c * p // dense, dense, e, 1, t, 1)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


class Programs:
    """What an engine runs on the devices.

    Attributes:
        mesh: r, d and e shard the slots; t shards heads, feed-forward and vocabulary.
        chunks: sizes of the parts in which prompts are read, ascending.
        written_rows: the numbers of slots on a device that are written together, ascending.
        read_rows: size of chunk -> the numbers of prompts on a device that are read together, ascending.
        longest_block: the most tokens that a block writes in a slot.
    """

    def __init__(self, model: Model, mesh: Mesh, options: EngineOptions, draft: Model | None = None):
        if draft is not None:
            _check_draft(model, draft)
        for one in (model, draft):
            _check_states(one, options)
        self.options, t = options, mesh.shape['t']
        is_cached = isinstance(model, Transformer)
        widths = [one.arch.d_model for one in (model, draft) if isinstance(one, Transformer)]
        self.mesh = serving_mesh(mesh, math.gcd(*widths)) if is_cached else mesh
        self.shards = along(ROWS, self.mesh.shape) if is_cached else 1
        multiple = self.shards * t if is_cached else along(ROWS, mesh.shape)
        self.slots = math.ceil(options.slots / multiple) * multiple
        longest = min(options.chunk, options.max_length)
        sizes = [size for n in range(10) if (size := _SMALLEST_CHUNK * 4**n) < longest]
        self.chunks = [math.ceil(size / t) * t for size in (*sizes, longest)]
        self.longest_block = options.block * (1 + options.proposed)
        self._platform = self.mesh.devices.flat[0].platform
        self._on_shard = self.slots // self.shards
        self.written_rows = _row_counts(self._on_shard, multiple // self.shards)
        most = {size: min(max(1, options.chunk // size), self._on_shard) for size in self.chunks}
        self.read_rows = {size: _row_counts(most[size]) for size in self.chunks}
        self._compiled: set[tuple[int, int]] = set()  # rows and tokens in each; 0 tokens: of the program that writes
        self.reader = self._reader(model, 1 + options.proposed, whole=draft is not None)
        self._drafter = None if draft is None else self._reader(draft, 1, rings=False)
        dtypes = [one.dtype for one in (self.reader, self._drafter) if isinstance(one, CachedDecoder)]
        # A program with one row would multiply a vector by bf16 matrices
        if any(decoding_dtype(self._platform, dtype, 1) != dtype for dtype in dtypes):
            self.written_rows = [rows for rows in self.written_rows if rows > 1] or self.written_rows
        self._compile()

    def _reader(self, model: Model, columns: int, **places: bool) -> Reader:
        options = self.options
        if not isinstance(model, Transformer):
            _check_without_cache(model, options)
            return Recomputed(model, self.mesh, self.slots, options.max_length)
        return CachedDecoder(
            model,
            slots=self.slots,
            columns=columns,
            shards=self.shards,
            max_length=options.max_length,
            page=options.page,
            kept=options.kept,
            ahead=max(self.chunks[-1], self.longest_block),
            kind=options.cache,
            weights=options.weights,
            platform=self._platform,
            **places,
        )

    def _compile(self) -> None:
        reader, drafter, options = self.reader, self._drafter, self.options
        replicated = NamedSharding(self.mesh, PartitionSpec())

        def read(weights, caches, tokens, positions, tables):
            cache = reader.read(weights[0], caches[0], tokens, positions, tables)
            return cache, drafter and drafter.read(weights[1], caches[1], tokens, positions, tables)

        def scored(weights, caches, tokens, targets, positions, tables):
            cache, found = score(reader, weights[0], caches[0], tokens, targets, positions, tables)
            return (cache, drafter and drafter.read(weights[1], caches[1], tokens, positions, tables)), found

        propose = None
        if options.proposed:
            propose = functools.partial(_look_up, options)
            if drafter is not None:
                propose = functools.partial(draft_tokens, drafter, options.proposed)
        block = functools.partial(write_block, reader, propose, options.proposed, options.block)

        def write(weights, caches, slots, tables, most):
            cache, draft, written = block(
                weights[0], caches[0], (weights[1], caches[1]), slots=slots, tables=tables, most=most
            )
            return (cache, draft), written

        self._read = jax.jit(read, donate_argnums=1)
        self._score = jax.jit(scored, donate_argnums=1, out_shardings=(None, replicated))
        self._write = jax.jit(write, donate_argnums=1, out_shardings=(None, replicated))

    def new_memories(self) -> list[Memory]:
        """For each shard of the slots: which slot uses what of the cache."""
        return [self.reader.new_memory() for _ in range(self.shards)]

    def prepare(self, weights: Any) -> Any:
        """The weights of the model as the programs use them."""
        with jax.set_mesh(self.mesh):
            return self.reader.prepare(weights)

    def prepare_draft(self, weights: Any) -> Any:
        """The weights of the draft as the programs use them; None if there is none."""
        if self._drafter is None:
            return None
        with jax.set_mesh(self.mesh):
            return self._drafter.prepare(weights)

    def cache_bytes(self) -> int:
        """Bytes of keys and values in `new_caches` on all devices."""
        with jax.set_mesh(self.mesh):
            return sum(one.cache_bytes() for one in (self.reader, self._drafter) if isinstance(one, CachedDecoder))

    def new_caches(self) -> Any:
        """Empty caches of the model and of its draft."""
        with jax.set_mesh(self.mesh):
            return self.reader.new_cache(), self._drafter and self._drafter.new_cache()

    def warm_up(self, weights: tuple[Any, Any], caches: Any) -> Any:
        """Runs every program once with nothing to do, so that it is compiled."""
        memories = self.new_memories()
        for size, counts in self.read_rows.items():
            for rows in counts:
                caches = self.read(weights, caches, self.empty_chunk(size, rows), memories)
        caches, _ = self.score(weights, caches, self.empty_chunk(self.score_size, 1), memories)
        nothing = empty_slots(self.slots, self.options.max_length)
        for rows in self.written_rows:
            caches, _ = self._write_rows(weights, caches, nothing, memories, 0, self._rows_with([], rows))
        return caches

    @property
    def score_size(self) -> int:
        """Tokens of a text that are scored at once."""
        return self.chunks[min(1, len(self.chunks) - 1)]

    def rows_to_read(self, size: int, prompts: int) -> int:
        """How many of `prompts` on a device are read together in chunks of a size: more than half of the rows."""
        fitting = [rows for rows in self.read_rows[size] if rows < 2 * prompts]
        return max((rows for rows in fitting if (rows, size) in self._compiled), default=fitting[-1])

    def empty_chunk(self, size: int, rows: int, slots: Sequence[int] = ()) -> Chunk:
        """A chunk of padding, with rows of the given slots and of others, `rows` on each device with slots."""
        of_rows = self._rows_with(slots, rows)
        tokens = np.zeros((len(of_rows), size), np.int32)
        return Chunk(tokens, tokens.copy(), np.full_like(tokens, -1), of_rows)

    def read(self, weights: tuple[Any, Any], caches: Any, chunk: Chunk, memories: list[Memory]) -> Any:
        """The caches after reading parts of prompts."""
        rows, size = chunk.tokens.shape
        self._compiled.add((rows // self.shards, size))
        with jax.set_mesh(self.mesh):
            places = self._place(chunk.tokens), self._place(chunk.positions), self._tables(memories, chunk.slots)
            return self._read(weights, caches, *places)

    def score(self, weights: tuple[Any, Any], caches: Any, chunk: Chunk, memories: list[Memory]) -> tuple[Any, Scored]:
        """Reads as `read` does, and also returns the logits of the tokens."""
        with jax.set_mesh(self.mesh):
            rows = [self._place(x) for x in (chunk.tokens, chunk.targets, chunk.positions)]
            caches, scored = self._score(weights, caches, *rows, self._tables(memories, chunk.slots))
        return caches, jax.tree.map(np.asarray, scored)

    def write(
        self, weights: tuple[Any, Any], caches: Any, slots: Slots, memories: list[Memory], most: int
    ) -> tuple[Any, Written]:
        """Writes a block of tokens in every slot with a position, in at most `most` steps.

        The program has few rows if few slots are in use. If programs were not compiled at the start, one that has been
        compiled is preferred.
        """
        used = slots.limit >= 0
        needed = used.reshape(self.shards, -1).sum(axis=1).max()
        fitting = [rows for rows in self.written_rows if rows >= needed]
        rows = next((rows for rows in fitting if (rows, 0) in self._compiled), fitting[0])
        return self._write_rows(weights, caches, slots, memories, most, self._rows_with(np.nonzero(used)[0], rows))

    def _write_rows(
        self, weights: tuple[Any, Any], caches: Any, slots: Slots, memories: list[Memory], most: int, rows: np.ndarray
    ) -> tuple[Any, Written]:
        self._compiled.add((len(rows) // self.shards, 0))
        with jax.set_mesh(self.mesh):
            placed = jax.tree.map(lambda x: self._place(x[rows]), slots)
            caches, written = self._write(weights, caches, placed, self._tables(memories, rows), np.int32(most))

        def at_slots(x: jax.Array) -> np.ndarray:
            if not x.ndim:
                return np.asarray(x)
            every = np.full((x.shape[0], self.slots, *x.shape[2:]), -1, x.dtype)
            every[:, rows] = x
            return every

        return caches, jax.tree.map(at_slots, written)

    def _rows_with(self, slots: Sequence[int] | np.ndarray, rows: int) -> np.ndarray:
        """The slots of `rows` rows on each device, ascending: the given slots, and others until they are enough."""
        other = np.ones(self.slots, bool)
        other[np.asarray(slots, int)] = False
        chosen = np.argsort(other.reshape(self.shards, -1), axis=1, kind='stable')[:, :rows]
        return np.sort(chosen + np.arange(self.shards)[:, None] * self._on_shard, axis=None)

    def _tables(self, memories: list[Memory], slots: np.ndarray) -> Tables:
        """The pages and the slot of each row."""
        full, ring = (np.concatenate([getattr(memory, name) for memory in memories]) for name in ('full', 'ring'))
        rows = full[slots], ring[slots], (slots % self._on_shard).astype(np.int32)
        return Tables(*map(self._place, rows))

    def _place(self, x: np.ndarray) -> jax.Array | np.ndarray:
        """An array of rows, on the devices that have these rows."""
        if self.mesh.size == 1:
            return x  # the program places it faster itself
        sharding = make_shardings(i32['R/r/d/e']) if self.shards > 1 else NamedSharding(self.mesh, PartitionSpec())
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _row_counts(most: int, multiple: int = 1) -> list[int]:
    """1, 4, 8, 16, ... times the multiple, and the most: 2 rows take about as long as 4."""
    return [*(n for exponent in (0, *range(2, 20)) if (n := multiple << exponent) < most), most]


def _check_without_cache(model: Model, options: EngineOptions) -> None:
    for name, kind in (('weights', options.weights), ('cache', options.cache)):
        if kind != 'compute':
            raise UserError(
                f'--{name} {kind}: {type(model).__name__} computes its own matrix products and has no cache\n'
                f'leave out --{name}; model.name=transformer supports it'
            )


def _check_states(model: Model | None, options: EngineOptions) -> None:
    if not isinstance(model, Transformer) or not model.arch.has_states:
        return
    if options.proposed:
        raise UserError(
            'layers with a state cannot forget tokens that were proposed and then rejected\n'
            'leave out --propose and --draft'
        )
    if options.cache != 'compute' and not model.arch.attention.n_heads:
        raise UserError(
            f'--cache {options.cache} is a format of keys and values, but this model has none: its states are f32\n'
            'leave out --cache'
        )


def _check_draft(model: Model, draft: Model) -> None:
    for one in (model, draft):
        if not isinstance(one, Transformer):
            raise UserError(
                f'{type(one).__name__} has no cache, so it cannot use a draft or be one\nleave the draft out'
            )
    if draft.vocab_size != model.vocab_size:
        raise UserError(
            f'the draft has {draft.vocab_size} tokens, the model {model.vocab_size}\n'
            'use a draft with the same tokenizer'
        )


def _look_up(options: EngineOptions, draft: Any, cache: Any, slots: Slots, tables: Tables) -> tuple[jax.Array, Any]:
    """Proposals from the sequence itself."""
    del draft, tables
    return look_up(slots.history, slots.position + 1, options.proposed, options.ngram), cache


@functools.lru_cache(maxsize=4)
def programs_of(model: Model, mesh: Mesh, options: EngineOptions, draft: Model | None = None) -> Programs:
    """`Programs`, kept, since sampling during training uses them again and again."""
    return Programs(model, mesh, options, draft)


def fitting_length(model: Model, mesh: Mesh, options: EngineOptions, draft: Model | None = None) -> int:
    """The length of `options`, or the largest half, quarter, ... whose cache takes a quarter of a device's memory.

    On CPUs, where each step reads the whole cache, it takes at most 1 GiB.
    """
    stats = mesh.devices.flat[0].memory_stats() or {}
    room = stats.get('bytes_limit', _CPU_CACHE * 4) // 4
    length = options.max_length
    while length > _SHORT:
        programs = Programs(model, mesh, dataclasses.replace(options, max_length=length), draft)
        if programs.cache_bytes() <= room * programs.mesh.devices.size:
            break
        length //= 2
    return length
