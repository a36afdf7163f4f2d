"""Reads flat-tokens of seqax, in zarr version 2, with TensorStore. github.com/MatX-inc/seqax docs/flat-tokens.md

Ids are encoded as in pretrax's flat-tokens. There are no checksums, no tokenizer and no end-of-text token.
"""

import functools
import json
from pathlib import Path

import numpy as np
import tensorstore as ts

from pretrax.data.tokens.foreign_layout import Layout, Ranges
from pretrax.data.tokens.token_array import refuse_large_chunks
from pretrax.errors import UserError
from pretrax.system.json_file import read_json

_AT_ONCE = 1 << 20  # document starts
_DELTA = {'id': 'delta', 'dtype': '<i8', 'astype': '<i8'}


def seqax(path: Path) -> Layout:
    """A group with `encoded_tokens`, `seq_starts` and the attribute `max_token_id`."""
    tokens = _open(path / 'encoded_tokens', 'uint32')
    n_tokens = tokens.shape[0]
    largest = read_json(path / '.zattrs').get('max_token_id')
    if type(largest) is not int or not 0 <= largest < 2**31:
        raise UserError(f'{path / ".zattrs"}: max_token_id is {largest!r}\n  expected an id from 0 to 2**31 - 1')
    if n_tokens == 0:
        raise UserError(f'{path}: it has no tokens')
    starts = _open(path / 'seq_starts', 'uint64')

    read = functools.partial(_read, tokens, path / 'encoded_tokens')
    find_starts = functools.partial(_starts, starts, path / 'seq_starts', n_tokens)
    files = (path / '.zattrs', *sorted((path / 'encoded_tokens').iterdir()), *sorted((path / 'seq_starts').iterdir()))
    return Layout(
        'seqax flat-tokens (zarr 2)', path, files, n_tokens, read, find_starts, start_bits=True, vocab_size=largest + 1
    )


def _starts(array: ts.TensorStore, path: Path, n_tokens: int) -> tuple[np.ndarray, list[str]]:
    metadata = read_json(path / '.zarray')
    length, n = int(metadata['chunks'][0]), array.shape[0]
    at_once = max(1, _AT_ONCE // length) * length  # whole chunks
    found, last = [], 0
    for at in range(0, n, at_once):
        [starts] = _read(array, path, [(at, min(at + at_once, n))])
        if metadata.get('filters'):  # each chunk has differences
            for chunk in range(0, len(starts), length):
                np.cumsum(starts[chunk : chunk + length], out=starts[chunk : chunk + length])
        if (at == 0 and starts[0] != 0) or starts[0] < last or (starts[1:] < starts[:-1]).any():
            raise _not_increasing(path, n_tokens)
        last = int(starts[-1])
        found.append(np.unique(starts))
    if not found or last != n_tokens:
        raise _not_increasing(path, n_tokens)
    whole = np.unique(np.concatenate(found))
    return whole, [f'documents: skipped {n - len(whole):,} without tokens'] if len(whole) < n else []


def _not_increasing(path: Path, n_tokens: int) -> UserError:
    return UserError(f'{path}: it does not increase from 0 to {n_tokens:,}\n  the dataset is damaged or incomplete')


def _open(path: Path, dtype: str) -> ts.TensorStore:
    """Opens an array. TensorStore has no filters: it gets the metadata without them, and `_starts` undoes the delta."""
    metadata = read_json(path / '.zarray')
    filters = metadata.get('filters')
    if filters not in (None, [_DELTA], [{'id': 'delta', 'dtype': '<i8'}]):
        raise UserError(f'{path / ".zarray"}: filters {filters}\n  expected none, or the delta filter of seqax')
    context = ts.Context()
    ts.KvStore.open('memory://', context=context).result()['.zarray'] = json.dumps(
        metadata | {'filters': None}
    ).encode()
    layers = [
        {'base': {'driver': 'file', 'path': f'{path}/'}},
        {'exact': '.zarray', 'base': {'driver': 'memory', 'path': '.zarray'}},
    ]
    spec = {
        'driver': 'zarr',
        'kvstore': {'driver': 'kvstack', 'layers': layers},
        'fill_missing_data_reads': False,
    }
    try:
        array = ts.open(spec, read=True, context=context).result()
    except ValueError as error:
        raise UserError(f'{path / ".zarray"}: not readable: {_reason(error)}') from None
    if array.rank != 1 or array.dtype.name != dtype:
        raise UserError(f'{path / ".zarray"}: {array.dtype.name} of rank {array.rank}\n  expected {dtype} of rank 1')
    [chunk] = array.chunk_layout.read_chunk.shape or [1]
    refuse_large_chunks((chunk or 1) * array.dtype.numpy_dtype.itemsize, path / '.zarray')
    return array


def _read(array: ts.TensorStore, path: Path, ranges: Ranges) -> list[np.ndarray]:
    reads = [array[start:stop].read() for start, stop in ranges]
    try:
        return [read.result() for read in reads]
    except ValueError as error:
        raise UserError(
            f'{path}: cannot be read: {_reason(error)}\n  if that is damage, restore it from a copy'
        ) from None


def _reason(error: ValueError) -> str:
    return str(error).split(' [')[0]
