"""The parts of a prepared teacher: each appears whole or not at all, and has the digests of its files.

A part is a directory, part-00000 and so on, with arrays and

    manifest.json   {"files": {"ids.npy": {"size": bytes, "xxh3": digest}, ...}}

In a bucket the manifest is uploaded last, and what has none is no part. Parts of a bucket are copied to a directory of this
machine, from which they are read.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pretrax.errors import Report
from pretrax.machine.atomic import new_directory
from pretrax.machine.digest import digest
from pretrax.machine.json_file import parse_json
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.staging import download, upload

MANIFEST = 'manifest.json'


def part_name(number: int) -> str:
    """The name of the part with this number."""
    return f'part-{number:05}'


def part_numbers(directory: Path) -> list[int]:
    """The numbers of the parts of a directory, in order."""
    return sorted(int(path.name[5:]) for path in directory.glob('part-*') if path.name[5:].isdigit())


def write_part(place: AnyPath, directory: Path, number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a part into the directory, and uploads it if the place is a bucket. Raises OSError."""
    name, files = part_name(number), {}
    with new_directory(directory / name, sync=True) as partial:
        for array_name, array in arrays.items():
            path = partial / f'{array_name}.npy'
            np.save(path, array, allow_pickle=False)
            files[path.name] = _found(path)
        (partial / MANIFEST).write_text(json.dumps({'files': files}, indent=1))
    if isinstance(place, BucketPath):
        upload(directory / name, place / name)


def problem_of(path: Path) -> str:
    """How the files of a part differ from what was written; '' if they do not. Reads all of them. Raises OSError if it cannot."""
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
        directory: of this machine.
        afresh: copies every part, so that damage in the bucket is found; otherwise parts with the same manifest stay.

    Raises:
        OSError: the bucket cannot be read, or the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    there = {file.partition('/')[0] for file in place.files() if file.endswith(f'/{MANIFEST}')}
    for name in {part_name(number) for number in part_numbers(directory)} - there:
        shutil.rmtree(directory / name)
    for name in sorted(there):
        here, manifest = directory / name / MANIFEST, (place / name / MANIFEST).read_bytes()
        if not afresh and here.is_file() and here.read_bytes() == manifest and not problem_of(here.parent):
            continue
        shutil.rmtree(here.parent, ignore_errors=True)
        with new_directory(here.parent) as partial:
            download(place / name, partial)


def repair_parts(place: AnyPath, directory: Path, report: Report) -> None:
    """Removes damaged parts, whose rows can be computed again, and numbers the others without a gap. Raises OSError."""
    kept = 0
    for number in part_numbers(directory):
        path = directory / part_name(number)
        if said := problem_of(path):
            report(f'WARNING: {place / path.name} is damaged: {said}. It is removed, and its rows are computed again')
            _remove(place, path)
            continue
        if number != kept:
            path.rename(directory / part_name(kept))
            if isinstance(place, BucketPath):
                upload(directory / part_name(kept), place / part_name(kept))
                (place / path.name).remove_tree()
        kept += 1


def _remove(place: AnyPath, path: Path) -> None:
    if isinstance(place, BucketPath):
        (place / path.name / MANIFEST).unlink(missing_ok=True)  # first, so that half a part is none
        (place / path.name).remove_tree()
    shutil.rmtree(path)


def _found(path: Path) -> dict[str, int | str]:
    with path.open('rb', buffering=0) as file:
        size, xxh3 = digest(file)
    return {'size': size, 'xxh3': xxh3}
