"""Encoding a shard: the loss mask of answers, and documents that are cut in two."""

import json

import tokenizers

from pretrax.data.corpus.content import Document
from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import Selection
from pretrax.data.tokenize import encode_shard
from pretrax.data.tokenize.prepare import Work, prepare
from pretrax.data.tokens.flat_tokens import open_split
from pretrax.data.tokens.flat_tokens_check import verify
from tokenizer_families import family


def test_answers_become_a_loss_mask(tmp_path):
    """A token counts if it starts in the answer, and so does the end-of-text token; counted with `tokenizers`."""
    rows = [{'ask': 'the cat é ', 'reply': 'and the漢 other'}, {'ask': 'only asked', 'reply': ''}]
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    corpus = Corpus(find_files(str(tmp_path / 'a.jsonl')), Selection(prompt_field='ask', answer_field='reply'))
    for name in ('byte-level BPE', 'SentencePiece BPE', 'bytes'):
        tokenizer = family(name)
        place = prepare(
            corpus,
            tmp_path / name,
            lambda _: None,
            tokenizer=tokenizer,
            vocab_size=0,
            validation=0.0,
            work=Work(workers=1),
        )
        split = open_split(place, 'train')
        reference = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.settings))
        mask, n_bytes = [], 0
        for row in rows:
            text = row['ask'] + row['reply']
            starts = [start for start, _ in reference.encode(text, add_special_tokens=False).offsets]
            counted = [start >= len(row['ask']) for start in starts]
            mask += [*counted, True]
            n_bytes += sum(
                len(text[a:b].encode())
                for a, b, counts in zip(starts, [*starts[1:], len(text)], counted, strict=True)
                if counts
            )
        assert split.read_mask([(0, split.n_tokens)])[0].tolist() == mask
        counts = verify(place)['train']
        assert (counts.targets, counts.predicted_bytes) == (sum(mask), n_bytes)


def test_a_document_cut_in_two_keeps_its_answers(tmp_path):
    text, answers = 'ask\nreply\n' * 10, tuple((10 * n + 4, 10 * n + 10) for n in range(10))
    [train, held_out] = encode_shard._cut(Document(text, 'x', answers), 0.33).values()
    assert train.text + held_out.text == text
    assert [part.text[a:b] == 'reply\n' for part in (train, held_out) for a, b in part.answers or ()] == [True] * 10
