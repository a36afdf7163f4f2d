"""The interface between data and training: a batch is a pure function of (seed, step, row), on any number of processes.

Derive a data source from `Source`; `pack_rows` makes a batch of consecutive tokens.
Letters: R rows (sequences), L sequence length.
"""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pretrax.errors import UserError
from pretrax.storage import AnyPath


@dataclass(frozen=True)
class DataRequest:
    """The facts about a run that a data source is built from.

    Attributes:
        seed: any integer.
        directory: where the source may keep files.
        steps: steps of the run; None if unknown. Batches do not depend on it.
        rows_before: step -> rows of all steps before it, over all processes and islands; None if unknown. Only weights
            of a mixture that change at steps depend on it.
        islands: of the federation that the rows are for; 1 without a federation.
    """

    seed: int
    sequence_length: int
    directory: AnyPath
    say: Callable[[str], None]
    steps: int | None = None
    rows_before: Callable[[int], int] | None = None
    islands: int = 1

    @property
    def batch_rows(self) -> float | None:
        """The mean number of rows of a step of an island; None if unknown."""
        return self.rows_before(self.steps) / self.steps / self.islands if self.steps and self.rows_before else None


class HostBatch(NamedTuple):
    """Rows of one step in host memory; each array is [R, L].

    Attributes:
        tokens: int32.
        targets: int32, the token after each token.
        segments: int32, the number 1, 2, .. of the document in the row; attention stays inside a segment.
        positions: int32, restarting at 0 with each segment.
        mask: float32, 1 where the target counts, otherwise 0.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    mask: np.ndarray


# (index, rows, batch_rows) -> the rows `rows` of batch `index`, which has `batch_rows` rows over all processes.
type BatchFunction = Callable[[int, slice, int], HostBatch]


class Source(abc.ABC):
    """The base class of data sources. A source has to define `vocab_size` and `batch`; the rest has defaults.

    Attributes:
        vocab_size: number of token ids; every id is below it.
        tokenizer: has `encode(text)`, `decode(ids)`, `end_of_text` and perhaps `begin_of_text`, the ids that begin a
            text; without it, the run cannot generate text.
        n_tokens: number of training tokens; None if unknown or endless.
        fingerprint: identifies the training tokens, so that a resumed run notices changed data; None skips the check.
        largest_token: the largest id that the data can have, which the model must have too; None: `vocab_size` - 1.
        documents_per_row: the largest number of segments in a row, for the attention kernels; None if unknown.
        bytes_per_token: UTF-8 bytes of text per training target that counts; None omits bits per byte from the metrics.
        validation_bytes_per_token: UTF-8 bytes of text per validation target that counts; None: not known.
        validation: returns a batch of held-out rows; None if no text is held out. Rows past the last one have mask 0.
    """

    vocab_size: int
    tokenizer: Any = None
    n_tokens: int | None = None
    largest_token: int | None = None
    fingerprint: str | None = None
    documents_per_row: int | None = None
    bytes_per_token: float | None = None
    validation_bytes_per_token: float | None = None
    validation: BatchFunction | None = None

    @abc.abstractmethod
    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        """The rows `rows` of the `batch_rows` rows of a step.

        A pure function of its arguments and the seed: the result depends neither on the process nor on earlier calls.

        Where batches grow, it is also a function only of the row's number in the run: row r of batch i of R rows is row
        i R + r of one endless order. `check_row_order` refuses other sources.
        """

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources that rows are taken from; () if there is only one."""
        return ()

    def row_sources(self, step: int, rows: slice, batch_rows: int) -> np.ndarray:
        """The index into `source_names` for each row of `batch(step, rows, batch_rows)`; 0 if there is one source."""
        del step
        return np.zeros(len(range(batch_rows)[rows]), np.int64)

    @property
    def validation_parts(self) -> Mapping[str, tuple[float, BatchFunction]]:
        """{name: (weight in the validation loss, batches)}; by default `validation` under the name ''."""
        return {} if self.validation is None else {'': (1.0, self.validation)}

    @property
    def reading(self) -> str | None:
        """What is being read at this moment, for the message about a stall; by default None."""
        return None

    @property
    def tokenizer_sha256(self) -> str | None:
        """Identifies the tokenizer; by default its `sha256`, or None if it has none."""
        return getattr(self.tokenizer, 'sha256', None)

    @property
    def tokenizer_begin(self) -> list[int] | None:
        """The ids that begin a text; by default those of its tokenizer, or None if it has no such attribute."""
        begin = getattr(self.tokenizer, 'begin_of_text', None)
        return None if begin is None else list(begin)


def check_source(source: Any, name: str) -> Source:
    """Returns the object that the data component `name` built. Raises UserError if it is not a data source."""
    kind = type(source).__name__
    if not isinstance(source, Source):
        raise UserError(
            f'data.name={name}: the component returned {kind}, expected a data source\n'
            f'derive {kind} from pretrax.data.batches.source.Source'
        )
    if not hasattr(source, 'vocab_size'):
        raise UserError(f'data.name={name}: {kind} has no vocab_size\nset self.vocab_size to the number of token ids')
    return source


def pack_rows(tokens: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> HostBatch:
    """Converts rows of L + 1 consecutive tokens to a batch of length L.

    A row starts a segment even if it begins inside a document. The first token of a document cannot be predicted from
    the document before it, so as a target it has mask 0.

    Args:
        tokens: [R, L + 1] integers.
        starts: [R, L + 1] bool, true for the first token of each document.
        mask: [R, L + 1] bool, true for tokens that count as targets (false for a prompt, say); None: all count.

    Raises:
        ValueError: the shapes differ.
    """
    if tokens.ndim != 2 or tokens.shape != starts.shape or tokens.shape[1] < 2:
        raise ValueError(f'tokens {tokens.shape}, starts {starts.shape}: expected two arrays of one shape [R, L + 1]')
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f'mask {mask.shape}: expected the shape of the tokens {tokens.shape}')
    R, L = tokens.shape[0], tokens.shape[1] - 1
    begins = starts[:, :-1].astype(bool)
    begins[:, 0] = True
    first = np.flatnonzero(begins)
    row, column = np.divmod(first, L)
    number = np.arange(1, len(first) + 1) - np.searchsorted(first, L * row)
    segments, positions = segment_arrays(R, L, column, number, np.diff(first, append=R * L))
    counted = ~starts[:, 1:].astype(bool)
    return HostBatch(
        tokens=tokens[:, :-1].astype(np.int32),
        targets=tokens[:, 1:].astype(np.int32),
        segments=segments,
        positions=positions,
        mask=(counted if mask is None else counted & mask[:, 1:].astype(bool)).astype(np.float32),
    )


def segment_arrays(
    R: int, L: int, first: np.ndarray, number: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The fields `segments` and `positions` of a batch, int32 [R, L].

    Args:
        first, number, length: int64 [segments], the first column, the number in its row and the tokens of each segment,
            in the order of the batch. The lengths add up to R L.
    """
    segments, columns = (np.repeat(values.astype(np.int32), length).reshape(R, L) for values in (number, first))
    return segments, np.arange(L, dtype=np.int32) - columns
