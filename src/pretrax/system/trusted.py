"""Files of other people: which of them pretrax may run, and which parts of a directory it may copy."""

import grp
import os
import pathlib
import pwd
import shutil
import stat

from pretrax.errors import UserError


def why_untrusted(path: pathlib.Path) -> str:
    """Why another user may have written, or may replace, a file or directory that pretrax runs; '' if none can.

    It, the directory that has it and the directory of a link to it have to belong to the user or to root, and nobody
    else may write to them. In a directory such as /tmp, others cannot replace it. Raises OSError.
    """
    real = pathlib.Path(os.path.realpath(path))
    for one in dict.fromkeys((real, real.parent, path.absolute().parent)):
        status = one.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f'{one} belongs to another user (number {status.st_uid})'
        others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid))
        if others and not (one != real and status.st_mode & stat.S_ISVTX):
            return f'others may write to {one} (chmod go-w)'
    return ''


def copy_file(name: str, source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file of a directory to another one. The copy is readable to nobody who cannot read the original.

    Args:
        name: path of the file in both directories.
        source: a directory that another user may have written, such as a downloaded checkpoint.

    Raises:
        UserError: the file is a link to a file outside of the source, such as a secret. The cache of a hub has links to
            its blobs.
    """
    root = pathlib.Path(os.path.realpath(source))
    root = root.parent.parent if root.parent.name == 'snapshots' and (root.parent.parent / 'blobs').is_dir() else root
    original, copy = pathlib.Path(os.path.realpath(source / name)), target / name
    if not original.is_relative_to(root):
        raise UserError(
            f'{source / name} is a link to {original}, outside of its directory, and would be copied into files that '
            'others get\n'
            'if you want that, put a copy of the file in the place of the link'
        )
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.unlink(missing_ok=True)
    shutil.copyfile(original, copy)
    copy.chmod(stat.S_IMODE(copy.stat().st_mode) & (original.stat().st_mode | stat.S_IRUSR | stat.S_IWUSR))


def _is_private(group: int) -> bool:
    """Whether a group has no members but the user, as many systems make one for each user, or root."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return group == 0
    return group == 0 or (found.gr_name == user and set(found.gr_mem) <= {user})
