"""What a run has written, read for reports, comparisons and live pages. It imports no JAX.

record = read_run('runs/quickstart')
record.state.name                   # 'finished'
record.metrics['val_loss'].values   # a numpy array
record.axis('tokens', record.metrics['loss'])
"""

import contextlib
import dataclasses
import difflib
import io
import pathlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from pretrax.checkpoint.manifest import MANIFEST, place_of, steps_in
from pretrax.errors import UserError, system_errors
from pretrax.federation.registry import is_federation
from pretrax.observe.attempts import Attempt, attempts_of, read_attempts
from pretrax.observe.goodput import divide, read_pauses
from pretrax.observe.metrics import EVALUATIONS
from pretrax.observe.step_lines import SAMPLES
from pretrax.storage import AnyPath, BucketPath, locate_run
from pretrax.storage.parts import open_joined, read_records
from pretrax.system.json_file import parse_json
from pretrax.view.federation.lines import as_file, metric_lines
from pretrax.view.federation.read import Federation, read_federation
from pretrax.view.record.columns import Column, Columns, parse_columns, read_columns
from pretrax.view.record.settings import Setting, parse_settings, value_of
from pretrax.view.record.state import RunState, state_of
from pretrax.view.record.verdict import KEYS, verdict_of

_EXACT = (*KEYS, 'bits_per_byte', 'val_bits_per_byte', 'tokens_per_second', 'mfu')
OF_AN_ISLAND = ('name', 'run_dir', 'federation.name')  # settings that are not those of its federation
AXES = ('step', 'tokens', 'flops', 'time')


class SavedCheckpoint(NamedTuple):
    """A checkpoint."""

    step: int
    size: int  # size of its files, bytes
    files: int
    written: float | None  # when its manifest was written, seconds since 1970; None in a bucket
    val_loss: float | None  # validation loss of its step, if there was an evaluation
    finite: bool | None  # whether all weights and the optimizer state are finite; None: not known


class Size(NamedTuple):
    """The size of the batches of a run from a step on."""

    step: int
    tokens: int
    flops_per_token: float | None


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run, as its files describe it. Missing files give empty values or None.

    A federation is a run whose lines are those of its rounds, with the configuration of its first island.
    """

    name: str  # from its configuration, else that of the directory
    path: AnyPath  # the run directory, on a disk or in a bucket
    metrics: Columns  # the lines of `metrics.jsonl` and `evaluations.jsonl` as columns, long ones thinned
    settings: list[Setting]  # the resolved configuration, with the origin of each value
    notes: list[str]  # what the configuration notes about itself
    startup: list[tuple[str, str]]  # (topic, text) of each line of `startup.txt`; the topic may be ''
    environment: dict[str, Any]  # `environment.json`: versions, hardware, command, sizes; see docs/see.md
    events: list[dict[str, Any]]  # the lines of `attempts.jsonl`
    attempts: list[Attempt]  # what the events say about each attempt to train
    # The lines of `pauses.jsonl`: {"time", "step", "work", "seconds"} of what was done between steps.
    pauses: list[dict[str, Any]]
    checkpoints: list[SavedCheckpoint]  # those that exist, oldest first
    samples: list[dict[str, Any]]  # the lines of `samples.jsonl`: {"step", "prompt", "text"}
    state: RunState  # whether it runs, and how it ended
    warnings: list[str]  # what could not be read, for the user
    federation: Federation | None = None

    def setting(self, key: str) -> Any:
        """The value of a dotted key of the configuration."""
        return value_of(self.settings, key)

    def section(self, key: str) -> dict[str, Any]:
        """A section of `environment.json`; {} if it has none."""
        found = self.environment.get(key)
        return found if isinstance(found, dict) else {}

    @property
    def island(self) -> str:
        """Which island of which federation it is; '' if it is none."""
        bucket = self.setting('federation.bucket')
        if not bucket or self.federation is not None:
            return ''
        return f'island {self.setting("federation.name") or self.name} of the federation {bucket}'

    @property
    def last_step(self) -> int:
        """The last step in the metrics; 0: none."""
        return int(self.metrics.steps.max(initial=0))

    @property
    def steps(self) -> int | None:
        """Steps of the whole run, as configured."""
        steps = self.setting('steps')
        return steps if type(steps) is int else None

    @property
    def batch_tokens(self) -> int | None:
        """Tokens per step; of the largest batches, if they grow."""
        tokens = self.setting('batch.tokens')
        if type(tokens) is int and tokens > 0 and self.federation is None:
            return tokens
        if sizes := _sizes(self.environment):
            return sizes[-1].tokens
        found = self.metrics.get('tokens')
        return None if found is None or not found.steps[-1] else round(found.values[-1] / found.steps[-1])

    @property
    def sizes(self) -> list[Size]:
        """The sizes of the batches, by the step from which they have them; [] if they are not known."""
        tokens = self.batch_tokens
        return _sizes(self.environment) or ([] if tokens is None else [Size(0, tokens, self.flops_per_token)])

    def trained(self, steps: np.ndarray, name: str = 'tokens') -> np.ndarray | None:
        """The 'tokens' or 'flops' of the first steps, for each number of steps; None if they are not known."""
        if self.federation is not None:
            return self._tokens_in_rounds(steps) if name == 'tokens' else None
        per_step = [size.tokens * (1 if name == 'tokens' else size.flops_per_token or 0) for size in self.sizes]
        if not all(per_step) or not per_step:
            return None
        firsts = [size.step for size in self.sizes]
        parts = zip(firsts, [*firsts[1:], np.inf], per_step, strict=True)
        return np.sum([(np.clip(steps, first, stop) - first) * amount for first, stop, amount in parts], axis=0)

    def _tokens_in_rounds(self, steps: np.ndarray) -> np.ndarray | None:
        column = self.metrics.get('tokens')
        return None if column is None else np.interp(steps, [0, *column.steps], [0, *column.values])

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token, with causal attention."""
        flops = self.environment.get('flops_per_token')
        return float(flops) if isinstance(flops, int | float) and flops > 0 else None

    @property
    def verdict(self) -> str:
        """What is wrong with its losses, such as 'diverged: ...'; '' if nothing is."""
        return verdict_of(self.metrics)

    @property
    def restarts(self) -> int:
        """How often training began again."""
        return max(0, len(self.attempts) - 1)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, up to the last line."""
        return int(self.metrics.last('skipped_steps') or 0)

    @property
    def steps_without_targets(self) -> int:
        """Steps that had nothing to learn, up to the last line."""
        return int(self.metrics.last('steps_without_targets') or 0)

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        """The events of returns to an earlier checkpoint: {"time", "step", "from_step"}."""
        return [event for event in self.events if event['event'] == 'rolled back' and type(event.get('step')) is int]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds from the first event to the newest event or line, by cause: `observe.goodput.CAUSES`."""
        return divide(self.events, self.pauses).at(float(max([0.0, *self.metrics.known_times[-1:]])))

    def axis(self, name: str, column: Column) -> np.ndarray | None:
        """The x of each number of a column: 'step', 'tokens', 'flops', or 'time' in seconds since 1970.

        None if the run does not know it. A time is NaN in a line without one.
        """
        if name == 'step':
            return column.steps
        if name == 'time':
            times = self.metrics.times[column.lines]
            return None if np.isnan(times).all() else times
        if name in ('tokens', 'flops'):
            return self.trained(column.steps, name)
        raise ValueError(f'{name!r} is not one of {", ".join(AXES)}')


def read_run(run: str | AnyPath, files: pathlib.Path | None = None, exact: Sequence[str] = ()) -> RunRecord:
    """Reads a run directory, on a disk or in a bucket.

    Args:
        run: the directory, or its metrics.jsonl.
        files: a directory with newer copies of the files of a run in a bucket, except its checkpoints.
        exact: keys whose curves are not thinned (`columns.MOST`), besides losses and speeds.

    Raises:
        UserError: there is no run, or it cannot be read.
    """
    path = run_directory(run)
    source = path if files is None else files
    if isinstance(path, pathlib.Path) and path.is_file():
        raise UserError(no_such_run(path))
    warnings: list[str] = []
    with system_errors(f'{path} cannot be read'):
        metrics = _metrics(source, exact)
        federation = read_federation(path) if metrics is None and is_federation(path) else None
        if federation is not None:
            lines = io.BytesIO(as_file(metric_lines(federation)))
            metrics, warnings = read_columns(lines, exact=(*_EXACT, *exact)), [*federation.problems]
        config = _bytes(source / (federation.config if federation is not None else 'config.yaml'))
        startup = _bytes(source / 'startup.txt')
        events = read_attempts(source)
        if metrics is None and config is None and not events:
            raise UserError(no_such_run(path))
        settings, notes = parse_settings((config or b'').decode(errors='replace'))
        if config is not None and not settings:
            warnings.append(f'{path / "config.yaml"} is not a configuration')
        metrics = metrics or parse_columns(b'')
        if metrics.skipped:
            warnings.append(f'{path / "metrics.jsonl"}: {metrics.skipped:,} lines are not lines of metrics')
        if not len(metrics.steps):
            warnings.append(f'{path} has no metrics yet')
        if federation is not None:
            settings = [setting for setting in settings if setting.key not in OF_AN_ISLAND]
        name, steps = value_of(settings, 'name'), value_of(settings, 'steps')
        attempts = attempts_of(events)
        if federation is not None:
            state = RunState(*federation.state)
        else:
            state = state_of(path, attempts, metrics, steps if type(steps) is int else None)
        return RunRecord(
            name=str(name or (path.name if isinstance(path, BucketPath) else path.absolute().resolve().name)),
            path=path,
            metrics=metrics,
            settings=settings,
            notes=notes,
            startup=_startup((startup or b'').decode(errors='replace')),
            environment=_environment(source / 'environment.json', warnings),
            events=events,
            attempts=attempts,
            pauses=read_pauses(source),
            checkpoints=saved_checkpoints(path / 'checkpoints', warnings),
            samples=read_records(source / SAMPLES, is_sample),
            state=state,
            warnings=warnings,
            federation=federation,
        )


def run_directory(run: str | AnyPath) -> AnyPath:
    """The directory of a run that was given as a directory or as its metrics.jsonl."""
    path = locate_run(run) if isinstance(run, str) else run
    return path.parent if path.suffix == '.jsonl' else path


def no_such_run(path: AnyPath) -> str:
    """The error for a path without a run, with runs that exist nearby."""
    if isinstance(path, BucketPath):
        return f'{path} is not a run: it has no metrics.jsonl'
    if path.is_file():
        return f'{path} is a file; expected a run directory, such as runs/quickstart'
    places = [place for place in (path, path.parent, pathlib.Path('runs')) if place.is_dir()]
    runs = sorted({str(file.parent) for place in places for file in place.glob('*/metrics.jsonl')})
    by_name = {pathlib.Path(run).name: run for run in runs}
    near = difflib.get_close_matches(path.name, by_name, n=1, cutoff=0.5)
    head = f'{path} is not a run: it has no metrics.jsonl' if path.is_dir() else f'no run at {path}'
    if near:
        return f'{head}, did you mean {by_name[near[0]]}?'
    return head + (f'\nruns: {", ".join(runs[:8])}' if runs else '; a run is a directory like runs/NAME')


def _metrics(source: AnyPath, exact: Sequence[str]) -> Columns | None:
    """The lines of `metrics.jsonl` and `evaluations.jsonl`; None: neither exists."""
    with contextlib.ExitStack() as opened:
        files = []
        for name in ('metrics.jsonl', EVALUATIONS):
            with contextlib.suppress(FileNotFoundError):
                files.append(opened.enter_context(open_joined(source / name)))
        return read_columns(*files, exact=(*_EXACT, *exact)) if files else None


def _bytes(path: AnyPath) -> bytes | None:
    """The content of a file, or of its parts in a bucket; None if it does not exist."""
    try:
        with open_joined(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def is_sample(record: dict[str, Any]) -> bool:
    """Whether a JSON object is a line of `samples.jsonl`."""
    return type(record.get('step')) is int and all(isinstance(record.get(key), str) for key in ('prompt', 'text'))


def _startup(text: str) -> list[tuple[str, str]]:
    """The topics and texts of `startup.txt`, as `run.startup` writes them."""
    lines = []
    for line in text.splitlines():
        topic, colon, rest = line.partition(': ')
        lines.append((topic, rest) if colon and len(topic.split()) < 3 else ('', line))
    return lines


def _sizes(environment: dict[str, Any]) -> list[Size]:
    """The sizes of the batches in `environment.json`; [] if it has none."""
    with contextlib.suppress(TypeError, KeyError, ValueError):
        sizes = [
            Size(int(one['step']), int(one['batch_tokens']), one['flops_per_token'] and float(one['flops_per_token']))
            for one in environment['sizes']
        ]
        steps = [size.step for size in sizes]
        if steps[:1] == [0] and steps == sorted(set(steps)) and all(size.tokens > 0 for size in sizes):
            return sizes
    return []


def _environment(path: AnyPath, warnings: list[str]) -> dict[str, Any]:
    content = _bytes(path)
    if content is None:
        return {}
    with contextlib.suppress(ValueError):
        found = parse_json(content)
        if isinstance(found, dict):
            return found
    warnings.append(f'{path} is not a JSON object')
    return {}


def saved_checkpoints(directory: AnyPath, warnings: list[str]) -> list[SavedCheckpoint]:
    """The checkpoints in a directory, oldest first. `warnings` receives those whose manifest cannot be read."""
    steps = steps_in(directory)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda step: _checkpoint(place_of(directory, step), step), steps))
    missing = [step for step, one in zip(steps, found, strict=True) if one is None]
    warnings += [f'{directory / str(step)} has no readable manifest' for step in missing]
    return [one for one in found if one is not None]


def _checkpoint(place: AnyPath, step: int) -> SavedCheckpoint | None:
    path = place / MANIFEST
    try:
        manifest: dict[str, Any] = parse_json(path.read_bytes())
        sizes = [int(file['size']) for file in manifest['files'].values()]
        about = manifest['description']
        val_loss, finite = about.get('val_loss'), about.get('finite_state')
        written = path.stat().st_mtime if isinstance(path, pathlib.Path) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_number = type(val_loss) in (int, float)
    return SavedCheckpoint(
        step, sum(sizes), len(sizes), written, val_loss if is_number else None, finite if type(finite) is bool else None
    )
