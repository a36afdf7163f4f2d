"""Checks all data of flat-tokens: the checksums, the rules of the format, and the counts of the attributes."""

import hashlib
from typing import Any

import numpy as np

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.flat_tokens import (
    DTYPE,
    MASK,
    SHARD_LENGTH,
    FlatTokens,
    TokenCounts,
    group_attributes,
    little_endian,
    open_split,
    read_tokenizer_json,
    splits,
)
from pretrax.data.tokens.token_array import damaged
from pretrax.errors import UserError
from pretrax.storage import AnyPath
from pretrax.storage.result import result_at


def verify(directory: AnyPath) -> dict[str, TokenCounts]:
    """Checks all data against the checksums and the rules of the format, and returns the counts by split.

    The bytes of text are checked if the tokenizer keeps them, as byte-level ones without a normalizer do.

    Raises UserError if a file is damaged; names the first one.
    """
    found = {}
    for name in splits(directory):
        split = open_split(directory, name)
        identity = split.manifest.tokenizer
        content = read_tokenizer_json(directory, identity)
        tokenizer = None
        if content is not None:
            tokenizer = identity.tokenizer(content, str(directory))
            _refuse_other(split, 'tokenizer.vocab_size', identity.vocab_size, tokenizer.vocab_size)
        _verify_split(split, tokenizer)
        found[name] = split.manifest.counts
    _verify_documents(directory, sum(counts.documents for counts in found.values()))
    return found


def _verify_split(split: FlatTokens, tokenizer: Tokenizer | None) -> None:
    digests = {name: hashlib.sha256() for name in DTYPE if name != MASK or split.has_mask}
    n_starts, n_targets, largest = 0, 0, -1
    n_bytes, n_predicted = 0, 0
    end_of_text = split.manifest.tokenizer.end_of_text
    lengths = tokenizer.text_lengths if tokenizer is not None and tokenizer.keeps_bytes else None
    newest = end_of_text or 0  # nothing precedes the first document
    for start in range(0, split.n_tokens, SHARD_LENGTH['encoded_tokens']):
        stop = min(split.n_tokens, start + SHARD_LENGTH['encoded_tokens'])
        [encoded] = split.read([(start, stop)])
        digests['encoded_tokens'].update(little_endian(encoded))
        ids = encoded >> 1
        largest = max(largest, int(ids.max()))
        first = np.flatnonzero(encoded & 1)
        expected = split.read_starts(n_starts, min(n_starts + len(first), split.n_documents))
        if not np.array_equal(expected, (first + start).astype(np.uint64)):
            raise damaged(split.path / 'seq_starts', f'it differs from the starts in tokens {start} to {stop}')
        digests['seq_starts'].update(little_endian(expected))
        n_starts += len(first)
        [counted] = split.read_mask([(start, stop)])
        if split.has_mask:
            digests[MASK].update(little_endian(counted.astype(np.uint8)))
        n_targets += int(counted.sum()) - int(counted[first].sum())
        if lengths is not None and largest < len(lengths):
            sizes = lengths[ids]
            n_bytes += int(sizes.sum())
            n_predicted += int(sizes[counted & (encoded & 1 == 0)].sum())
        for number, token in enumerate(split.manifest.tokenizer.begin_of_text):
            at = first[first + number < len(ids)] + number
            if (ids[at] != token).any():
                raise damaged(split.path / 'encoded_tokens', f'a document does not begin with the token {token}')
        before_first = np.append(newest, ids)[first]
        if end_of_text is not None and (before_first != end_of_text).any():
            raise damaged(split.path / 'encoded_tokens', 'a document does not end with the end-of-text token')
        newest = ids[-1]
    if n_starts != split.n_documents:
        raise damaged(split.path / 'encoded_tokens', f'{n_starts} documents start, not {split.n_documents}')
    digests['seq_starts'].update(little_endian(split.read_starts(n_starts, n_starts + 1)))
    for name, digest in digests.items():
        if digest.hexdigest() != split.manifest.sha256.get(name):
            raise damaged(split.path / name, 'its sha256 differs from the one in the attributes')
    counts = split.manifest.counts
    _refuse_other(split, 'max_token_id', split.manifest.max_token_id, largest)
    _refuse_other(split, 'counts.targets', counts.targets, n_targets)
    if lengths is not None:
        for name, said, found in (
            ('bytes', counts.bytes, n_bytes),
            ('predicted_bytes', counts.predicted_bytes, n_predicted),
        ):
            if said is not None:
                _refuse_other(split, f'counts.{name}', said, found)


def _refuse_other(split: FlatTokens, name: str, said: int, found: int) -> None:
    if said != found:
        raise UserError(f'{split.path / "zarr.json"}: {name} is {said}, but the tokens have {found}')


def _verify_documents(directory: AnyPath, n_documents: int) -> None:
    said: Any = group_attributes(result_at(directory)).get('documents')
    if said is None:  # merged or converted, or written by an older pretrax
        return
    try:
        adds_up = said['read'] == said['kept'] + sum(said['left_out'].values())
        adds_up = adds_up and said['kept'] + said['cut'] == n_documents
    except (TypeError, KeyError, AttributeError):
        adds_up = False
    if not adds_up:
        raise UserError(f'{directory / "zarr.json"}: documents {said} do not add up to {n_documents} in the splits')
