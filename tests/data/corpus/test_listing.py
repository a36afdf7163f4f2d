"""Every file is listed once, whatever leads to it, and what is left out is counted with the reason."""

import glob
import os
import random

import fsspec
import pytest

from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import Listing, find_files
from pretrax.data.corpus.storage import canonical_url, locate
from pretrax.errors import UserError


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """shelf/: 5 documents, links to 3 more outside of it, to its own files and folders, and to what contains it."""
    monkeypatch.chdir(tmp_path)
    for name in ('shelf/b.txt', 'shelf/c/d.txt', 'shelf/c/e.jsonl', 'shelf/z/f.txt', 'shelf/z/g/h.txt',
                 'far/i.txt', 'far/deep/j.jsonl', 'k.txt', 'unwanted/l.txt'):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n')
    links = {'a': '../far', 'c/up': '..', 'c/top': '../..', 'aa': 'z', 'z/g/cross': '../../c', 'far': '../far',
             'k.txt': '../k.txt', 'a.txt': 'b.txt', 'gone.txt': 'nowhere', 'lost': 'nowhere',
             'self': 'self'}  # fmt: skip
    for name, target in links.items():
        (tmp_path / 'shelf' / name).symlink_to(target)
    (tmp_path / 'far/back').symlink_to('../shelf')
    os.link('shelf/z/f.txt', 'shelf/z/hard.txt')
    os.mkfifo('shelf/pipe.txt')
    (tmp_path / 'shelf/.hidden.txt').touch()
    (tmp_path / 'shelf/page.html').touch()
    return tmp_path


EXPECTED = ['a/deep/j.jsonl', 'a/i.txt', 'b.txt', 'c/d.txt', 'c/e.jsonl', 'k.txt', 'z/f.txt', 'z/g/h.txt']


def names(*specs: str) -> list[str]:
    return [os.path.relpath(file.path, 'shelf') for file in find_files(*specs)]


def test_a_directory_follows_links_and_reads_every_file_once(shelf):
    assert names('shelf') == EXPECTED
    listing = Listing()
    counts = listing.add('shelf')[1]
    assert counts.read == len(EXPECTED)
    assert counts.left_out == {
        'the same file again': 2, 'the same folder again': 3, 'loop': 3, 'broken link': 3, 'hidden': 1,
        'with another suffix': 1, 'neither a file nor a folder': 1,
    }  # fmt: skip
    lines = counts.lines('text: shelf')
    assert lines[0].startswith('text: shelf: 22 found = 8 files + 3 broken link + 1 hidden + 3 loop + ')
    assert '1 with another suffix (.html)' in lines[0]
    assert 'text: shelf: left out: shelf/c/up: it leads to .., which contains it' in lines
    assert 'text: shelf: left out: shelf/lost: broken link to nowhere' in lines
    assert len(lines) == 11


@pytest.mark.parametrize('pattern', ['**', '**/*.jsonl', './**/*/*', '{}/**/[a-k]*', '*/up/*/*', '**/up/*'])
def test_a_glob_reads_every_file_once_and_ends(tmp_path, monkeypatch, pattern):
    """Against the files that `glob` matches, which follows a loop 40 times."""
    monkeypatch.chdir(tmp_path)
    for name in ('in/a.jsonl', 'in/b/c.jsonl', 'in/b/.d/e.jsonl', 'f.jsonl', 'in/g.txt'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / 'in/up').symlink_to('..')
    spec = pattern.format(tmp_path)
    matched = [path for path in glob.glob(spec, recursive=True) if os.path.isfile(path)]
    found = [os.path.realpath(file.path) for file in find_files(spec)]
    assert sorted(found) == sorted({os.path.realpath(path) for path in matched})
    assert len(found) < len(matched) or '**' not in pattern
    assert len(find_files('in/**')) == 3, 'not what is beside the folder'


def test_folders_that_link_to_one_another_end(tmp_path):
    """Paths without a repeated folder are 14! here."""
    for one in range(14):
        (tmp_path / f'{one}').mkdir()
        (tmp_path / f'{one}' / 'a.txt').write_text(str(one))
        for other in range(14):
            (tmp_path / f'{one}' / f'to{other}').symlink_to(f'../{other}')
    assert len(find_files(str(tmp_path))) == len(find_files(str(tmp_path / '**' / '*.txt'))) == 14
    assert len(find_files(str(tmp_path / '*' / 'to*' / '..' / '*' / 'a.txt'))) == 14
    assert len(find_files(str(tmp_path / '*' / 'to1' / 'to2' / '*.txt'))) == 1


def test_names_of_one_file_in_several_specifications_are_one_file(shelf):
    specs = ['shelf/b.txt', './shelf/b.txt', 'shelf/c/../b.txt', 'shelf/a.txt', 'file://shelf/b.txt', 'shelf/*.txt',
             f'{shelf}/shelf/b.txt', f'file://localhost{shelf}/shelf/b.txt',
             f'local://{shelf}/shelf/b.txt']  # fmt: skip
    assert names(*specs) == ['b.txt', 'k.txt']
    assert names('shelf/z/hard.txt', 'shelf/z') == ['z/hard.txt', 'z/g/cross/d.txt', 'z/g/cross/e.jsonl', 'z/g/h.txt']
    counts = Listing().add('shelf/*.txt')[1]
    assert 'shelf/a.txt: the same file as shelf/b.txt' in counts.examples


def test_a_folder_that_cannot_be_read_is_named(shelf, monkeypatch):
    def scandir(path, real=os.scandir):  # tests may run as root, who may read everything
        if str(path).endswith('/g'):
            raise PermissionError(13, 'Permission denied')
        return real(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    for spec in ('shelf/z', 'shelf/z/**'):
        counts = Listing().add(spec)[1]
        assert counts.left_out['unreadable'] == 1
        assert 'shelf/z/g: Permission denied' in counts.examples


def test_the_order_of_a_tree_without_links_is_that_of_sorted_paths(tmp_path):
    """So tokens that were prepared before links were followed stay valid."""
    rng = random.Random(0)
    for _ in range(150):
        parts = [rng.choice(['a', 'a.b', 'b', 'B', '.h', 'c d', 'a-b', 'é']) for _ in range(rng.randrange(1, 5))]
        path = tmp_path.joinpath(*parts[:-1], parts[-1] + rng.choice(['.txt', '.jsonl', '.md.gz', '.pdf', '']))
        if not any(parent.is_file() for parent in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(path))
    walked = sorted(
        (path for path in tmp_path.rglob('*') if path.is_file() and path.name.endswith(('.txt', '.jsonl', '.md.gz'))
         and not any(part.startswith('.') for part in path.relative_to(tmp_path).parts)),
        key=lambda path: path.relative_to(tmp_path).parts,
    )  # fmt: skip
    assert [file.path for file in find_files(str(tmp_path))] == walked
    for pattern in (
        '*',
        '*/*.txt',
        '**',
        '**/a*/**/*.*',
        '**/.h/*',
        '.h/**',
        '*/*/*',
        'a.b/**/*.md.gz',
        '[ab]/**/*.txt',
    ):
        spec = str(tmp_path / pattern)
        expected = sorted({path for path in map(type(tmp_path), glob.glob(spec, recursive=True)) if path.is_file()})
        assert expected, pattern
        assert [file.path for file in find_files(spec)] == expected, pattern


def test_a_link_changes_no_fingerprint_of_what_was_read_before(tmp_path):
    for name in ('data/v1/a.txt', 'data/x.txt'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = Corpus(find_files(str(tmp_path / 'data'))).fingerprint()
    (tmp_path / 'data/current').symlink_to('v1')  # sorts before it
    (tmp_path / 'data/z.txt').symlink_to('x.txt')
    assert Corpus(find_files(str(tmp_path / 'data'))).fingerprint() == before


def test_nothing_but_links_that_lead_nowhere_is_an_error_that_names_them(tmp_path):
    (tmp_path / 'a.txt').symlink_to('unmounted')
    with pytest.raises(UserError, match=r'no \.txt.*\n.*\n  left out: .*a\.txt: broken link to unmounted'):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ('one', 'other', 'same'),
    [
        ('memory://far/a.txt', 'memory:///far/a.txt', True),
        ('http://Host:80/x/../a%7Eb.txt#part', 'http://host/a~b.txt', True),
        ('https://host:443/a.txt?v=1', 'https://host/a.txt?v=1', True),
        ('https://host/a.txt?v=1', 'https://host/a.txt?v=2', False),
        ('http://host:8080/a.txt', 'http://host/a.txt', False),
    ],
)
def test_spellings_of_a_url_are_one_object(one, other, same):
    first, second = map(locate, (one, other))
    assert (canonical_url(first) == canonical_url(second)) == same


def test_objects_are_listed_once(tmp_path):
    filesystem = fsspec.filesystem('memory')
    filesystem.pipe({'/once/a.txt': b'a', '/once/b.pdf': b'b', '/once/.c.txt': b'c'})
    try:
        listing = Listing()
        for spec in ('memory://once/a.txt', 'memory:///once/a*.txt', 'memory://once'):
            listing.add(spec)
    finally:
        filesystem.rm('/once', recursive=True)
    assert [str(file.path) for file in listing.files] == ['memory://once/a.txt']
    assert listing.counts.left_out == {'the same file again': 2, 'hidden': 1, 'with another suffix': 1}
