"""The shards of a corpus have all its documents once and in order, for any number of shards."""

import json
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from pretrax.data.corpus.corpus import Corpus, RowCounts, Selection, shards
from pretrax.data.corpus.listing import find_files

TEXTS = st.text(st.characters(exclude_categories=['Cs']), max_size=40)


@settings(max_examples=60)
@given(
    files=st.lists(st.lists(TEXTS, max_size=20), min_size=1, max_size=4),
    n=st.integers(1, 30),
    deduplicate=st.booleans(),
    ends=st.sampled_from([b'\n', b'\r\n']),
)
def test_shards_together_are_the_corpus(tmp_path_factory, files, n, deduplicate, ends):
    root = tmp_path_factory.mktemp('shards')
    for number, texts in enumerate(files):
        lines = [json.dumps({'text': text}, ensure_ascii=False).encode() for text in texts]
        (root / f'{number}.jsonl').write_bytes(ends.join(lines) + ends * (number % 2))
    everything = [text for texts in files for text in texts]
    expected = [text for text in everything if text]
    if deduplicate:
        expected = list(dict.fromkeys(expected))
    corpus = Corpus(find_files(str(root)), Selection(deduplicate=deduplicate))
    counts = [RowCounts() for _ in range(n)]
    parts = [pickle.loads(pickle.dumps(shard)) for shard in shards(corpus, n)]
    assert len(parts) <= n
    found = [d.text for shard, of in zip(parts, counts, strict=False) for d in shard.documents(of)]
    assert found == expected == [d.text for d in corpus.documents()]
    total = sum(counts, RowCounts())
    assert total.kept == len(expected)
    blank = sum(1 for number in range(len(files)) if number % 2 and not files[number])
    assert total.read == len(everything) + blank == total.kept + total.left_out.total()
    assert sum(shard.size for shard in parts) == sum(max(1, file.size) for file in corpus.files)
