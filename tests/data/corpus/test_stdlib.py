import pytest

from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.stdlib import SKIPPED_DIRECTORIES, SKIPPED_FILES, stdlib_files, stdlib_rule
from pretrax.errors import UserError


def test_the_corpus_is_the_standard_library_without_tests_and_tables():
    files = stdlib_files()
    names = {file.path.name for file in files}
    assert {'argparse.py', 'dataclasses.py', 'pathlib.py'} <= names
    assert not {'entities.py', 'topics.py', 'test_support.py', 'cp1252.py'} & names
    assert not any('site-packages' in file.path.parts or 'test' in file.path.parts for file in files)
    assert sum(len(document.text) for document in Corpus(files).documents()) > 5e6


def test_files_and_fingerprint_are_reproducible():
    assert stdlib_files() == stdlib_files()
    assert Corpus(stdlib_files()).fingerprint() == Corpus(stdlib_files()).fingerprint()


def test_the_rule_lists_everything_that_is_skipped(tmp_path):
    for name in (*SKIPPED_DIRECTORIES, 'json'):
        directory = tmp_path / name.replace('*', 'x')
        directory.mkdir()
        (directory / 'a.py').write_text('a = 1\n')
    for name in (*SKIPPED_FILES, 'b.py', 'b.txt'):
        (tmp_path / name.replace('*', 'x')).write_text('b = 1\n')
    assert [str(file.path.relative_to(tmp_path)) for file in stdlib_files(tmp_path)] == ['b.py', 'json/a.py']
    assert all(pattern in stdlib_rule() for pattern in (*SKIPPED_DIRECTORIES, *SKIPPED_FILES))


def test_a_declared_encoding_is_used(tmp_path):
    (tmp_path / 'latin.py').write_bytes('# -*- coding: latin-1 -*-\nname = "é"\n'.encode('latin-1'))
    (tmp_path / 'marked.py').write_bytes(b'\xef\xbb\xbfname = "\xc3\xa9"\r\n')
    assert [document.text for document in Corpus(stdlib_files(tmp_path)).documents()] == [
        '# -*- coding: latin-1 -*-\nname = "é"\n',
        'name = "é"\n',
    ]


def test_a_python_without_source_files_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r'data\.text=path'):
        stdlib_files(tmp_path)
