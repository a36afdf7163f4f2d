"""What others can write is not run, and a link out of a directory is not copied into files that others get."""

import json
import os
import shutil
import types
from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.system import trusted
from pretrax.system.trusted import copy_file, why_untrusted

GOLDEN = Path(__file__).parents[1] / 'goldens' / 'llama2'


@pytest.fixture
def file(tmp_path):
    """A file to which only its owner can write, in such a directory."""
    place = tmp_path / 'own'
    place.mkdir(mode=0o755)
    path = place / 'step'
    path.write_bytes(b'program')
    path.chmod(0o644)
    return path


@pytest.mark.parametrize('mode', [0o600, 0o644, 0o755, 0o444])
def test_what_only_the_user_can_write_is_trusted(file, mode):
    file.chmod(mode)
    assert why_untrusted(file) == ''


@pytest.mark.parametrize('mode', [0o646, 0o666, 0o602])
def test_a_file_that_others_can_write_is_not(file, mode):
    file.chmod(mode)
    assert why_untrusted(file) == f'others may write to {file} (chmod go-w)'


@pytest.mark.parametrize(('mode', 'is_trusted'), [(0o757, False), (0o777, False), (0o1777, True), (0o700, True)])
def test_a_file_that_others_can_replace_is_not(file, mode, is_trusted):
    """But for directories such as /tmp, in which only the owner of a file can replace it."""
    file.parent.chmod(mode)
    assert (why_untrusted(file) == '') == is_trusted
    assert is_trusted or str(file.parent) in why_untrusted(file)


def test_a_directory_to_which_others_can_add_files_is_not(file):
    file.parent.chmod(0o1777)
    assert 'others may write' in why_untrusted(file.parent)


def test_a_link_is_what_it_leads_to_and_who_may_replace_it(file, tmp_path):
    shared = tmp_path / 'shared'
    shared.mkdir()
    link = shared / 'link'
    link.symlink_to(file)
    assert why_untrusted(link) == ''
    shared.chmod(0o777)
    assert str(shared) in why_untrusted(link)
    shared.chmod(0o755)
    file.chmod(0o666)
    assert str(file) in why_untrusted(link)


@pytest.mark.parametrize(
    ('name', 'members', 'is_trusted'),
    [('me', [], True), ('me', ['me'], True), ('me', ['eve'], False), ('staff', [], False)],
)
def test_a_group_may_write_only_if_it_is_the_users_own(name, members, is_trusted, file, monkeypatch):
    file.chmod(0o664)
    monkeypatch.setattr(trusted.pwd, 'getpwuid', lambda number: types.SimpleNamespace(pw_name='me'))
    monkeypatch.setattr(trusted.grp, 'getgrgid', lambda number: types.SimpleNamespace(gr_name=name, gr_mem=members))
    if os.getuid() == 0:
        os.chown(file, 0, 1000)  # the group of root is root's
    assert (why_untrusted(file) == '') == is_trusted


def test_another_owner_is_named(file, monkeypatch):
    if os.getuid() != 0:
        monkeypatch.setattr(trusted.os, 'getuid', lambda: 815)
        assert f'{file} belongs to another user' in why_untrusted(file)
        return
    os.chown(file, 815, 0)
    assert why_untrusted(file) == f'{file} belongs to another user (number 815)'
    os.chown(file, 0, 0)
    os.chown(file.parent, 815, 0)
    assert why_untrusted(file) == f'{file.parent} belongs to another user (number 815)'


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / 'secret'
    path.write_text('hunter2')
    path.chmod(0o600)
    return path


@pytest.fixture
def source(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / 'source')
    return tmp_path / 'source'


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code or 0


@pytest.mark.parametrize(
    'name',
    ['tokenizer.model', 'merges.txt', 'chat_template.jinja', 'additional_chat_templates/a.jinja', 'added_tokens.json'],
)
@pytest.mark.parametrize('absolute', [True, False])
def test_an_import_copies_no_file_that_a_link_names_outside_of_the_checkpoint(name, absolute, source, secret, capsys):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).symlink_to(secret if absolute else os.path.relpath(secret, (source / name).parent))
    assert run('import', source, '--out', source.parent / 'run') == 2
    assert f'{source / name} is a link to {secret}, outside of its directory' in capsys.readouterr().err
    assert not (source.parent / 'run').exists()


def test_a_linked_directory_is_outside_too(source, secret, capsys):
    elsewhere = source.parent / 'elsewhere'
    elsewhere.mkdir()
    secret.rename(elsewhere / 'a.jinja')
    (source / 'additional_chat_templates').symlink_to(elsewhere, target_is_directory=True)
    assert run('import', source, '--out', source.parent / 'run') == 2
    assert 'outside of its directory' in capsys.readouterr().err


def test_an_export_and_an_average_of_a_run_copy_no_link_out_of_it(source, secret, tmp_path, capsys):
    """The run may be somebody else's."""
    assert run('import', source, '--out', tmp_path / 'run') == 0
    shutil.copytree(tmp_path / 'run', tmp_path / 'other')
    for place in ('run', 'other'):
        (tmp_path / place / 'huggingface' / 'tokenizer.model').symlink_to(secret)
    assert run('export', tmp_path / 'run', tmp_path / 'out') == 2
    assert 'outside of its directory' in capsys.readouterr().err
    assert run('checkpoint', 'average', tmp_path / 'run', tmp_path / 'other', '--out', tmp_path / 'mean') == 2
    assert 'outside of its directory' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
    assert not (tmp_path / 'mean').exists()


def test_links_inside_of_a_checkpoint_and_those_of_the_cache_of_a_hub_are_followed(tmp_path):
    """models--x--y/snapshots/REVISION/tokenizer.model -> ../../blobs/DIGEST, as huggingface_hub writes it."""
    snapshot, blobs = tmp_path / 'models--x--y' / 'snapshots' / 'abc', tmp_path / 'models--x--y' / 'blobs'
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / '123').write_text('a model')
    (snapshot / 'tokenizer.model').symlink_to('../../blobs/123')
    (snapshot / 'again').symlink_to('tokenizer.model')
    for name in ('tokenizer.model', 'again'):
        copy_file(name, snapshot, tmp_path / 'copy')
        assert (tmp_path / 'copy' / name).read_text() == 'a model'
        assert not (tmp_path / 'copy' / name).is_symlink()
    (snapshot / 'tokenizer.model').unlink()
    (snapshot / 'tokenizer.model').symlink_to(tmp_path)
    with pytest.raises(UserError, match='outside of its directory'):
        copy_file('tokenizer.model', snapshot, tmp_path / 'copy')


def test_a_copy_is_readable_to_nobody_who_cannot_read_the_original(tmp_path):
    (tmp_path / 'here').mkdir()
    umask = os.umask(0o022)
    try:
        for mode, copied in ((0o600, 0o600), (0o640, 0o640), (0o666, 0o644), (0o444, 0o644), (0o755, 0o644)):
            (tmp_path / 'here' / 'x.json').write_text(json.dumps(mode))
            (tmp_path / 'here' / 'x.json').chmod(mode)
            copy_file('x.json', tmp_path / 'here', tmp_path / 'there')
            assert (tmp_path / 'there' / 'x.json').stat().st_mode & 0o777 == copied
            (tmp_path / 'here' / 'x.json').chmod(0o600)
    finally:
        os.umask(umask)


def test_a_copy_replaces_a_link_and_does_not_write_through_it(tmp_path, secret):
    (tmp_path / 'here').mkdir()
    (tmp_path / 'there').mkdir()
    (tmp_path / 'here' / 'x').write_text('new')
    (tmp_path / 'there' / 'x').symlink_to(secret)
    copy_file('x', tmp_path / 'here', tmp_path / 'there')
    assert secret.read_text() == 'hunter2'
    assert (tmp_path / 'there' / 'x').read_text() == 'new'
