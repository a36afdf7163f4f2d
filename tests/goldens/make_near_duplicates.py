"""Writes which pairs of nearly equal documents in scripts without spaces `datasketch` finds: near_duplicates.json.

Run by hand, in an environment with datasketch:

    ENV/bin/python tests/goldens/make_near_duplicates.py

For each language: the Jaccard similarity of the sets of 5 characters in a row of each pair, and how many of the pairs a
MinHash LSH of 128 permutations in 16 bands of 8 finds, as the mean of 20 seeds. Punctuation and spaces are no
characters.
"""

import json
import random
import unicodedata
from pathlib import Path

FILE = Path(__file__).parent / 'near_duplicates.json'
N, SEEDS = 100, 20
KANA = [chr(code) for code in range(0x3042, 0x3094)] + [chr(code) for code in range(0x30A2, 0x30F5)]
HAN = [chr(0x4E00 + 5 * n) for n in range(2000)]
CONSONANTS, VOWELS, TONES = (
    [chr(code) for code in range(*span)] for span in ((0x0E01, 0x0E2F), (0x0E31, 0x0E3B), (0x0E48, 0x0E4C))
)


def clause(language: str, rng: random.Random) -> str:
    """Some characters without a space or punctuation between them."""
    if language == 'chinese':
        return ''.join(HAN[int(len(HAN) * rng.random() ** 2)] for _ in range(rng.randrange(6, 20)))
    if language == 'japanese':
        return ''.join(rng.choice(KANA if rng.random() < 0.6 else HAN[:600]) for _ in range(rng.randrange(8, 30)))
    syllables = (
        rng.choice(CONSONANTS) + rng.choice(['', *VOWELS]) + rng.choice(['', '', *TONES])
        for _ in range(rng.randrange(6, 30))
    )
    return ''.join(syllables)


def pairs(language: str) -> list[tuple[str, str]]:
    """Documents of 300 to 900 characters, and copies with 0 to 30 characters replaced."""
    rng = random.Random(language)
    ends = {'chinese': '，。', 'japanese': '、。', 'thai': '  '}[language]
    made = []
    for _ in range(N):
        text = ''
        while len(text) < 300 + 600 * rng.random():
            text += clause(language, rng) + rng.choice(ends)
        changed = list(text)
        for at in rng.sample(range(len(text)), rng.randrange(31)):
            changed[at] = rng.choice(clause(language, rng)) if changed[at] not in ends else changed[at]
        made.append((text, ''.join(changed)))
    return made


def character_shingles(text: str) -> set[str]:
    """All runs of 5 of the characters of a text, without spaces and punctuation."""
    characters = [letter for letter in text if unicodedata.category(letter)[0] in 'LM']
    return {''.join(characters[n : n + 5]) for n in range(len(characters) - 4)}


def jaccard(one: str, other: str) -> float:
    first, second = character_shingles(one), character_shingles(other)
    return len(first & second) / len(first | second)


def found_by_datasketch(made: list[tuple[str, str]], seed: int) -> int:
    import datasketch

    n = 0
    for pair in made:
        hashes = [datasketch.MinHash(num_perm=128, seed=seed) for _ in pair]
        for one, text in zip(hashes, pair, strict=True):
            one.update_batch([shingle.encode() for shingle in character_shingles(text)])
        index = datasketch.MinHashLSH(num_perm=128, params=(16, 8))
        index.insert('first', hashes[0])
        n += bool(index.query(hashes[1]))
    return n


if __name__ == '__main__':
    golden = {}
    for language in ('chinese', 'japanese', 'thai'):
        made = pairs(language)
        golden[language] = {
            'jaccard': [round(jaccard(*pair), 6) for pair in made],
            'found': sum(found_by_datasketch(made, seed) for seed in range(1, SEEDS + 1)) / SEEDS,
        }
    FILE.write_text(json.dumps(golden) + '\n')
    print({language: (one['found'], sum(s >= 0.8 for s in one['jaccard'])) for language, one in golden.items()})
