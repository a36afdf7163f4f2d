"""`pretrax checkpoint average RUN_OR_CHECKPOINT... --out RUN`: the mean of weights, as a run that holds weights alone.

Of the last checkpoints of a run it smooths the noise of the last steps; of runs that began with the same weights it is a
model soup (Wortsman et al. 2022, arXiv:2203.05482). Memory holds one weight; sums are f64.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrax import __version__
from pretrax.checkpoint import (
    CheckpointWeights,
    StreamedArray,
    checkpoints_of,
    find_checkpoint,
    is_checkpoint,
    is_stacked,
    read_description,
    steps_in,
    write_streamed,
)
from pretrax.cli.import_ import KEPT, TOKENIZER, nested
from pretrax.errors import UserError
from pretrax.run.trained import tokenizer_of


def average(paths: list[str], out: str, last: int) -> None:
    """Writes the mean of some checkpoints, `last` of each run that is named, and says of what."""
    places = [place for path in paths for place in _places(Path(path), last)]
    if len(places) < 2:
        raise UserError(
            'an average takes at least two checkpoints\ngive more of them, or --last N for the last N of a run'
        )
    run = Path(out)
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UserError(f'{run} exists and is not empty\ngive another --out')
    descriptions = [read_description(*place) for place in places]
    names = [str(directory / str(step)) for directory, step in places]
    for name, description in zip(names, descriptions, strict=True):
        if description.get('tokenizer') != descriptions[0].get('tokenizer'):
            raise UserError(
                f'{name} was trained with another tokenizer than {names[0]}: their tokens do not mean the same'
            )
    sources = [CheckpointWeights(*place) for place in places]
    _check_shapes(sources, names)
    try:
        _write(run, sources, places[0][0].parent, descriptions[0], names)
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)  # half a run would be in the way of the next attempt
        raise
    print(f'{run}: the mean of {len(names)} checkpoints: {", ".join(names)}')
    print(f'try: pretrax generate {run}; init_from: {run} in a configuration; pretrax export {run} DIR')


def _places(path: Path, last: int) -> list[tuple[Path, int]]:
    directory, step = find_checkpoint(path)
    if is_checkpoint(path):
        return [(directory, step)]
    steps = steps_in(checkpoints_of(path))
    if len(steps) < last:
        raise UserError(f'--last {last}, but {path} has {len(steps)} checkpoints; checkpoint.keep says how many stay')
    return [(directory, step) for step in steps[-last:]]


def _check_shapes(sources: list[CheckpointWeights], names: list[str]) -> None:
    first = sources[0].shapes
    for source, name in zip(sources, names, strict=True):
        for path in sorted(first.keys() | source.shapes):
            ours, theirs = first.get(path), source.shapes.get(path)
            if ours != theirs:
                raise UserError(
                    f'these are not of one model: {path} is {list(ours) if ours else "missing"} in {names[0]}, '
                    f'and {list(theirs) if theirs else "missing"} in {name}'
                )


def _write(
    run: Path, sources: list[CheckpointWeights], first: Path, description: dict[str, Any], names: list[str]
) -> None:
    (run / 'data').mkdir(parents=True)
    tokenizer = tokenizer_of(first, description)
    if tokenizer is not None:
        (run / 'data' / TOKENIZER).write_bytes(tokenizer)
    if (first / KEPT).is_dir():  # what an export gives back
        shutil.copytree(first / KEPT, run / KEPT)
    data = {'name': 'tokenizer'} | ({} if tokenizer is not None else {'vocab_size': description.get('vocab_size')})
    config = description['config'] | {'name': run.name, 'run_dir': str(run), 'data': data}
    told = {'pretrax': __version__, 'tokens': 0, 'data': None, 'config': config, 'averaged': names}
    kept = {key: description.get(key) for key in ('jax', 'tokenizer', 'vocab_size')}
    weights = {path: _mean(sources, path) for path in sources[0].shapes}
    write_streamed(run / 'checkpoints', 0, nested(weights), kept | told)


def _mean(sources: list[CheckpointWeights], path: str) -> StreamedArray:
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
