"""Converts, merges, splits and shuffles token files. Documents are copied unchanged."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from pretrax.data.tokens.flat_tokens import FlatTokens, TokenizerIdentity
from pretrax.data.tokens.flat_tokens_writer import refuse_existing
from pretrax.data.tokens.nanogpt_meta import TOKENS_JSON, meta_files
from pretrax.data.tokens.token_copy import Documents, TextBytes, output, read_documents
from pretrax.data.tokens.token_files import TokenFiles, is_flat_tokens, open_token_files
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import Report, UserError, system_errors
from pretrax.storage import AnyPath, BucketPath
from pretrax.system.atomic import new_directory, partial_path
from pretrax.system.cache import cache_directory

# Tokens that a shuffle keeps in memory; larger splits go through bucket files of about this size.
BUCKET = 1 << 25


def convert(files: TokenFiles, out: AnyPath, say: Report) -> None:
    """Converts token files of any format to flat-tokens."""
    with output(out, list(files.splits.values()), files.identity, files.tokenizer, {'tool': 'convert'}, say) as append:
        for split, store in files.splits.items():
            text = TextBytes(files.tokenizer, store)
            for documents in read_documents(store, say):
                append(split, documents, text.count(documents))


def convert_to_nanogpt(files: TokenFiles, out: AnyPath, say: Report, added_end: int | None = None) -> None:
    """Converts token files of any format to a directory with nanoGPT's train.bin and val.bin.

    Args:
        added_end: the id to write after each document; only if no token ends the documents of the files.

    Raises:
        UserError: the format cannot store the tokens, or would lose the ends of documents.
    """
    if isinstance(out, BucketPath):
        raise UserError(f'{out}: a nanoGPT .bin is written to a disk\n  give a local --out, and copy the files')
    refuse_existing(out)
    identity = files.identity
    if added_end is not None:
        if identity.end_of_text is not None:
            raise UserError(
                f'{files.path}: token {identity.end_of_text} ends its documents\n  remove --add-end-of-text {added_end}'
            )
        vocab_size = max(identity.vocab_size, added_end + 1)
        identity = identity.model_copy(update={'end_of_text': added_end, 'vocab_size': vocab_size})
    if identity.vocab_size > 1 << 16:
        raise UserError(
            f'{files.path}: its ids go up to {identity.vocab_size - 1:,}\n  a nanoGPT .bin stores uint16, up to 65,535'
        )
    if identity.end_of_text is None and any(store.n_documents > 1 for store in files.splits.values()):
        raise UserError(
            f'{files.path}: no token ends its documents, and a nanoGPT .bin stores their ends in no other way\n'
            '  name a token to write after each document: --add-end-of-text ID'
        )
    if any(store.has_mask for store in files.splits.values()):
        raise UserError(f'{files.path}: it has a loss mask, which a nanoGPT .bin cannot store')
    with system_errors(f'{out}: cannot write the tokens'), new_directory(out, sync=True) as partial:
        for split, store in files.splits.items():
            name = 'val.bin' if split == 'validation' else f'{split}.bin'
            with (partial / name).open('wb') as stream:
                for documents in read_documents(store, say):
                    ids = (documents.encoded >> 1).astype('<u2')
                    if added_end is not None:
                        ids = np.insert(ids, np.cumsum(documents.lengths), added_end)
                    stream.write(ids)
            say(f'{out / name}: {store.n_documents:,} documents, {(partial / name).stat().st_size // 2:,} tokens')
        tokenizer = files.tokenizer if identity.vocab_size == files.identity.vocab_size else None
        if tokenizer is None:
            identity = identity.model_copy(update={'sha256': None})
        for name, content in meta_files(identity, tokenizer).items():
            (partial / name).write_bytes(content)
    ends = 'has one document' if identity.end_of_text is None else f'ends documents with token {identity.end_of_text}'
    say(f'{out}: {ends}, as its {TOKENS_JSON} says')


def merge(paths: list[AnyPath], out: AnyPath, say: Report) -> None:
    """Concatenates the splits of several flat-tokens directories, in the given order."""
    every = [_open(path, say) for path in paths]
    first = every[0]
    for files in every[1:]:
        if files.identity != first.identity:
            raise UserError(
                f'{files.path}: made by another tokenizer than {first.path}\n'
                f'  {_shown(files.identity)}\n  {_shown(first.identity)}\n  tokenize one of them again'
            )
    stores = [(split, store) for files in every for split, store in files.splits.items()]
    names = sorted({split for split, _ in stores}, key=lambda split: (split != 'train', split))
    with output(out, [store for _, store in stores], first.identity, first.tokenizer, {'tool': 'merge'}, say) as append:
        for name in names:
            for split, store in stores:
                if split == name:
                    for documents, n_bytes in _with_known_bytes(store, read_documents(store, say)):
                        append(split, documents, n_bytes)


def split(
    path: AnyPath, out: AnyPath, say: Report, *, fraction: float | None, count: int | None, seed: int = 0
) -> None:
    """Divides all documents of flat-tokens into train and validation by a hash of each document.

    A document is held out if its hash is below the fraction, or among the `count` smallest hashes. The choice depends
    only on its tokens and the seed, so copies of a document are in the same split (except at the boundary of `count`).
    """
    files = _open(path, say)
    stores = list(files.splits.values())
    if len(stores) > 1:
        say(f'{path}: the documents of {" and ".join(files.splits)} are divided again')
    total = sum(store.n_documents for store in stores)
    if count is not None and count >= total:
        raise UserError(f'{path}: {total:,} documents, so {count:,} cannot be held out\n  use a smaller --count')
    how = {'tool': 'split', 'fraction': fraction, 'count': count, 'seed': seed}
    limit = np.uint64(min(int((fraction or 0) * 2**64), 2**64 - 1))
    smallest = _smallest(stores, count, seed) if count is not None else None
    with output(out, stores, files.identity, files.tokenizer, how, say) as append:
        number, n_held_out = 0, 0
        for store in stores:
            text = TextBytes(files.tokenizer, store)
            for documents in read_documents(store, say):
                if smallest is None:
                    held_out = _hashes(documents, seed) < limit
                else:
                    held_out = np.isin(np.arange(number, number + len(documents.lengths)), smallest)
                number += len(documents.lengths)
                n_held_out += int(held_out.sum())
                for name, which in (('train', ~held_out), ('validation', held_out)):
                    chosen = documents.chosen(which)
                    append(name, chosen, text.count(chosen))
        if n_held_out in (0, total):
            raise UserError(
                f'{path}: {fraction} of {total:,} documents leaves {"train" if n_held_out else "validation"} empty\n'
                '  change --fraction, or give a number of documents: --count'
            )


def _smallest(stores: list[TokenStore], count: int, seed: int) -> np.ndarray:
    """The numbers of the documents with the smallest hashes."""
    hashes, numbers, before = np.zeros(0, np.uint64), np.zeros(0, np.int64), 0
    for store in stores:
        for documents in read_documents(store):
            hashes = np.append(hashes, _hashes(documents, seed))
            numbers = np.append(numbers, np.arange(before, before + len(documents.lengths)))
            before += len(documents.lengths)
            kept = np.argsort(hashes, kind='stable')[:count]
            hashes, numbers = hashes[kept], numbers[kept]
    return numbers


def _hashes(documents: Documents, seed: int) -> np.ndarray:
    """A 64-bit hash of the ids of each document and the seed."""
    salt = seed.to_bytes(8, 'little', signed=True)
    digests = (
        hashlib.blake2b(ids.astype('<u4').tobytes(), digest_size=8, key=salt).digest() for ids in documents.ids()
    )
    return np.frombuffer(b''.join(digests), '<u8')


def shuffle(path: AnyPath, out: AnyPath, say: Report, *, seed: int) -> None:
    """Shuffles the documents of each split of flat-tokens, uniformly over all permutations.

    Each document goes to a random bucket, and each bucket, which fits in memory, is shuffled.
    Sanders 1998, "Random permutations on distributed, external and hierarchical memory".
    """
    files = _open(path, say)
    how = {'tool': 'shuffle', 'seed': seed}
    refuse_existing(out)
    with output(out, list(files.splits.values()), files.identity, files.tokenizer, how, say) as append:
        for name, store in files.splits.items():
            # Named like the partial directory of a writer, so that the next writer removes it after a kill.
            near = cache_directory() / out.name if isinstance(out, BucketPath) else out
            buckets = partial_path(near.with_name(f'{out.name}-{name}'))
            random = np.random.Generator(np.random.Philox(key=[seed, int.from_bytes(name.encode()[:8], 'little')]))
            try:
                for documents, n_bytes in _with_known_bytes(store, _shuffled(store, buckets, random, say)):
                    append(name, documents, n_bytes)
            finally:
                shutil.rmtree(buckets, ignore_errors=True)


def _shuffled(store: TokenStore, buckets: Path, random: np.random.Generator, say: Report) -> Iterator[Documents]:
    n_buckets = -(-store.n_tokens // BUCKET)
    if n_buckets == 1:
        every = list(read_documents(store, say))
        mask = np.concatenate([d.mask for d in every if d.mask is not None]) if store.has_mask else None
        whole = Documents(np.concatenate([d.encoded for d in every]), mask, np.concatenate([d.lengths for d in every]))
        yield whole.reordered(random.permutation(len(whole.lengths)))
        return
    with system_errors(f'{buckets}: cannot write'):
        buckets.mkdir(parents=True)
        for documents in read_documents(store, say):
            bucket = random.integers(n_buckets, size=len(documents.lengths))
            for number in np.unique(bucket):
                for what, values in documents.chosen(bucket == number)._asdict().items():
                    if values is not None:
                        with (buckets / f'{number}.{what}').open('ab') as stream:
                            values.tofile(stream)
    for number in range(n_buckets):
        if not (buckets / f'{number}.lengths').exists():
            continue  # no document was drawn into it
        whole = Documents(
            np.fromfile(buckets / f'{number}.encoded', np.uint32),
            np.fromfile(buckets / f'{number}.mask', bool) if store.has_mask else None,
            np.fromfile(buckets / f'{number}.lengths', np.int64),
        )
        yield whole.reordered(random.permutation(len(whole.lengths)))


def _with_known_bytes(
    store: TokenStore, every: Iterable[Documents]
) -> Iterator[tuple[Documents, tuple[int, int] | None]]:
    """Pairs all documents of a store with byte counts that add up to those of its manifest."""
    assert isinstance(store, FlatTokens)
    counts, first = store.manifest.counts, True
    known = None if counts.bytes is None or counts.predicted_bytes is None else (counts.bytes, counts.predicted_bytes)
    for documents in every:
        yield documents, known if first or known is None else (0, 0)
        first = False


def _open(path: AnyPath, say: Report) -> TokenFiles:
    files = open_token_files(path, say)
    if not is_flat_tokens(path):
        raise UserError(
            f'{path}: {files.format}, expected flat-tokens\n  convert it first: pretrax data convert {path} --out DIR'
        )
    return files


def _shown(identity: TokenizerIdentity) -> str:
    sha256 = 'unknown' if identity.sha256 is None else f'sha256 {identity.sha256[:12]}..'
    begin = f', begin-of-text {list(identity.begin_of_text)}' if identity.begin_of_text else ''
    return f'{identity.vocab_size:,} tokens, {sha256}, end-of-text {identity.end_of_text}{begin}'
