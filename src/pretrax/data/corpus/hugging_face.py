"""Hugging Face datasets, read with the library `datasets`: from the hub, from a directory with the layout of the hub,
or from a directory that `save_to_disk` wrote.

A dataset is downloaded (the library caches Arrow files, and rows have random access) or streamed (nothing is stored,
and each worker reads some of the files). Both give the same rows in the same order.
"""

import functools
import hashlib
import itertools
import json
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pretrax.data.corpus.listing import Listing
from pretrax.data.corpus.parts import Part, Row
from pretrax.data.corpus.storage import storage_errors
from pretrax.data.options import PREFIX, HuggingFaceOptions
from pretrax.errors import UserError
from pretrax.storage import locate_local
from pretrax.system.software import need_extra

_SAVED = ('dataset_dict.json', 'state.json')  # files of save_to_disk
_UNKNOWN_SIZE = 1 << 26  # bytes assumed for a file of unknown size


@dataclass(frozen=True)
class HuggingFaceDataset:
    """A split of a dataset, in the version in which it was found."""

    name: str
    options: HuggingFaceOptions
    version: str
    size: int
    n_units: int  # rows, or files if streaming

    kind: Literal['hugging face'] = 'hugging face'

    def __str__(self) -> str:
        return f'{PREFIX}{self.name}'

    @property
    def description(self) -> str:
        """The split and its size, and that the library leaves linked folders out, for messages."""
        folders = ((Path(at) / name for name in names) for at, names, _ in os.walk(self.name))
        linked = next((folder for folder in itertools.chain.from_iterable(folders) if folder.is_symlink()), None)
        left_out = (
            '' if linked is None else f'; the library datasets does not follow links to folders, such as {linked}'
        )
        if self.options.streaming:
            return f'split {self.options.split}, streaming, {self.n_units:,} files{left_out}'
        return f'split {self.options.split}, {self.n_units:,} rows, {self.size / 1e6:,.1f} MB{left_out}'

    @property
    def identity(self) -> str:
        """Identifies the rows."""
        return f'{self.name} {self.options.configuration} {self.options.split} {self.version}'

    def files(self, fields: tuple[str, ...]) -> list['DatasetRows']:
        """Its files, one part each; for a streamed dataset."""
        return [DatasetRows(self, fields, unit, unit + 1) for unit in range(self.n_units)]

    def cut(self, positions: Sequence[int], fields: tuple[str, ...]) -> list['DatasetRows | None']:
        """Parts, cut near these byte positions as if all rows had one size; None for an empty part."""
        whole = DatasetRows(self, fields, 0, self.n_units)
        bounds = [0, *(max(1, at * self.n_units // self.size) for at in positions), self.n_units]
        parts = [replace(whole, start=start, stop=stop) for start, stop in itertools.pairwise(bounds)]
        return [part if not number or part.start < part.stop else None for number, part in enumerate(parts)]


@dataclass(frozen=True)
class DatasetRows(Part):
    """The rows start to stop - 1 of a dataset, or the files start to stop - 1 if streaming.

    The origin of a row is its number from 1; if streaming, the number of the file and of the row in it.
    """

    dataset: HuggingFaceDataset
    fields: tuple[str, ...]
    start: int
    stop: int

    def rows(self, start: int = 0) -> Iterator[Row]:
        with storage_errors(self.dataset):
            if self.dataset.options.streaming:
                yield from itertools.islice(self._streamed(), start, None)
            else:
                found = self._opened().select(range(min(self.start + start, self.stop), self.stop))
                for number, record in enumerate(found, self.start + start + 1):
                    yield Row(f'{self.dataset}:{number}', record)

    def count(self) -> int:
        return sum(1 for _ in self.rows()) if self.dataset.options.streaming else self.stop - self.start

    def _streamed(self) -> Iterator[Row]:
        found = self._opened()
        for file in range(self.start, self.stop):
            for number, record in enumerate(found.shard(self.dataset.n_units, file), 1):
                yield Row(f'{self.dataset}[{file}]:{number}', record)

    def _opened(self) -> Any:
        found = _reopened(self.dataset)
        columns = [name.partition('.')[0] if name not in (found.features or ()) else name for name in self.fields]
        # Unused columns, which may be images, are not decoded. All are read for the error about a missing field.
        return found.select_columns(columns) if found.features and set(columns) <= set(found.features) else found


def find_dataset(spec: str, options: HuggingFaceOptions) -> HuggingFaceDataset:
    """The dataset that 'hf:NAME_OR_DIRECTORY' names. Raises UserError if it cannot be loaded."""
    name = spec.removeprefix(PREFIX)
    path = locate_local(name)
    if path.is_dir():
        name = str(path.resolve())
        if options.revision is not None:
            raise UserError(
                f'data.hugging_face.revision: {spec} is a directory and has no revisions\n'
                '  remove data.hugging_face.revision'
            )
    found, version = _load(name, options)
    if options.streaming:
        size = found.info.dataset_size or found.num_shards * _UNKNOWN_SIZE
        return HuggingFaceDataset(name, options, version, size, found.num_shards)
    return HuggingFaceDataset(name, options, version, max(1, found.info.dataset_size or found.data.nbytes), len(found))


@functools.lru_cache(maxsize=8)
def _reopened(dataset: HuggingFaceDataset) -> Any:
    found, version = _load(dataset.name, dataset.options)
    if version != dataset.version:
        raise UserError(f'{dataset}: the dataset has changed since this run started\n  start again')
    return found


def _load(name: str, options: HuggingFaceOptions) -> tuple[Any, str]:
    """The dataset, and an identifier of its version: its files with their times, or the commit."""
    need_extra('datasets', f'{PREFIX}{name}', 'datasets')
    import datasets as library

    datasets: Any = library  # its stubs need a literal `streaming`
    if saved := [path for path in (Path(name) / file for file in _SAVED) if path.is_file()]:
        return _load_saved(datasets, saved[0], options)
    if not Path(name).is_dir():
        _check_hub(datasets, name)
    with storage_errors(f'{PREFIX}{name}'):
        which: dict[str, Any] = {'name': options.configuration, 'revision': options.revision}
        builder = datasets.load_dataset_builder(name, **which)
        if Path(name).is_dir() and (files := _each_once(builder.config.data_files or {})):
            which['data_files'] = files
            builder = datasets.load_dataset_builder(name, **which)
        version = f'{builder.config.name} {builder.hash}'
        return datasets.load_dataset(name, **which, split=options.split, streaming=options.streaming), version


def _check_hub(datasets: Any, name: str) -> None:
    """Raises UserError if the Hub has no address here and the dataset no copy; `datasets` would retry for 25 s."""
    host = urllib.parse.urlsplit(datasets.config.HF_ENDPOINT).hostname
    copy = Path(datasets.config.HF_DATASETS_CACHE) / name.replace('/', '___')
    try:
        if not urllib.request.getproxies() and not copy.is_dir():
            socket.getaddrinfo(host, 443)
    except OSError:
        raise UserError(
            f'{PREFIX}{name}: this machine has no network to {host}, and no copy of the dataset\n'
            f'  copy the dataset to a directory, and write {PREFIX}DIRECTORY'
        ) from None


def _each_once(data_files: Mapping[Any, Sequence[str]]) -> dict[str, list[str]]:
    """The files of each split of a directory without those that are another name of an earlier one; {} if none is."""
    found = {str(split): Listing().add_files(map(Path, files)) for split, files in data_files.items()}
    if all(len(found[str(split)]) == len(files) for split, files in data_files.items()):
        return {}
    return {split: [str(file.path) for file in files] for split, files in found.items()}


def _load_saved(datasets: Any, file: Path, options: HuggingFaceOptions) -> tuple[Any, str]:
    """Loads a directory that `save_to_disk` wrote: one dataset, which becomes the split `train`, or several."""
    directory = file.parent
    if options.configuration is not None:
        raise UserError(
            f'data.hugging_face.configuration: {PREFIX}{directory} was written by save_to_disk and has none\n'
            '  remove data.hugging_face.configuration'
        )
    with storage_errors(f'{PREFIX}{directory}'):
        found = datasets.load_from_disk(str(directory))
        splits = dict(found) if file.name == _SAVED[0] else {str(found.split or 'train'): found}
        [part] = datasets.ReadInstruction.from_spec(options.split).to_absolute(
            {name: len(split) for name, split in splits.items()}
        )
        split = splits[part.splitname]
        times = [(Path(each['filename']).name, Path(each['filename']).stat().st_mtime_ns) for each in split.cache_files]
        version = f'saved {split._fingerprint} {hashlib.sha256(json.dumps(times).encode()).hexdigest()[:16]}'
        rows = split if part.from_ == 0 and part.to == len(split) else split.select(range(part.from_, part.to))
        if options.streaming:
            rows = rows.to_iterable_dataset(num_shards=max(1, min(len(times), len(rows))))
        return rows, version
