"""The batch that a step of a run saw: which one it was, and its rows, read as the run read them."""

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrax.checkpoint import read_description, steps_in
from pretrax.config import RunConfig, from_manifest, read_resolved, written_values
from pretrax.config.batch import rows_of
from pretrax.data.batches.sequences import read_sequences, sources_of_sequences
from pretrax.data.batches.share import Share
from pretrax.data.batches.source import HostBatch, Source
from pretrax.data.tokens.flat_tokens import open_split
from pretrax.errors import Report, UserError, printable
from pretrax.run.setup import open_source
from pretrax.storage import AnyPath, locate
from pretrax.view.record.columns import read_metrics_columns

CONFIG = 'config.yaml'


@dataclasses.dataclass(frozen=True)
class SeenBatch:
    """A batch of a run."""

    index: int  # its number
    source: Source  # the data of the run
    where: tuple[int, int, int]  # its place in the data, as `config.batch.rows_of` returns it

    @property
    def n_rows(self) -> int:
        """How many rows the batch has."""
        _, rows, pieces = self.where
        return rows * pieces

    def rows(self, count: int) -> HostBatch:
        """The first rows, in host memory."""
        return read_sequences(self.source, *self.where, slice(0, min(count, self.n_rows)))

    def source_of_rows(self, count: int) -> list[str]:
        """The name of the source of each of the first rows; '' if the data has one source."""
        names = self.source.source_names
        numbers = sources_of_sequences(self.source, *self.where, slice(0, min(count, self.n_rows)))
        return [names[number] if names else '' for number in numbers.tolist()]


def seen_batch(path: str, step: int | None, batch: int | None, report: Report) -> SeenBatch:
    """The batch of a step of a run, or the batch with a number.

    Raises:
        UserError: there is no such run or step, or the data has changed since.
    """
    run_dir = locate(path)
    if not (run_dir / CONFIG).is_file():
        raise UserError(f'{path}: no run is there: it has no {CONFIG}\ngive the directory of a run, such as runs/NAME')
    if batch is None:
        assert step is not None
        batch = batch_of_step(run_dir, step, report)
    config = read_resolved(run_dir / CONFIG).model_copy(update={'run_dir': run_dir})
    checkpoints = run_dir / 'checkpoints'
    saved = steps_in(checkpoints)
    description = read_description(checkpoints, saved[-1]) if saved else {}
    fingerprint, shares = description.get('data'), config.federation.shares
    source = open_source(_with_prepared_tokens(config, fingerprint), lambda text: None)
    if fingerprint is not None and source.fingerprint != fingerprint:
        raise UserError(
            f'{path} was trained on other tokens: the text or the tokenizer has changed since\n'
            'restore the text to see what the step saw'
        )
    if shares > 1:
        if 'share' not in description:
            raise UserError(
                f'{path} is an island without a checkpoint, which has its share\nwait until it has saved one'
            )
        source = Share(source, description['share'], shares)
    return SeenBatch(batch, source, rows_of(config.batch, batch))


def show_batch(run_dir: AnyPath, batch: int) -> str:
    """The command that prints a batch of a run."""
    return f'pretrax data show {shlex.quote(str(run_dir))} --batch {batch}'


def batch_of_step(run_dir: AnyPath, step: int, report: Report) -> int:
    """The number of a step's batch, from `metrics.jsonl`: the first line after each rollback has it.

    Raises:
        UserError: the run has not done this step.
    """
    metrics = read_metrics_columns(run_dir / 'metrics.jsonl', report, keys=['batch'])
    last = int(metrics.steps.max(initial=0))
    if not 1 <= step <= last:
        done = f'it has done the steps 1 to {last:,}' if last else 'it has done no step'
        raise UserError(f'{run_dir} has no step {step:,}\n{done}')
    if 'batch' not in metrics:
        report(f'WARNING: {run_dir} has no batch numbers, so this is right only if the run was never rolled back')
        return step - 1
    steps, batches, _ = metrics['batch']
    before = int(np.argmax(np.append(steps > step, True)))
    at = max(before - 1, 0)
    return step + int(batches[at] - steps[at])


def _with_prepared_tokens(config: RunConfig, fingerprint: str | None) -> RunConfig:
    """The configuration with the tokens that the run has prepared instead of its text, which may be gone or changed."""
    values = written_values(config)
    data = values['data']
    prepared = config.run_dir / 'data'
    if (
        data.get('text') is None
        or data.get('mixture')
        or fingerprint is None
        or not (isinstance(prepared, Path) and prepared.is_dir())
    ):
        return config
    for path in sorted(prepared.glob('tokens-*')):
        if open_split(path, 'train').fingerprint == fingerprint:
            kept = {key: data[key] for key in ('name', 'packing') if key in data}
            return from_manifest(values | {'data': kept | {'tokens': str(path)}})
    return config


def row_text(batch: HostBatch, row: int, tokenizer: Any, ids: bool) -> Iterator[str]:
    """Lines that show the documents of a row: their columns, how many of their targets count, and their text.

    Args:
        tokenizer: has `decode(ids)`; None: the ids are shown instead of text.
        ids: also show the ids.
    """
    segments, mask = batch.segments[row], batch.mask[row]
    starts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist()]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(segments)], strict=True), start=1):
        here = slice(start, stop)
        counted = int(np.count_nonzero(mask[here]))
        columns = f'columns {start} to {stop - 1}'
        if stop == len(segments) and not counted and not batch.tokens[row, here].any():
            yield f'  {columns}: padding'
            continue
        yield f'  {columns}: document {number} of the row, {counted} of {stop - start} targets count'
        tokens = batch.tokens[row, here].tolist()
        if counted and mask[stop - 1]:
            tokens.append(int(batch.targets[row, stop - 1]))  # the last target is the input of no column
        if ids or tokenizer is None:
            yield f'    ids: {" ".join(map(str, tokens))}'
        if tokenizer is not None:
            yield from (f'    | {line}' for line in printable(tokenizer.decode(tokens)).split('\n'))
