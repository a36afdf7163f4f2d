"""The mean of the weights of several checkpoints, or their moving average, written as a run that holds only weights.

Averaging the last checkpoints of a run smooths the noise of its last steps; averaging runs that started from the same
weights gives a model soup (Wortsman et al. 2022, arXiv:2203.05482). One weight at a time is in memory; sums are f64.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrax import __version__
from pretrax.checkpoint import (
    CheckpointArrays,
    StreamedArray,
    checkpoints_of,
    is_checkpoint,
    is_stacked,
    read_manifest,
    steps_in,
    write_streamed,
)
from pretrax.errors import UserError
from pretrax.huggingface.model import KEPT, TOKENIZER, kept_names
from pretrax.storage import AnyPath, locate
from pretrax.storage.staging import read_directory, written_directory
from pretrax.system.trusted import copy_file
from pretrax.weights.saved import SavedModel, open_saved


def write_average(paths: Sequence[str], out: str, last: int, ema: bool = False) -> None:
    """Writes the mean of the given checkpoints, or of the last `last` checkpoints of each given run.

    Args:
        last: checkpoints of each run.
        ema: use the moving average of the weights that each checkpoint has (`optimizer.ema_decay`); one is enough.

    Raises:
        UserError: fewer than two checkpoints, different models or tokenizers, no moving average, or `out` is not empty.
    """
    models = [model for path in paths for model in _models(locate(path), last)]
    if len(models) < 2 and not ema:
        raise UserError(
            'an average needs at least two checkpoints\ngive more of them, or --last N for the last N of a run'
        )
    run = locate(out)
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UserError(f'{run} exists and is not empty\ngive another --out')
    names = [str(model.directory / str(model.step)) for model in models]
    for name, model in zip(names, models, strict=True):
        if model.description.get('tokenizer') != models[0].description.get('tokenizer'):
            raise UserError(
                f'{name} and {names[0]} were trained with different tokenizers: their tokens differ in meaning'
            )
    sources = [_moving_average(model) if ema else model.pieces for model in models]
    _check_shapes(sources, names)
    with written_directory(run) as local:
        try:
            _write(local, run, sources, models[0], names)
        except BaseException:
            shutil.rmtree(local, ignore_errors=True)  # so that the next attempt finds no partial run
            raise
    what = 'the moving average of the weights of' if ema else f'the mean of {len(names)} checkpoints:'
    print(f'{run}: {what} {", ".join(names)}')
    print(f'try: pretrax generate {run}; init_from: {run} in a configuration; pretrax export {run} DIR')


def _moving_average(model: SavedModel) -> CheckpointArrays:
    directory, step = model.directory, model.step
    names = read_manifest(directory, step).arrays
    if not any(name.startswith('ema.') for name in names):
        raise UserError(
            f'{directory / str(step)} has no moving average of the weights\n'
            'train with optimizer.ema_decay=0.999, or leave out --ema'
        )
    return CheckpointArrays(directory, step, 'ema')


def _models(path: AnyPath, last: int) -> list[SavedModel]:
    if is_checkpoint(path):
        return [open_saved(path)]
    directory = checkpoints_of(path)
    steps = steps_in(directory)
    if len(steps) < last:
        raise UserError(
            f'--last {last}, but {path} has {len(steps)} checkpoints; checkpoint.keep sets how many are kept'
        )
    return [open_saved(directory / str(step)) for step in steps[-last:]]


def _check_shapes(sources: Sequence[CheckpointArrays], names: list[str]) -> None:
    first = sources[0].shapes
    for source, name in zip(sources, names, strict=True):
        for path in sorted(first.keys() | source.shapes):
            ours, theirs = first.get(path), source.shapes.get(path)
            if ours != theirs:
                raise UserError(
                    f'these are different models: {path} is {list(ours) if ours else "missing"} in {names[0]}, '
                    f'and {list(theirs) if theirs else "missing"} in {name}'
                )


def _write(local: Path, run: AnyPath, sources: Sequence[CheckpointArrays], first: SavedModel, names: list[str]) -> None:
    description = first.description
    (local / 'data').mkdir(parents=True)
    tokenizer = first.tokenizer()
    if tokenizer is not None:
        (local / 'data' / TOKENIZER).write_bytes(tokenizer)
    with read_directory(first.kept) as kept:  # files for `pretrax export`
        for name in kept_names(kept) if kept.is_dir() else ():
            copy_file(name, kept, local / KEPT)
    data = {'name': 'tokenizer'} | ({} if tokenizer is not None else {'vocab_size': description.get('vocab_size')})
    if tokenizer is not None and description['config']['data'].get('name') == 'tokenizer':  # an import
        data |= {'end_of_text': description['config']['data'].get('end_of_text')}
    config = description['config'] | {'name': run.name, 'run_dir': str(run), 'data': data}
    added = {'pretrax': __version__, 'tokens': 0, 'data': None, 'config': config, 'averaged': names}
    kept = {key: description.get(key) for key in ('jax', 'tokenizer', 'begin_of_text', 'vocab_size')}
    weights = {path: _mean(sources, path) for path in sources[0].shapes}
    write_streamed(local / 'checkpoints', 0, weights, kept | added)


def _mean(sources: Sequence[CheckpointArrays], path: str) -> StreamedArray:
    shape = sources[0].shapes[path]
    counted = int(is_stacked(path, shape))

    def pieces() -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        whole = None if counted else np.empty(shape or (1,), np.float32)
        for parts in zip(*(source.rows(path) for source in sources), strict=True):
            rows = parts[0][0]
            mean: Any = sum(values.astype(np.float64) for _, values in parts) / len(sources)
            if whole is None:
                yield from (((rows.start + i,), layer.astype(np.float32)) for i, layer in enumerate(mean))
            else:
                whole[rows] = mean
        if whole is not None:
            yield (), whole.reshape(shape)

    return StreamedArray(shape, counted, pieces)
