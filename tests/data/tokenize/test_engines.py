"""The result is the same to the byte for any engine, and after any number of kills."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import NearDuplicates, Selection
from pretrax.data.tokenize import prepare as prepare_module
from pretrax.data.tokenize.engines import Processes
from pretrax.data.tokenize.prepare import Work, prepare
from pretrax.data.tokenize.tokenized_shards import find_shard, shard_name
from pretrax.data.tokenizers import encoders
from pretrax.data.tokens.flat_tokens import splits
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.errors import UserError
from tokenizer_families import TEXTS, byte_level
from worker_calls import kill_yourself, long_answer

SELECTION = Selection(deduplicate=True, near_duplicates=NearDuplicates(), max_characters=400)


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Corpus:
    """About 60 kB in three files and a dozen shards, with empty, repeated and long documents."""
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
    assert [path.name for path in directory.iterdir()] == [place.name], 'no other files are left'
    return place


def test_processes_write_what_one_process_writes(corpus, tmp_path, said, monkeypatch):
    one = made(corpus, tmp_path / 'one', said.append)
    assert 'by this process' in said.text
    said.clear()
    several = made(corpus, tmp_path / 'several', said.append, work=Work(workers=2))
    assert 'by 2 processes' in said.text
    assert contents(one) == contents(several)
    monkeypatch.setattr(prepare_module, 'SHARD_BYTES', 20_000)
    assert contents(made(corpus, tmp_path / 'larger')) == contents(one), 'for any size of the shards'

    counts = verify(one)
    documents = json.loads((one / 'zarr.json').read_text())['attributes']['documents']
    kept = [document.text for document in corpus.documents()]
    assert documents['read'] == 750
    assert documents['kept'] == len(kept) == sum(of.documents for of in counts.values())
    assert set(documents['left_out']) == {'empty', 'duplicates', 'near-duplicates', 'over 400 characters'}
    assert sum(of.bytes or 0 for of in counts.values()) == sum(len(text.encode()) for text in kept)


def test_verify_finds_documents_that_do_not_add_up(corpus, tmp_path):
    place = made(corpus, tmp_path / 'data')
    root = json.loads((place / 'zarr.json').read_text())
    root['attributes']['documents']['left_out']['empty'] += 1
    (place / 'zarr.json').write_text(json.dumps(root))
    with pytest.raises(UserError, match=r'do not add up to \d+ in the splits'):
        verify(place)


def test_a_user_error_in_a_worker_is_reported_and_finished_shards_are_kept(corpus, tmp_path, said, monkeypatch):
    monkeypatch.setattr(encoders, 'COMPARED_CHARACTERS', 0)  # choosing an encoder would read the bad row
    lines = (tmp_path / 'c.jsonl').read_text().splitlines()
    (tmp_path / 'c.jsonl').write_text('\n'.join([*lines[:200], '{"text": 3}', *lines[200:]]) + '\n')
    broken = Corpus(find_files(str(tmp_path / '*.jsonl')))
    with pytest.raises(UserError, match=r"c\.jsonl:201: field 'text' is 3"):
        made(broken, tmp_path / 'data', said.append, work=Work(workers=2), tokenizer=byte_level(), validation=0.0)
    [shards_dir] = (tmp_path / 'data').iterdir()
    assert any(find_shard(shards_dir, number) for number in range(8)), 'a slow worker may not have finished its first'
    assert 'shards are kept in' in said.text


PROGRAM = textwrap.dedent("""
    import sys
    from pathlib import Path
    from pretrax.data.tokenize import prepare
    from pretrax.data.corpus.corpus import Corpus
    from pretrax.data.corpus.listing import find_files
    from pretrax.data.corpus.selection import NearDuplicates, Selection

    prepare.SHARD_BYTES = 3_000
    selection = Selection(deduplicate=True, near_duplicates=NearDuplicates(), max_characters=400)
    corpus = Corpus(find_files(sys.argv[1]), selection)
    place = prepare.prepare(
        corpus, Path(sys.argv[2]), lambda line: print(line, flush=True),
        tokenizer=None, vocab_size=300, validation=0.1, work=prepare.Work(workers=int(sys.argv[3])),
    )
""")


@pytest.mark.slow
def test_after_a_kill_at_any_moment_the_next_run_resumes_with_the_same_result(corpus, tmp_path):
    expected = contents(made(corpus, tmp_path / 'whole'))
    command = [sys.executable, '-c', PROGRAM, str(tmp_path / '*.jsonl'), str(tmp_path / 'data')]
    rng = random.Random(1)
    killed = continued = 0
    # The number of finished shards at the kill; then a kill at the last step; then none.
    for goal, workers in (
        (rng.randint(0, 3), 1),
        (rng.randint(4, 8), 2),
        (rng.randint(12, 16), 1),
        (-1, 1),
        (10**6, 1),
    ):
        with subprocess.Popen([*command, str(workers)], stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                n_finished = len(list((tmp_path / 'data').glob('.*.pieces/*/counts.json')))
                finishing = goal < 0 and any((tmp_path / 'data').glob('.*.partial-*/train/zarr.json'))
                if n_finished >= goal >= 0 or finishing:
                    process.send_signal(signal.SIGKILL)
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.002)
            said, _ = process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL), said
        continued += 'were finished by an earlier run' in said
        for path in (tmp_path / 'data').glob('*'):
            with contextlib.suppress(UserError):
                splits(path)
                verify(path)  # every directory that opens is complete
                assert {name: content for name, content in contents(path).items() if name != 'lock'} == expected
    assert killed >= 3
    assert continued >= 2
    [place] = (tmp_path / 'data').iterdir()
    assert contents(place) == expected


def test_damaged_shards_are_tokenized_again(corpus, tmp_path, said, monkeypatch):
    monkeypatch.setattr(encoders, 'COMPARED_CHARACTERS', 0)
    expected = contents(made(corpus, tmp_path / 'whole', tokenizer=byte_level()))
    kept = {}

    def stop_late(*arguments):
        [shards_dir] = (tmp_path / 'data').glob('.*.pieces')
        kept['shards_dir'] = shards_dir
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module._Preparation, '_check', stop_late)
        with pytest.raises(KeyboardInterrupt):
            made(corpus, tmp_path / 'data', tokenizer=byte_level())
    shards_dir = kept['shards_dir']
    numbers = sorted(int(path.name) for path in shards_dir.iterdir() if path.is_dir())
    assert len(numbers) > 10
    tokens = shards_dir / shard_name(numbers[3]) / 'train.tokens'
    tokens.write_bytes(tokens.read_bytes()[:-4])
    (shards_dir / shard_name(numbers[5]) / 'counts.json').write_text('{')
    assert find_shard(shards_dir, numbers[3]) is find_shard(shards_dir, numbers[5]) is None
    assert contents(made(corpus, tmp_path / 'data', said.append, tokenizer=byte_level())) == expected
    assert f'{len(numbers) - 2} of {len(numbers)} shards were finished by an earlier run' in said.text


def test_a_killed_worker_is_reported(corpus, tmp_path):
    engine = Processes(1)
    with (
        contextlib.closing(engine),
        pytest.raises(UserError, match=r'a worker process has ended \(SIGKILL\)\n.*workers=1'),
    ):
        list(engine.unordered(kill_yourself, [()], lambda *_: None))


def test_threads_have_ended_when_an_engine_is_closed():
    """A thread that still reads an answer would fail with the stream that is closed under it."""
    before = threading.active_count()
    for _ in range(3):
        with contextlib.closing(Processes(2)) as engine:
            next(engine.unordered(long_answer, [()] * 20, lambda *_: None))
        assert threading.active_count() == before


def test_workers_end_when_their_run_is_killed(tmp_path):
    program = (
        'import sys, os, signal\nfrom pretrax.data.tokenize.engines import Processes\nengine = Processes(1)\n'
        'from worker_calls import report_forever\n'
        'list(engine.unordered(report_forever, [()], lambda n_bytes, n_tokens: print(n_bytes, flush=True)))'
    )
    environment = os.environ | {'PYTHONPATH': str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, '-c', program], stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    while alive(worker):
        pass  # hangs if the worker does not end


def alive(pid: int) -> bool:
    try:
        return Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    except FileNotFoundError:
        return False


def test_a_full_disk_is_reported_and_leaves_no_directory(corpus, tmp_path):
    program = 'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))\n' + PROGRAM.replace(
        'SHARD_BYTES = 3_000', 'SHARD_BYTES = 30_000'
    )
    command = [sys.executable, '-c', program, str(tmp_path / '*.jsonl'), str(tmp_path / 'data'), '1']
    done = subprocess.run(command, capture_output=True, text=True)
    assert 'UserError' in done.stderr
    assert 'cannot write the tokens: File too large' in done.stderr
    assert not list((tmp_path / 'data').glob('tokens-*'))


def test_an_unwritable_directory_is_reported(corpus, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match=r'cannot write the tokens: Not a directory'):
        made(corpus, tmp_path / 'file' / 'data', tokenizer=byte_level())


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::ResourceWarning')  # Ray leaves its log files open
# Ray forks, and JAX warns about forks if an earlier test has started JAX.
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function _at_fork:pytest.PytestUnraisableExceptionWarning')
def test_ray_writes_what_one_process_writes(corpus, tmp_path, said):
    one = made(corpus, tmp_path / 'one', tokenizer=byte_level())
    assert contents(
        made(corpus, tmp_path / 'ray', said.append, work=Work('ray', 2), tokenizer=byte_level())
    ) == contents(one)
    assert 'by 2 tasks of Ray on 1 nodes' in said.text
