"""Writes files in the formats of other tools, from their published code, to test our readers.

The writers share no code with the readers; they use only struct, numpy, pickle and zarr.
"""

import pickle
import struct
from pathlib import Path

import numcodecs
import numpy as np

MERGED_HEADER = 12


def nanogpt(path: Path, documents: list[list[int]]) -> Path:
    """uint16 ids of consecutive documents. karpathy/nanoGPT data/openwebtext/prepare.py (the memmap at its end)"""
    np.array([token for document in documents for token in document], np.uint16).tofile(path)
    return path


def pbin(path: Path, documents: list[list[int]], width: int = 2, protocol: int | None = None, base: int = 0) -> Path:
    """Modalities/modalities src/modalities/dataloader/create_packed_data.py: PackedDataGenerator._writer_thread.

    base: 12 for early versions, whose offsets counted the header (same file, 2024).
    """
    index, offset = [], base
    data = b''
    for document in documents:
        encoded = b''.join(token.to_bytes(width, byteorder='little', signed=False) for token in document)
        data += encoded
        index.append((offset, len(encoded)))
        offset += len(encoded)
    path.write_bytes(struct.pack('<QI', len(data), width) + data + pickle.dumps(index, protocol))
    return path


def join_pbins(path: Path, sources: list[Path]) -> Path:
    """Modalities' join_embedded_stream_data with its bug: the offsets of each further file are 12 bytes too small per
    file before it. Same source as above."""
    data, index, offset, widths = b'', [], 0, set()
    for source in sources:
        raw = source.read_bytes()
        length, width = struct.unpack('<QI', raw[:12])
        widths.add(width)
        data += raw[12 : 12 + length]
        index += [(start + offset, size) for start, size in pickle.loads(raw[12 + length :])]
        offset += length
        offset -= MERGED_HEADER
    [width] = widths
    path.write_bytes(struct.pack('<QI', len(data), width) + data + pickle.dumps(index))
    return path


MEGATRON_CODES = {'uint8': 1, 'int8': 2, 'int16': 3, 'int32': 4, 'int64': 5, 'uint16': 8}


def megatron(prefix: Path, documents: list[list[list[int]]], dtype: str = 'uint16', modes: bytes = b'') -> Path:
    """Documents of sequences of ids. NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py: _IndexWriter, and
    IndexedDatasetBuilder.add_document / finalize."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    item = np.dtype(dtype).itemsize
    with open(f'{prefix}.bin', 'wb') as stream:
        for sequence in sequences:
            stream.write(np.array(sequence, dtype).tobytes(order='C'))
    with open(f'{prefix}.idx', 'wb') as stream:
        stream.write(b'MMIDIDX\x00\x00')
        stream.write(struct.pack('<Q', 1))
        stream.write(struct.pack('<B', MEGATRON_CODES[dtype]))
        stream.write(struct.pack('<Q', len(sequences)))
        stream.write(struct.pack('<Q', len(documents) + 1))
        stream.write(np.array(lengths, np.int32).tobytes())
        stream.write(np.array([sum(lengths[:i]) * item for i in range(len(lengths))], np.int64).tobytes())
        ends = [0]
        for document in documents:
            ends.append(ends[-1] + len(document))
        stream.write(np.array(ends, np.int64).tobytes())
        stream.write(modes)
    return prefix


def seqax(path: Path, splits: dict[str, list[list[int]]], chunk: int = 8) -> Path:
    """MatX-inc/seqax tools/flat_tokens.py: Writer and Chunk.from_ragged, written with the zarr library in format 2."""
    import zarr

    root = zarr.open_group(path, mode='w-', zarr_format=2)
    written = {'write_empty_chunks': True}  # the default of zarr 2: chunks of zeros are files, too
    blosc = numcodecs.Blosc(cname='lz4', clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    for split, documents in splits.items():
        group = root.require_group(split)
        tokens = group.create_array(
            'encoded_tokens',
            shape=(0,),
            chunks=(chunk,),
            dtype=np.uint32,
            compressors=blosc,
            fill_value=None,
            config=written,
        )
        starts = group.create_array(
            'seq_starts', shape=(1,), chunks=(chunk,), dtype=np.uint64, compressors=blosc, fill_value=0,
            filters=[numcodecs.Delta(dtype='i8')], config=written,
        )  # fmt: skip
        starts[:] = np.zeros(1, np.uint64)
        for at in range(0, len(documents), 3):
            n_tokens, batch = tokens.shape[0], documents[at : at + 3]
            encoded = [2 * token + (i == 0) for document in batch for i, token in enumerate(document)]
            tokens.append(np.array(encoded, np.uint32))
            starts.append((n_tokens + np.cumsum([len(document) for document in batch])).astype(np.uint64))
        group.attrs['max_token_id'] = max(max(document, default=0) for document in documents)
    return path
