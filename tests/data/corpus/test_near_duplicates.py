"""Near-duplicates are found as often as the formula says, for any shards, and their first document is kept."""

import collections
import itertools
import json
import random
import re
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.near_duplicates import band_keys, bands_and_rows, clusters, probability
from pretrax.data.corpus.selection import NearDuplicates, RowCounts, Selection
from pretrax.data.corpus.stdlib import stdlib_files
from pretrax.data.tokenize import prepare as prepare_module
from pretrax.data.tokenize.prepare import Work, prepare
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.errors import UserError


def jaccard(a: str, b: str) -> float:
    """By the definition, in plain Python."""
    first, second = (
        {tuple(words[n : n + 5]) for n in range(max(1, len(words) - 4))}
        for words in (re.findall(r'\w+', text.lower()) for text in (a, b))
    )
    return len(first & second) / len(first | second)


def changed(text: str, share: float, rng: random.Random) -> str:
    """The text with this share of its words replaced."""
    words = text.split()
    return ' '.join(f'new{rng.random()}' if rng.random() < share else word for word in words)


def pairs(n: int, words: int = 300) -> list[tuple[str, str]]:
    """Pieces of the standard library, and changed copies of them."""
    rng = random.Random(0)
    text = ' '.join(document.text for document in itertools.islice(Corpus(stdlib_files()).documents(), 60)).split()
    pieces = [' '.join(text[start : start + words]) for start in range(0, n * words, words)]
    assert len(text) > n * words
    return [(piece, changed(piece, rng.random() * 0.12, rng)) for piece in pieces]


@pytest.mark.parametrize(('threshold', 'expected'), [(0.8, (16, 8)), (0.5, (42, 3)), (0.9, (9, 14))])
def test_pairs_are_found_as_often_as_the_formula_says(threshold, expected):
    bands, rows = bands_and_rows(threshold)
    assert (bands, rows) == expected
    made = pairs(400)
    first, second = (band_keys(texts, threshold) for texts in zip(*made, strict=True))
    found = (first == second).any(axis=1)
    expected_of = [1 - (1 - jaccard(*pair) ** rows) ** bands for pair in made]
    groups = collections.defaultdict(list)
    for p, is_found in zip(expected_of, found, strict=True):
        groups[min(3, int(4 * p))].append((p, is_found))
    assert len(groups) >= 2
    for group in [*groups.values(), [*zip(expected_of, found, strict=True)]]:
        mean = sum(p for p, _ in group)
        error = sum(p * (1 - p) for p, _ in group) ** 0.5
        assert abs(sum(is_found for _, is_found in group) - mean) <= 3 * error + 1, (len(group), mean)
    assert probability(threshold, bands, rows) >= 0.9
    assert band_keys([made[0][0], made[1][0]], threshold)[0].tolist() != first[1].tolist()


def test_a_cluster_is_what_bands_connect():
    rng = random.Random(2)
    shared = [[rng.randrange(5) for _ in range(3)] for _ in range(60)]
    keys = np.array([[value * 13 + rng.randrange(12) for value in row] for row in shared], np.uint64)
    expected = list(range(60))  # by breadth-first search over all pairs
    for start in range(60):
        if expected[start] != start:
            continue
        waiting = [start]
        while waiting:
            at = waiting.pop()
            for other in range(60):
                if expected[other] == other != start and any(
                    a == b != 0 for a, b in zip(keys[at], keys[other], strict=True)
                ):
                    expected[other] = start
                    waiting.append(other)
    assert 1 < len(set(expected)) < 60
    assert clusters([keys[:17], keys[17:18], keys[18:]]).tolist() == expected


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    """Three files with exact and near copies in other files."""
    rng = random.Random(3)
    rows = [
        text for n, (piece, _) in enumerate(pairs(60, 60)) for text in [piece, *[changed(piece, 0.01, rng)] * (n % 3)]
    ]
    rng.shuffle(rows)
    for number, name in enumerate('abc'):
        own = rows[number::3]
        (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in own))
    return Corpus(find_files(str(tmp_path / '*.jsonl')), Selection(near_duplicates=NearDuplicates()))


def test_the_first_is_kept_in_any_shards_and_counted(corpus):
    texts = [d.text for d in Corpus(corpus.files).documents()]
    firsts = clusters([band_keys(texts, 0.8)])
    expected = [text for n, text in enumerate(texts) if firsts[n] == n]
    assert 60 <= len(expected) < len(texts) - 30
    both = Corpus(corpus.files, Selection(deduplicate=True, near_duplicates=NearDuplicates()))
    for n in (1, 2, 7, 40):
        counts, said = RowCounts(), []
        assert [d.text for shard in shards(corpus, n, say=said.append) for d in shard.documents(counts)] == expected
        assert counts.left_out == {'near-duplicates': len(texts) - len(expected)}
        n_clusters = len(set(firsts[[first != row for row, first in enumerate(firsts)]]))
        assert said[0] == (
            f'near-duplicates: {len(texts) - len(expected)} documents are left out, in {n_clusters} clusters'
        )
        row = min(
            n for n, first in enumerate(firsts) if list(firsts).count(first) == max(map(list(firsts).count, firsts))
        )
        name, line = next((f, i) for f in corpus.files for i, at in enumerate(f.path.read_text().splitlines(), 1)
                          if json.loads(at)['text'] == texts[row])  # fmt: skip
        assert said[1] == f'near-duplicates: {list(firsts).count(row) - 1} of {name.path}:{line}'
        counts = RowCounts()
        assert [d.text for shard in shards(both, n) for d in shard.documents(counts)] == expected
        assert counts.left_out['duplicates'] == len(texts) - len(set(texts)) > 0
        assert sum(counts.left_out.values()) == len(texts) - len(expected)
    assert [d.text for d in corpus.documents(start=50)] == [
        text for n, text in enumerate(texts) if firsts[n] == n and n >= 50
    ]


def test_tokens_do_not_depend_on_workers_and_the_fingerprint_covers_the_threshold(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, 'SHARD_BYTES', 6_000)
    said, contents = [], []
    for workers in (1, 2):
        place = prepare(
            corpus, tmp_path / str(workers), said.append, tokenizer=None, vocab_size=300, validation=0.0,
            work=Work(workers=workers),
        )  # fmt: skip
        contents.append({p.relative_to(place): p.read_bytes() for p in place.rglob('*') if p.is_file()})
    assert contents[0] == contents[1]
    kept = len(list(corpus.documents()))
    assert verify(place)['train'].documents == kept
    assert f'{kept} kept + ' in ' '.join(said)
    assert ' near-duplicates' in ' '.join(said)
    chosen = [None, NearDuplicates(), NearDuplicates(threshold=0.7)]
    fingerprints = {Corpus(corpus.files, Selection(near_duplicates=one)).fingerprint() for one in chosen}
    assert len(fingerprints) == 3


def test_bad_options_and_a_missing_extra_are_refused(open_source, corpus, tmp_path, monkeypatch, said):
    text = str(tmp_path / '*.jsonl')
    with pytest.raises(ValidationError, match=r'near_duplicates\.threshold\n.* less than or equal to 0\.99'):
        open_source(text=text, near_duplicates={'threshold': 1.5})
    open_source(text=text, vocab_size=300, validation=0, near_duplicates={})
    assert 'near-duplicates: ' in said.text
    assert 'once more' in said.text
    monkeypatch.setitem(sys.modules, 'rensa', None)
    with pytest.raises(UserError, match=r'data\.near_duplicates needs the package rensa\n.*--extra dedup'):
        open_source(text=text, vocab_size=300, validation=0, near_duplicates={})
