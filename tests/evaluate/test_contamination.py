"""N-grams of tasks in training text: found exactly where a search for their words finds them."""

import contextlib
import gzip
import json
import random

import pytest

from pretrax.cli import main
from pretrax.cli.data import _lookup
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens.flat_tokens import TokenizerIdentity
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.evaluate.contamination import Ngrams, texts_of_files, words
from token_arrays import encode_documents

LETTERS = random.Random(0)
VOCABULARY = [''.join(LETTERS.choices('abcdefgé', k=LETTERS.randint(1, 9))) for _ in range(400)]
TOKENIZER = train_tokenizer([' '.join(VOCABULARY)], 300)


def text(rng, n):
    return ' '.join(rng.choices(VOCABULARY, k=n))


def search(texts, training, n):
    """{number of a document: (its n-grams that some training text has, of all)}, with `in` on text."""
    padded = [f' {" ".join(words(one))} ' for one in training]
    found = {}
    for number, one in enumerate(texts):
        every = words(one)
        grams = {' '.join(every[i : i + n]) for i in range(len(every) - n + 1)}
        here = {gram for gram in grams if any(f' {gram} ' in other for other in padded)}
        if here:
            found[number] = len(here), len(grams)
    return found


@pytest.fixture
def made(tmp_path, monkeypatch):
    """tmp_path with tokens/ and tasks.jsonl, some of whose records are partly in the training text."""
    rng = random.Random(1)
    tasks = [text(rng, 30) for _ in range(40)]
    training = [text(rng, rng.randint(1, 60)) for _ in range(60)]
    for number, one in enumerate(tasks[:25]):
        parts = one.split()
        start = rng.randrange(12)
        copied = parts[start : start + 6 + number % 14]  # from fewer than n words to many
        place = rng.randrange(len(training))
        training[place] += ' ' + '; '.join(copied).upper() + ' ' + text(rng, 5)
    training.append(' '.join([text(rng, 3000), tasks[30], text(rng, 3000), tasks[31]]))  # longer than some pieces
    identity = TokenizerIdentity(sha256=TOKENIZER.sha256, vocab_size=TOKENIZER.vocab_size, end_of_text=0)
    with create(tmp_path / 'tokens', identity, TOKENIZER.content, {}) as writer:
        for one in training:
            writer.append('train', *encode_documents([[*TOKENIZER.encode(one), 0]]), n_bytes=None, predicted_bytes=None)
    (tmp_path / 'tasks.jsonl').write_text(
        ''.join(json.dumps({'question': {'text': one}, 'answer': 1}) + '\n' for one in tasks)
    )
    monkeypatch.chdir(tmp_path)
    return tasks, training


def look_up(*arguments):
    with contextlib.suppress(SystemExit):
        main(['data', 'contamination', 'tokens', *arguments])


def found(*arguments):
    look_up('--file', 'tasks.jsonl', '--json', 'found.json', *arguments)
    with open('found.json') as file:
        return json.load(file)['tasks']['tasks.jsonl']


@pytest.mark.parametrize('piece', [1 << 18, 1000, 37])
@pytest.mark.parametrize('n', [8, 13])
def test_what_is_found_is_what_a_search_finds(made, n, piece, monkeypatch, capsys):
    monkeypatch.setattr(_lookup, '_PIECE', piece)
    tasks, training = made
    result = found('--words', str(n))
    assert {one['document']: (one['found'], one['ngrams']) for one in result['overlaps']} == search(tasks, training, n)
    for one in result['overlaps']:
        padded = [f' {" ".join(words(other))} ' for other in training]
        assert one['where'] == min(i for i, other in enumerate(padded) if f' {one["ngram"]} ' in other)
    assert (result['documents'], result['checked']) == (40, 40)
    assert f'tasks.jsonl         40       40  {len(result["overlaps"]):12}' in capsys.readouterr().out


def test_several_processes_find_the_same(made, monkeypatch):
    monkeypatch.setattr(_lookup, '_CALL', 4000)
    alone = found('--workers', '1')
    assert found('--workers', '2') == alone
    assert len(alone['overlaps']) > 10


def test_short_texts():
    """Of 8 to 12 words: as a whole. Shorter ones are not checked."""
    ten = 'a b c d e f g h i j'
    ngrams = Ngrams({'task': [[ten], ['a b c']]}, 13)
    assert [len(one) for one in ngrams.of_documents['task']] == [1, 0]
    assert ngrams.find(words('x ' + ten)) == {0}
    assert ngrams.find(words(ten[:-2])) == set()
    assert ngrams.find(words(ten.replace(' e ', ' x '))) == set()


def test_texts_of_a_directory_are_read_once_and_scripts_without_spaces_have_words(tmp_path):
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/a.jsonl').write_text('{"q": {"text": "one"}, "n": 1, "more": ["two"]}\n\n{"text": "three"}\n')
    (tmp_path / 'in/b.jsonl').symlink_to('a.jsonl')
    (tmp_path / 'in/c.txt.gz').write_bytes(gzip.compress(b'four'))
    (tmp_path / 'in/d.csv').write_text('x,y\nfive,six\n')
    assert texts_of_files(str(tmp_path / 'in')) == [['one', 'two'], ['three'], ['four'], ['five', 'six']]
    ngrams = Ngrams({'task': [['今天的天气怎么样今天很好我们去公园']]}, 13)
    assert len(ngrams.of_documents['task'][0]) == 5
    assert ngrams.find(words('他说：“今天的天气怎么样，今天很好我。”')) == {0}


def test_an_ngram_lies_in_one_text():
    ngrams = Ngrams({'task': [['a b', 'c d']]}, 3)
    assert ngrams.find(words('a b c d')) == set()


def test_bundled_tasks(made, capsys):
    look_up('--tasks', 'cloze,arithmetic', '--limit', '3')
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ['cloze', '3', '3', '0', '(0.0%)']
    assert lines[-1].split()[:2] == ['arithmetic', '9']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['nowhere'], 'nowhere'),
        (['tokens', '--split', 'test'], "no split 'test'\n  splits: train"),
        (['tokens', '--file', 'nothing.jsonl'], 'nothing.jsonl: no such file'),
        (['tokens', '--file', 'bad.jsonl'], 'bad.jsonl:2: not JSON'),
        (['tokens', '--tasks', 'clozes'], "there is no task 'clozes'"),
    ],
)
def test_mistakes(made, tmp_path, arguments, message, capsys):
    (tmp_path / 'bad.jsonl').write_text('{}\n{"text": \n')
    with pytest.raises(SystemExit) as end:
        main(['data', 'contamination', *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
