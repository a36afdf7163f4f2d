"""One result, to the byte, whoever tokenises and however often it is killed."""

import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pretrax.data import prepare as prepare_module
from pretrax.data.corpus import Corpus, Selection
from pretrax.data.files import find_files
from pretrax.data.flat_tokens import splits, verify
from pretrax.data.pieces import find_piece
from pretrax.data.prepare import Work, prepare
from pretrax.errors import UserError
from tokenizer_families import TEXTS, byte_level

SELECTION = Selection(deduplicate=True, max_characters=400)


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Corpus:
    """Some 60 kB in three files, in a dozen shards, with empty, repeated and long documents."""
    monkeypatch.setattr(prepare_module, 'SHARD_BYTES', 5_000)
    rng = random.Random(0)
    for name in 'abc':
        with (tmp_path / f'{name}.jsonl').open('w') as stream:
            for n in range(250):
                text = ''.join(rng.choice(TEXTS)[: rng.randint(0, 80)] for _ in range(rng.randint(0, 4)))
                text = '' if n % 50 == 3 else 'x' * 500 if n % 60 == 7 else text
                stream.write(json.dumps({'text': text}, ensure_ascii=False) + '\n')
    return Corpus(find_files(str(tmp_path / '*.jsonl')), SELECTION)


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob('*') if path.is_file()}


def made(corpus, directory, say=lambda _: None, *, work=None, tokenizer=None, validation=0.1):
    place = prepare(
        corpus, directory, say, tokenizer=tokenizer, vocab_size=300, validation=validation, work=work or Work(workers=1)
    )
    assert [path.name for path in directory.iterdir()] == [place.name], 'nothing else is left'
    return place


def test_processes_write_what_one_process_writes(corpus, tmp_path, said, monkeypatch):
    one = made(corpus, tmp_path / 'one', said.append)
    assert 'by this process' in said.text
    said.clear()
    several = made(corpus, tmp_path / 'several', said.append, work=Work(workers=3))
    assert 'by 3 processes' in said.text
    assert contents(one) == contents(several)
    monkeypatch.setattr(prepare_module, 'SHARD_BYTES', 20_000)
    assert contents(made(corpus, tmp_path / 'larger')) == contents(one), 'nor does it depend on the shards'

    counts = verify(one)
    documents = json.loads((one / 'zarr.json').read_text())['attributes']['documents']
    kept = [document.text for document in corpus.documents()]
    assert documents['read'] == 750
    assert documents['kept'] == len(kept) == sum(of.documents for of in counts.values())
    assert set(documents['left_out']) == {'empty', 'duplicates', 'over 400 characters'}
    assert sum(of.bytes or 0 for of in counts.values()) == sum(len(text.encode()) for text in kept)


def test_documents_that_do_not_add_up_are_found_by_verify(corpus, tmp_path):
    place = made(corpus, tmp_path / 'data')
    root = json.loads((place / 'zarr.json').read_text())
    root['attributes']['documents']['left_out']['empty'] += 1
    (place / 'zarr.json').write_text(json.dumps(root))
    with pytest.raises(UserError, match=r'do not add up to \d+ in the splits'):
        verify(place)


def test_a_mistake_in_a_worker_is_the_users_and_what_is_finished_is_kept(corpus, tmp_path, said):
    lines = (tmp_path / 'c.jsonl').read_text().splitlines()
    (tmp_path / 'c.jsonl').write_text('\n'.join([*lines[:200], '{"text": 3}', *lines[200:]]) + '\n')
    broken = Corpus(find_files(str(tmp_path / '*.jsonl')))
    with pytest.raises(UserError, match=r"c\.jsonl:201: field 'text' is 3"):
        made(broken, tmp_path / 'data', said.append, work=Work(workers=2), tokenizer=byte_level())
    [pieces] = (tmp_path / 'data').iterdir()
    assert find_piece(pieces, 0)
    assert 'shards are kept in' in said.text
    said.clear()
    made_now = prepare(
        corpus_of(tmp_path, SELECTION), tmp_path / 'data', said.append, tokenizer=byte_level(), vocab_size=0, validation=0.0,
    ) if False else None  # fmt: skip
    assert made_now is None


def corpus_of(tmp_path, selection):
    return Corpus(find_files(str(tmp_path / '*.jsonl')), selection)


PROGRAM = textwrap.dedent("""
    import sys
    from pathlib import Path
    from pretrax.data import pieces, prepare
    from pretrax.data.corpus import Corpus, Selection
    from pretrax.data.files import find_files

    prepare.SHARD_BYTES = 5_000
    corpus = Corpus(find_files(sys.argv[1]), Selection(deduplicate=True, max_characters=400))
    place = prepare.prepare(
        corpus, Path(sys.argv[2]), lambda line: print(line, flush=True),
        tokenizer=None, vocab_size=300, validation=0.1, work=prepare.Work(workers=int(sys.argv[3])),
    )
""")


def test_killed_at_any_moment_the_next_run_goes_on_and_writes_the_same(corpus, tmp_path):
    expected = contents(made(corpus, tmp_path / 'whole'))
    command = [sys.executable, '-c', PROGRAM, str(tmp_path / '*.jsonl'), str(tmp_path / 'data')]
    rng = random.Random(1)
    moments = ['text:', 'tokenizer: byte', 'tokenizer: encodes', 'tokenizer: encodes', 'documents:', None]
    continued = 0
    for moment in moments:
        with subprocess.Popen([*command, str(rng.choice([1, 2]))], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if moment and line.startswith(moment):
                    time.sleep(rng.random() * 0.3)
                    process.send_signal(signal.SIGKILL)
                    break
        continued += any('were finished before' in line for line in said)
        assert process.returncode == (-signal.SIGKILL if moment else 0), said
        if moment and not list((tmp_path / 'data').glob('tokens-*')):
            for path in (tmp_path / 'data').rglob('*'):
                if path.is_dir():
                    with pytest.raises(UserError):
                        splits(path)
    assert continued
    [place] = (tmp_path / 'data').iterdir()
    assert contents(place) == expected
