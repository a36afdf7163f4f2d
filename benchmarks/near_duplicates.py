"""Measures how fast near-duplicates are found, and how many of them: `uv run python benchmarks/near_duplicates.py`.

The text is the sources of the Python standard library, one document per file, and the same cut into pieces of 100
lines. The speed is that of one core: reading and hashing in this process. Memory is that of the keys. Recall and
precision are those of the pairs that share a band, against the Jaccard index of all pairs of the first files.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ['RAYON_NUM_THREADS'] = '1'  # before rensa is imported

from result_files import circumstances, write_result

from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.near_duplicates import band_keys, bands_and_rows, clusters, probability
from pretrax.data.corpus.selection import NearDuplicates, RowCounts, Selection
from pretrax.data.corpus.stdlib import stdlib_files
from pretrax.system.software import versions

THRESHOLD = 0.8
RESULTS = Path(__file__).parent / 'results'


def measure(name: str, texts: list[str], rounds: int, scratch: Path) -> dict[str, Any]:
    """Speeds of the keys alone, of the clusters alone, and of reading, hashing and clustering a .jsonl file."""
    path = scratch / f'{name}.jsonl'
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    corpus = Corpus(find_files(str(path)), Selection(near_duplicates=NearDuplicates(threshold=THRESHOLD)))
    hashing, whole, counts = [], [], RowCounts()
    keys, found = band_keys([], THRESHOLD), []
    for _ in range(rounds):
        started = time.perf_counter()
        keys = band_keys(texts, THRESHOLD)
        hashing.append(time.perf_counter() - started)
        started = time.perf_counter()
        found = shards(corpus, 1)
        whole.append(time.perf_counter() - started)
    for shard in found:
        for _ in shard.documents(counts):
            pass
    n_bytes = sum(len(text.encode()) for text in texts)
    return {
        'name': name, 'documents': len(texts), 'megabytes': n_bytes / 1e6,
        'left_out': counts.left_out['near-duplicates'],
        'hashing_seconds': statistics.median(hashing), 'whole_seconds': statistics.median(whole),
        'key_bytes': keys.nbytes / len(texts),
    }  # fmt: skip


def many(n: int) -> dict[str, Any]:
    """The seconds that clustering `n` documents takes, a third of which copy another."""
    import numpy as np

    rng = np.random.default_rng(0)
    keys = rng.integers(1, 2**63, (n, bands_and_rows(THRESHOLD)[0]), np.uint64)
    keys[rng.permutation(n)[: n // 3]] = keys[rng.integers(0, n, n // 3)]
    started = time.perf_counter()
    left_out = int((clusters([keys]) != np.arange(n)).sum())
    return {'documents': n, 'seconds': time.perf_counter() - started, 'left_out': left_out}


def quality(texts: list[str]) -> dict[str, Any]:
    """Pairs at or above the threshold, those that share a band, and both."""
    sets = []
    for text in texts:
        words = re.findall(r'\w+', text.lower())
        sets.append({tuple(words[n : n + 5]) for n in range(max(1, len(words) - 4))})
    keys = band_keys(texts, THRESHOLD)
    similar = found = both = 0
    expected = 0.0
    for a, b in itertools.combinations(range(len(texts)), 2):
        similarity = len(sets[a] & sets[b]) / len(sets[a] | sets[b])
        is_similar, is_found = similarity >= THRESHOLD, bool((keys[a] == keys[b]).any())
        similar, found, both = similar + is_similar, found + is_found, both + (is_similar and is_found)
        expected += probability(similarity, *bands_and_rows(THRESHOLD))
    return {'documents': len(texts), 'similar': similar, 'found': found, 'both': both, 'expected': expected}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f'# Near-duplicates, {result["date"]}', '',
        f'`{result["command"]}`', '', f'{result["processor"]}, {result["cores"]} cores, of which one is used.', '',
        '| text | documents | MB | left out | hashing, documents/s | hashing, MB/s | with reading and clusters, MB/s '
        '| bytes kept per document |',
        '|---|---|---|---|---|---|---|---|',
    ]  # fmt: skip
    for row in result['speed']:
        lines.append(
            f'| {row["name"]} | {row["documents"]:,} | {row["megabytes"]:.1f} | {row["left_out"]:,} '
            f'| {row["documents"] / row["hashing_seconds"]:,.0f} | {row["megabytes"] / row["hashing_seconds"]:.1f} '
            f'| {row["megabytes"] / row["whole_seconds"]:.1f} | {row["key_bytes"]:.0f} |'
        )
    q, m = result['quality'], result['many']
    lines += [
        '',
        f'Of all pairs of {q["documents"]} pieces of 100 lines, {q["similar"]} have a similarity of {THRESHOLD} or '
        'more, and '
        f'{q["found"]} share a band ({q["expected"]:.1f} expected by the formula), {q["both"]} of them at or above '
        'the threshold.',
        '',
        f'Clusters of {m["documents"]:,} documents, of which {m["left_out"]:,} are left out: {m["seconds"]:.1f} s.',
        '',
        f'Versions: {json.dumps(result["versions"])}.',
    ]
    return '\n'.join(lines) + '\n'


def pieces(texts: list[str]) -> list[str]:
    """The texts in pieces of 100 lines."""
    found = []
    for text in texts:
        lines = text.splitlines(keepends=True)
        found += [''.join(lines[start : start + 100]) for start in range(0, len(lines), 100)]
    return found


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--documents', type=int, default=1_000_000)
    parser.add_argument('--out', type=Path, default=RESULTS)
    given = parser.parse_args()
    texts = [document.text for document in Corpus(stdlib_files()).documents()]
    with tempfile.TemporaryDirectory() as scratch:
        speed = [
            measure(name, of, given.rounds, Path(scratch)) for name, of in (('files', texts), ('pieces', pieces(texts)))
        ]
    result = circumstances() | {'versions': versions()}
    result |= {'speed': speed, 'quality': quality(pieces(texts)[:1000]), 'many': many(given.documents)}
    write_result(result, table, given.out, 'near-duplicates')


if __name__ == '__main__':
    main()
