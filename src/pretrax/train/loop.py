"""Training from start to end: state, metrics = step(state, batch(i)), and what happens around it.

Nothing here makes the device wait: metrics are read a step late, checkpoints are written behind, batches are fetched
ahead. All that a run is lies in its directory, and the same command continues it from the newest checkpoint.
"""

import contextlib
import dataclasses
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import __version__
from ..checkpoint import Checkpoints, read_description, steps_in
from ..config import RunConfig, diff, from_values, is_harmless, resolved_yaml
from ..data.prefetch import prefetch
from ..errors import UserError
from ..infer.sample import check_can_sample, sample
from ..observe.metrics import MetricsLog
from ..observe.progress import Progress
from ..observe.trackers import open_trackers
from .setup import Run, prepare
from .step import TrainState, abstract_state, init_state, make_evaluate, make_step
from .warm_start import start_weights


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: the last state, the last training and evaluation metrics, and whether it was stopped early."""

    run: Run
    state: TrainState
    metrics: dict[str, float]
    validation: dict[str, float]
    stopped: bool


def train(config: RunConfig, *, allow_changes: bool = False, progress: Progress | None = None) -> Result:
    """Trains, or goes on training, as the configuration says.

    Args:
        config: the run.
        allow_changes: go on although the configuration has changed since the run began.
        progress: where reports go (default: the terminal).

    Raises:
        UserError: the configuration does not fit itself, the data, the devices, or the run that is already there.
    """
    progress = progress or Progress()
    leader = _is_leader()
    say = progress.message if leader else lambda text: None
    _check_writable(config.run_dir)
    _check_unchanged(config, allow_changes, say)
    for note in config.notes:
        say(note)
    run = prepare(config, say)
    if config.sample.every:
        check_can_sample(run.recipe.model, run.source, config.sample)
    for line in run.report:
        say(line)
    checkpoints = Checkpoints(config.run_dir / 'checkpoints', config.checkpoint.keep)
    with jax.set_mesh(run.mesh), contextlib.closing(checkpoints), contextlib.closing(progress), _polite() as stop:
        newest = checkpoints.newest()
        if newest is None:
            start = start_weights(config.init_from, run, say) if config.init_from else None
            state = init_state(run.recipe, config.seed, start)
        else:
            _check_same_data(config, newest, getattr(run.source, 'fingerprint', None), allow_changes)
            state = checkpoints.restore(newest, abstract_state(run.recipe))
            say(f'continuing from step {newest}, checkpoint {checkpoints.directory / str(newest)}')
        if leader:
            (config.run_dir / 'config.yaml').write_text(resolved_yaml(config))
        with _open_log(config, leader, newest or 0, say) as log:
            return _Training(run, state, checkpoints, log, progress, say, stop).go()


class _Training:
    """The loop and what it carries: the state, the clock, and the metrics still on the devices."""

    def __init__(
        self, run: Run, state: TrainState, checkpoints: Checkpoints, log: MetricsLog | None, progress: Progress,
        say: Callable[[str], None], stop: Callable[[], bool],
    ):  # fmt: skip
        self.run, self.state, self.checkpoints, self.log, self.progress = run, state, checkpoints, log, progress
        self.say, self.stop = say, stop
        self.clock = _Clock()
        self.waiting: tuple[int, dict[str, jax.Array]] | None = None  # a step that the device may still be doing
        self.last: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}

    def go(self) -> Result:
        config, first = self.run.config, int(self.state.step)
        if first >= config.steps:
            self.say(f'all {config.steps} steps are done; give a larger steps= to go on')
            return self._result(stopped=False)
        self.progress.start(config.steps, first)
        began = time.perf_counter()
        step = make_step(self.run.recipe).lower(self.state, self.run.batch(first)).compile()
        self.say(f'compiled the step in {time.perf_counter() - began:.1f} s')
        evaluate = make_evaluate(self.run.recipe.model) if self._evaluates() else None
        self.clock.start(first)
        number = first
        with contextlib.closing(prefetch(self.run.batch, range(first, config.steps))) as batches:
            for number, batch in enumerate(batches, first + 1):
                self.state, metrics = step(self.state, batch)
                self._read()  # of the step before: the device already has this one to do
                self.waiting = number, metrics
                stopped = self._stopped()
                if evaluate is not None and self._due(config.eval.every, number):
                    self._aside(self._evaluate, number, evaluate)
                if self._due(config.sample.every, number):
                    self._aside(self._sample, number)
                if self._due(config.checkpoint.every, number) or stopped:
                    self._aside(self._save, number)
                if stopped:
                    break
        return self._result(stopped=number < config.steps)

    def _aside(self, work: Callable[..., None], *arguments: Any) -> None:
        """Does something between two steps, off the clock."""
        self._read()
        with self.clock.paused():
            work(*arguments)

    def _due(self, every: int, number: int) -> bool:
        return bool(every) and (number % every == 0 or number == self.run.config.steps)

    def _evaluates(self) -> bool:
        wanted = self.run.config.eval.every > 0
        if wanted and getattr(self.run.source, 'validation', None) is None:
            self.say('eval: the data has no held-out part, so there is no evaluation')
            return False
        return wanted

    def _stopped(self) -> bool:
        """Whether this step is the last because someone asked. All processes come to the same answer."""
        if jax.process_count() == 1:
            return self.stop()
        from jax.experimental import multihost_utils

        return bool(multihost_utils.process_allgather(np.int32(self.stop())).any())

    def _read(self) -> None:
        """Waits for the step in `waiting` to end; now and then fetches its metrics and reports them."""
        if self.waiting is None:
            return
        (number, metrics), self.waiting = self.waiting, None
        config = self.run.config
        jax.block_until_ready(metrics['loss'])
        if number % config.log.every and number not in (1, config.steps):
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        speed = self.clock.lap(number) * config.batch.tokens
        self.last = {
            'step': number,
            'tokens': number * config.batch.tokens,
            **values,
            'skipped_steps': int(values['skipped_steps']),
            **self._bits(values.get('nll', values['loss'])),
            'tokens_per_second': speed,
            **self.run.mfu(speed),
        }
        self.last.setdefault('mfu', None)  # type: ignore[arg-type]  # there is always a column for it
        if not math.isfinite(values['loss']):
            self.say(f'step {number}: the loss is {values["loss"]}; {self.last["skipped_steps"]} steps skipped so far')
        self._report(self.last)

    def _bits(self, nll: float, prefix: str = '') -> dict[str, float]:
        """Nats a token as bits a byte of text, which tokenizers do not change."""
        per_token = getattr(self.run.source, f'{prefix}bytes_per_token', None)
        return {f'{"val_" if prefix else ""}bits_per_byte': nll / math.log(2) / per_token} if per_token else {}

    def _evaluate(self, number: int, evaluate: Any) -> None:
        """The mean over all held-out tokens of `eval.batches` batches, added up on the host in double precision."""
        sums: dict[str, tuple[float, float]] = {}
        for index in range(self.run.config.eval.batches):
            for name, (top, bottom) in jax.device_get(evaluate(self.state.weights, self.run.validation(index))).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(top), before[1] + float(bottom))
        terms = {name: top / bottom if bottom else math.nan for name, (top, bottom) in sums.items()}
        nll = terms.get('nll', sum(terms.values()))
        self.last_validation = {'step': number, 'val_loss': nll, **self._bits(nll, 'validation_')}
        self._report(self.last_validation)

    def _sample(self, number: int) -> None:
        for text in sample(
            self.run.recipe.model, self.state.weights, self.run.source.tokenizer, self.run.config.sample
        ):
            self.say(f'sample at step {number}: {text}')

    def _save(self, number: int) -> None:
        description = {
            'pretrax': __version__,
            'jax': jax.__version__,
            'config': self.run.config.model_dump(mode='json'),
            'tokens': number * self.run.config.batch.tokens,
            'data': getattr(self.run.source, 'fingerprint', None),
            'tokenizer': getattr(getattr(self.run.source, 'tokenizer', None), 'sha256', None),
            'vocab_size': getattr(getattr(self.run.recipe.model, 'arch', None), 'vocab_size', None),
        }
        self.checkpoints.save(number, self.state, description)

    def _report(self, metrics: dict[str, float]) -> None:
        if self.log is not None:
            self.log.write(metrics)
            self.progress.update(metrics)

    def _result(self, stopped: bool) -> Result:
        return Result(self.run, self.state, self.last, self.last_validation, stopped)


class _Clock:
    """Seconds spent training: compilation, evaluation, samples and saving do not count."""

    def start(self, number: int) -> None:
        self.number, self.since = number, time.perf_counter()

    def lap(self, number: int) -> float:
        """Steps a second since the last lap."""
        now = time.perf_counter()
        speed = (number - self.number) / (now - self.since)
        self.number, self.since = number, now
        return speed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began


@contextlib.contextmanager
def _polite() -> Iterator[Callable[[], bool]]:
    """The first SIGINT or SIGTERM lets the step end and the state be saved; one a second later ends the process.

    Those in between are the same one: `uv run`, `timeout` and Slurm pass on what the whole process group has got.
    """
    asked: list[float] = []

    def ask(number: int, frame: Any) -> None:
        del number, frame
        if not asked:
            asked.append(time.monotonic())
            os.write(2, b'\nstopping: this step ends, and the state is saved; once more: at once, without saving\n')
        elif time.monotonic() - asked[0] > 1:
            raise KeyboardInterrupt

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, as in a notebook's worker: signals are someone else's
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_leader() -> bool:
    return int(os.environ.get('JAX_PROCESS_ID', '0')) == 0


def _open_log(config: RunConfig, leader: bool, resumed: int, say: Callable[[str], None]) -> Any:
    """The metrics of the run, written by one process."""
    if not leader:
        return contextlib.nullcontext()
    trackers = open_trackers(
        tensorboard=config.log.tensorboard, wandb=config.log.wandb, mlflow=config.log.mlflow, directory=config.run_dir,
        name=config.name, config=config.model_dump(mode='json'), resumed_step=resumed, say=say,
    )  # fmt: skip
    return MetricsLog(config.run_dir / 'metrics.jsonl', trackers, resumed_step=resumed, say=say)


def _check_writable(directory: Path) -> None:
    """Finds out now, not when the first file is written, after the text has been read."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f'run_dir: {directory} cannot be written: {error.strerror}\ngive another run_dir=') from error


def _check_unchanged(config: RunConfig, allow_changes: bool, say: Callable[[str], None]) -> None:
    """A run goes on only with the configuration that it began with, but for what does not touch the training."""
    directory = config.run_dir / 'checkpoints'
    steps = steps_in(directory)
    if not steps:
        return
    description = read_description(directory, steps[-1])
    if 'imported' in description:
        raise UserError(
            f'{config.run_dir} holds weights that were imported, and no state of a training to go on with\n'
            f'train from them under another name, with text: init_from: {config.run_dir}'
        )
    before = from_values(description['config'])
    every = diff(before, config)
    changes = [(key, old, new) for key, old, new in every if not is_harmless(key)]
    if changes and not allow_changes:
        shown = [f'    {key}: {old} -> {new}' for key, old, new in changes[:5]]
        more = [f'    and {len(changes) - 5} more'] if len(changes) > 5 else []
        raise UserError(
            '\n'.join([f'{config.run_dir} was trained with another configuration:', *shown, *more,
                       'give another name=, or --allow-changes to go on with the new one'])
        )  # fmt: skip
    for key, old, new in [*changes, *(change for change in every if change[0] == 'steps')]:
        say(f'changed since the run began: {key}: {old} -> {new}')


def _check_same_data(config: RunConfig, step: int, fingerprint: str | None, allow_changes: bool) -> None:
    """The text behind a path may change without the configuration changing; a run notices."""
    before = read_description(config.run_dir / 'checkpoints', step)['data']
    if before != fingerprint and not allow_changes:
        raise UserError(
            f'{config.run_dir} was trained on other tokens: the text or the tokenizer has changed since\n'
            'give another name=, or --allow-changes to go on with the new ones'
        )
