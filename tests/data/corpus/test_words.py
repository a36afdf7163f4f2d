"""Words, and scripts without spaces."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.goldens import make_near_duplicates

from pretrax.data.corpus.near_duplicates import band_keys, clusters, probability, shingles
from pretrax.data.corpus.words import split_words


@pytest.mark.parametrize('language', ['chinese', 'japanese', 'thai'])
def test_scripts_without_spaces_are_compared_by_characters(language):
    """Similarities by brute force, and how many of 100 pairs `datasketch` finds, from
    tests/goldens/make_near_duplicates.py.
    """
    golden = json.loads((Path(make_near_duplicates.__file__).parent / 'near_duplicates.json').read_text())[language]
    made = make_near_duplicates.pairs(language)
    sets = [[set(shingles(text).tolist()) for text in pair] for pair in made]
    assert [len(a & b) / len(a | b) for a, b in sets] == pytest.approx(golden['jaccard'], abs=1e-6)
    first, second = (band_keys(texts, 0.8) for texts in zip(*made, strict=True))
    found = (first == second).any(axis=1)
    chances = [probability(similarity, 16, 8) for similarity in golden['jaccard']]
    error = sum(p * (1 - p) for p in chances) ** 0.5
    assert abs(found.sum() - golden['found']) <= 3 * error, (found.sum(), golden['found'])
    similar = np.array(golden['jaccard']) >= 0.9
    assert similar.sum() > 10
    assert found[similar].all()
    assert not (first[1:] == first[:-1]).any(), 'other documents are not similar'


def test_scripts_with_spaces_have_the_signatures_that_they_had():
    text = "L'été, naïve_1 don't; Ένα δύο. Привет, мир! 안녕하세요 세계 שלום עולם مرحبا بالعالم हिन्दी में पाठ བོད་སྐད x²"
    assert split_words(text) == re.findall(r'\w+', text)
    assert split_words('GPT4 は日本語x中文') == ['GPT4', 'は', '日', '本', '語', 'x', '中', '文']
    assert split_words('ที่นี่ ๑๒') == [*'ที่นี่', '๑๒']


def test_words_are_compared_without_case_and_punctuation_and_short_texts_as_a_whole():
    one, two, three, four, none, empty = band_keys(
        ['The cat, sat.', 'the CAT sat', 'the cat', 'sat the cat', '... !', None], 0.8
    )
    assert one.tolist() == two.tolist()
    assert not set(one) & set(three)
    assert not set(one) & set(four)
    assert not none.any()
    assert not empty.any()
    assert clusters([band_keys(['...', '???', None, None], 0.8)]).tolist() == [0, 1, 2, 3]
