"""Chunked attention: a token sees the earlier tokens of its chunk. Source: the released code of Llama 4 (Meta 2025).

Chunks are counted from the start of each document. For a kernel, each chunk is a segment of its own, like a document.

Letters: B batch, L length.
"""

import jax.numpy as jnp

from pretrax.model.scores import Scores
from pretrax.shardlib import axis_size, i32


def attention_segments(
    segments: i32['B/r/d/e L/c'], positions: i32['B/r/d/e L/c'], scores: Scores
) -> i32['B/r/d/e L/c']:
    """The segments of attention, documents or chunks of documents: a token sees only tokens of its segment."""
    return chunk_segments(segments, positions, scores.window) if scores.chunked else segments


def chunk_segments(segments: i32['B/r/d/e L/c'], positions: i32['B/r/d/e L/c'], chunk: int) -> i32['B/r/d/e L/c']:
    """A number for each chunk of each document, ascending along a row.

    Args:
        segments: the number of a token's document, ascending along a row.
        positions: in the document.
        chunk: tokens in a chunk.
    """
    most = -(-segments.shape[1] * axis_size('c') // chunk)  # chunks in a document
    return segments * most + positions // chunk


def most_segments(documents: int, length: int, chunk: int) -> int:
    """An upper bound on the number of chunks in a row of `length` tokens that has up to `documents` documents."""
    return documents + max(0, length - documents) // chunk


def consecutive(segments: i32['B L']) -> i32['B L']:
    """The segments of each row, numbered 1, 2, ..."""
    return 1 + jnp.cumsum(jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0, axis=1, dtype=jnp.int32)
