"""The parts of a prepared teacher: each appears whole or not at all, and has the digests of its files.

A part is a directory, part-00000 and so on, with arrays and

    manifest.json   {"files": {"ids.npy": {"size": bytes, "xxh3": digest}, ...}}

In a bucket, a part has a name that no other one ever has, and the index names the parts (storage/index.py). They are
copied to a directory of this machine, from which they are read.
"""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pretrax.errors import Report
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.index import Entries, Index, read_entries
from pretrax.storage.staging import download, files_below
from pretrax.system.atomic import new_directory
from pretrax.system.digest import digest
from pretrax.system.json_file import parse_json

MANIFEST = 'manifest.json'


def part_name(number: int) -> str:
    """The name of the part with this number."""
    return f'part-{number:05}'


def part_numbers(directory: Path) -> list[int]:
    """The numbers of the parts of a directory, in order."""
    return sorted(int(path.name[5:]) for path in directory.glob('part-*') if path.name[5:].isdigit())


class PartsInBucket:
    """The parts in a bucket, for the process that may write them.

    Takes over what there is, and removes what earlier processes have left unfinished.

    Args:
        confirm: raises an exception if this process may no longer write the directory.

    Raises:
        OSError: the bucket cannot be written.
    """

    def __init__(self, place: BucketPath, confirm: Callable[[], None]):
        self._index = Index(place, confirm, _without_index)
        self._index.claim()
        self._remove_unlisted()

    def add(self, part: Path) -> None:
        """Uploads a part. Raises OSError, or what `confirm` raises."""
        place = self._index.place / f'{part.name}-{secrets.token_hex(6)}'
        for name in files_below(part):
            (place / name).write_bytes((part / name).read_bytes())
        self._index.change({part.name: place.name})

    def keep(self, names: Sequence[str]) -> None:
        """Removes all parts but these, which get the first numbers. Raises as `add` does."""
        before = self._index.entries
        numbered = {part_name(number): before[name] for number, name in enumerate(names)}
        self._index.change({name: numbered.get(name) for name in before})
        self._remove_unlisted()

    def _remove_unlisted(self) -> None:
        self._index.remove_unlisted(keep=[path for path in self._index.place.files() if not path.startswith('part-')])


def write_part(directory: Path, number: int, arrays: Mapping[str, np.ndarray]) -> Path:
    """Writes a part into the directory, and returns its path. Raises OSError."""
    files = {}
    with new_directory(directory / part_name(number), sync=True) as partial:
        for array_name, array in arrays.items():
            path = partial / f'{array_name}.npy'
            np.save(path, array, allow_pickle=False)
            files[path.name] = _found(path)
        (partial / MANIFEST).write_text(json.dumps({'files': files}, indent=1))
    return directory / part_name(number)


def problem_of(path: Path) -> str:
    """How the files of a part differ from what was written; '' if they do not. Reads all. Raises OSError."""
    try:
        expected = parse_json((path / MANIFEST).read_bytes())['files']
        for name, of_file in expected.items():
            if (found := _found(path / name)) != of_file:
                what = (
                    f'{found["size"]:,} of {of_file["size"]:,} bytes'
                    if found['size'] != of_file['size']
                    else 'another digest'
                )
                return f'{name} has {what}'
    except FileNotFoundError as error:
        return f'{Path(error.filename).name} is missing'
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f'{MANIFEST} is not readable: {" ".join(str(error).split())[:100]}'
    return ''


def fetch_parts(place: BucketPath, directory: Path, afresh: bool) -> None:
    """Makes the parts of a directory those of a bucket.

    Args:
        place: the bucket.
        directory: directory of this machine.
        afresh: copies every part, so that damage in the bucket is found; otherwise parts with the same manifest stay.

    Raises:
        OSError: the bucket cannot be read, or the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries = read_entries(place)
    there = entries if entries is not None else _without_index(place.files(), None)
    for name in {part_name(number) for number in part_numbers(directory)} - {name for name in there if there[name]}:
        shutil.rmtree(directory / name)
    for name, prefix in sorted(there.items()):
        if prefix is None:
            continue
        here, manifest = directory / name / MANIFEST, (place / prefix / MANIFEST).read_version().content
        if not afresh and here.is_file() and here.read_bytes() == manifest and not problem_of(here.parent):
            continue
        shutil.rmtree(here.parent, ignore_errors=True)
        with new_directory(here.parent) as partial:
            download(place / prefix, partial)


def repair_parts(place: AnyPath, directory: Path, remote: PartsInBucket | None, report: Report) -> None:
    """Removes damaged parts, whose rows can be computed again, and numbers the others without a gap. Raises OSError."""
    kept: list[str] = []
    numbers = part_numbers(directory)
    for number in numbers:
        name = part_name(number)
        if said := problem_of(directory / name):
            report(f'WARNING: {place / name} is damaged: {said}. It is removed, and its rows are computed again')
        else:
            kept.append(name)
    if remote is not None and len(kept) < len(numbers):
        remote.keep(kept)
    for name in {part_name(number) for number in numbers} - set(kept):
        shutil.rmtree(directory / name)
    for number, name in enumerate(kept):
        if name != part_name(number):
            (directory / name).rename(directory / part_name(number))


def _without_index(files: list[str], entries: Entries | None) -> Entries:
    """The parts that an earlier version has written: it uploaded their manifests last."""
    whole = (
        {}
        if entries is not None
        else {file.partition('/')[0] for file in files if re.fullmatch(rf'part-\d+/{MANIFEST}', file)}
    )
    return {name: name for name in whole}


def _found(path: Path) -> dict[str, int | str]:
    with path.open('rb', buffering=0) as file:
        size, xxh3 = digest(file)
    return {'size': size, 'xxh3': xxh3}
