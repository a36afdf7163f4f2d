"""What training needs from data: a batch for a step, a pure function of (seed, step, row) on any number of processes.

Anything with `vocab_size` and `batch` is a `Source`; `pack_rows` turns consecutive tokens into what a model reads.
Letters: R rows (sequences), L sequence length.
"""

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class DataRequest:
    """What pretrax tells a data component: where it may keep files, how long a row is, and how to speak to the user.

    `steps` and `batch_rows` are what the run is going to ask for, where that is known; batches do not depend on them.
    """

    seed: int
    sequence_length: int
    directory: pathlib.Path
    say: Callable[[str], None]
    steps: int | None = None
    batch_rows: int | None = None


class HostBatch(NamedTuple):
    """One step's rows in host memory; each array is [R, L].

    tokens int32; targets int32, the token after each one; segments int32, the number 1, 2, .. of the document inside
    the row (attention stays inside a segment); positions int32, restarting at 0 with each segment; mask float32, 1
    where the target counts.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    mask: np.ndarray


@runtime_checkable
class Source(Protocol):
    """A supply of batches.

    `batch(step, rows, batch_rows)` returns the rows `rows` of the `batch_rows` rows that make up step `step`, the same
    ones whichever process asks and whatever was asked before. A source may also have `tokenizer` (encode, decode,
    end_of_text), `bytes_per_token` and `validation_bytes_per_token` (bytes of text per target that counts), `n_tokens`,
    `fingerprint` (identifies the training tokens), `documents_per_row` (at most, which the fused kernels need to know),
    `reading` (what is being read at this moment) and `validation(index, rows, batch_rows)`, or None in their place.
    Where losses are to be told apart, `validation_parts` takes the place of `validation`: {name: (weight in the whole,
    the same function)}.
    """

    @property
    def vocab_size(self) -> int: ...

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch: ...


def pack_rows(tokens: np.ndarray, starts: np.ndarray, counts: np.ndarray | None = None) -> HostBatch:
    """Rows of L + 1 consecutive tokens -> inputs, targets, segments, positions and mask of length L.

    Args:
        tokens: [R, L + 1] integers.
        starts: [R, L + 1] bool, true where a token is the first of its document. A row that begins inside a document
            begins a segment all the same.
        counts: [R, L + 1] bool, false where a token is not to be learnt (a prompt, say); None: all are.

    Nothing inside a row tells which document comes next, so a target that starts one has mask 0.
    """
    if tokens.ndim != 2 or tokens.shape != starts.shape or tokens.shape[1] < 2:
        raise ValueError(f'tokens {tokens.shape}, starts {starts.shape}: expected two arrays of one shape [R, L + 1]')
    if counts is not None and counts.shape != tokens.shape:
        raise ValueError(f'counts {counts.shape}: expected the shape of the tokens {tokens.shape}')
    R, L = tokens.shape[0], tokens.shape[1] - 1
    begins = starts[:, :-1].astype(bool)
    begins[:, 0] = True
    column = np.broadcast_to(np.arange(L, dtype=np.int32), (R, L))
    counted = ~starts[:, 1:].astype(bool)
    newest_start = np.maximum.accumulate(np.where(begins, column, 0), axis=1)
    return HostBatch(
        tokens=tokens[:, :-1].astype(np.int32),
        targets=tokens[:, 1:].astype(np.int32),
        segments=np.cumsum(begins, axis=1, dtype=np.int32),
        positions=column - newest_start,
        mask=(counted if counts is None else counted & counts[:, 1:].astype(bool)).astype(np.float32),
    )
