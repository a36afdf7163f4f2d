"""Training from start to end: state, metrics = step(state, batch(i)), and what happens around it.

Nothing here makes the device wait: metrics are read a step late, checkpoints are written behind, batches are fetched
ahead. All that a run is lies in its directory, and the same command continues it from the newest checkpoint.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from pretrax import __version__
from pretrax.checkpoint import Checkpoints, Keep, SaveError, read_description, restore, restore_newest
from pretrax.config import RunConfig, resolved_yaml
from pretrax.data.batches.prefetch import prefetch
from pretrax.errors import UserError
from pretrax.infer.sample import check_can_sample, sample
from pretrax.observe.metrics import MetricsLog
from pretrax.observe.profile import profiled
from pretrax.observe.progress import Progress
from pretrax.observe.trackers import open_trackers
from pretrax.run.clock import Clock
from pretrax.run.processes import ending_at_once, join_processes
from pretrax.run.program_cache import compile_or_take
from pretrax.run.resume import check_same_data, check_unchanged, only_one, writable
from pretrax.run.rollback import give_up, last_good, with_next_batch
from pretrax.run.setup import Run, prepare
from pretrax.run.warm_start import start_state
from pretrax.run.watch import Requests, Watchdog
from pretrax.train.step import TrainState, init_state, make_evaluate, make_step


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: the last state, the last training and evaluation metrics, and why it was stopped early, if so."""

    run: Run
    state: TrainState
    metrics: dict[str, float]
    validation: dict[str, float]
    stopped: str | None


@ending_at_once
def train(
    config: RunConfig,
    *,
    allow_changes: bool = False,
    progress: Progress | None = None,
    compiled: Callable[[Run, Any], Any] | None = None,
) -> Result:
    """Trains, or goes on training, as the configuration says.

    Args:
        config: the run.
        allow_changes: go on although the configuration has changed since the run began.
        progress: where reports go (default: the terminal).
        compiled: gives the step that was compiled before (`pretrax.ahead.saved`), of the run and of the lowered step.

    Raises:
        UserError: the configuration does not fit itself, the data, the devices, or the run that is already there; the
            run is being trained already; none of its checkpoints is readable; or it fails again and again.
    """
    progress = progress or Progress()
    join_processes(config)
    leader = not jax.distributed.is_initialized() or jax.process_index() == 0
    say = progress.message if leader else lambda text: None
    with only_one(config.run_dir, say) if leader else contextlib.nullcontext(), writable(config.run_dir):
        check_unchanged(config, allow_changes, say)
        for note in config.notes:
            say(note)
        run = prepare(config, say)
        if config.sample.every:
            check_can_sample(run.recipe.model, run.source, config.sample)
        for line in run.startup:
            say(str(line))
        limit = config.faults.time_limit_minutes
        requests = Requests(60 * limit if limit else None)
        section = config.checkpoint
        checkpoints = Checkpoints(
            config.run_dir / 'checkpoints', Keep(section.keep, section.keep_every, section.keep_best)
        )
        with jax.set_mesh(run.mesh), checkpoints, contextlib.closing(progress), requests.listening():

            def fresh() -> TrainState:
                return (
                    start_state(config.init_from, run, say) if config.init_from else init_state(run.recipe, config.seed)
                )

            def check(description: dict[str, Any]) -> None:
                check_same_data(config, description, getattr(run.source, 'fingerprint', None), allow_changes)

            found = restore_newest(checkpoints.directory, run.like, say, check)
            if found is None:
                newest, state, before = 0, fresh(), {}
            else:
                newest, state, before = found
                say(f'continuing from step {newest}, checkpoint {checkpoints.directory / str(newest)}')
            if leader:
                (config.run_dir / 'config.yaml').write_text(resolved_yaml(config))
            with _open_log(config, leader, newest, say) as log:
                return _Training(run, fresh, state, before, checkpoints, log, progress, say, requests, compiled).go()


class _Training:
    """The loop and what it carries: the state, the clock, and the metrics still on the devices."""

    def __init__(
        self, run: Run, fresh: Callable[[], TrainState], state: TrainState, before: dict[str, Any], checkpoints: Checkpoints, log: MetricsLog | None,
        progress: Progress, say: Callable[[str], None], requests: Requests, compiled: Callable[[Run, Any], Any] | None,
    ):  # fmt: skip
        self.run, self.state, self.checkpoints, self.log, self.progress = run, state, checkpoints, log, progress
        self.fresh, self.say, self.requests, self.compiled = fresh, say, requests, compiled
        faults = run.config.faults
        self.watchdog = Watchdog(run.config.run_dir, faults.hang_seconds, faults.stack_trace_interval_seconds, say)
        self.clock = Clock(run.config.run_dir, log is not None, int(state.step), before)
        self.rollbacks: int = before.get('rollbacks', 0)
        self.waiting: tuple[int, dict[str, jax.Array]] | None = None  # a step that the device may still be doing
        self.in_a_row = 0  # steps skipped, the newest one read included
        self.last: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}

    def go(self) -> Result:
        config, first = self.run.config, int(self.state.step)
        if first >= config.steps:
            self.say(f'all {config.steps} steps are done; give a larger steps= to go on')
            return self._result(None)
        self.progress.start(config.steps, first)
        began = time.perf_counter()
        lowered = make_step(self.run.recipe).lower(self.state, self.run.batch(int(self.state.batch)))
        saved = self.compiled
        step, done = (saved(self.run, lowered), 'loaded the compiled step') if saved else compile_or_take(lowered)
        self.say(f'{done} in {time.perf_counter() - began:.1f} s')
        evaluate = make_evaluate(self.run.recipe.model) if self._evaluates() else None
        with self.watchdog, profiled(step, config.log.profile, config.run_dir / 'profile', self.say) as step:
            while self._go_on(step, evaluate):
                self._roll_back()
            try:
                self.checkpoints.wait()
            except SaveError as error:
                self.say(f'WARNING: {error}')
        if (number := int(self.state.step)) != self.checkpoints.saved:
            raise UserError(f'the state of step {number} is not saved\nmake room, and give the same command again')
        return self._result(self.requests.why if int(self.state.step) < config.steps else None)

    def _go_on(self, step: Any, evaluate: Any) -> bool:
        """Trains to the end, or until it is asked to stop; true where too many steps in a row were skipped."""
        config, first, data = self.run.config, int(self.state.step), int(self.state.batch)
        self.clock.start(first)
        numbers = range(data, data + config.steps - first)
        fetched = prefetch(self.run.batch, numbers, 2, config.log.stall_seconds, self._stalled)
        with contextlib.closing(fetched) as batches:
            for number, batch in enumerate(batches, first + 1):
                self.state, metrics = step(self.state, batch)
                self._read()  # of the step before: the device already has this one to do
                self.waiting = number, metrics
                self.watchdog.alive(step=True)
                if config.faults.rollback_after and self.in_a_row >= config.faults.rollback_after:
                    return True
                stopped = self.requests.stop(number)
                if evaluate is not None and self._due(config.eval.every, number):
                    self._aside(self._evaluate, number, evaluate)
                if self._due(config.sample.every, number):
                    self._aside(self._sample, number)
                timely = self._due(config.checkpoint.every, number) or self.clock.is_time(config.checkpoint.minutes)
                if timely or stopped or self.requests.save(number):
                    self._aside(self._save, number)
                if stopped:
                    break
        self._read()
        return False

    def _roll_back(self) -> None:
        """Goes back to the last good checkpoint and passes over the data since; gives up after so many times."""
        self.waiting = None
        batch, directory = int(self.state.batch), self.checkpoints.directory
        if self.rollbacks >= self.run.config.faults.rollbacks:
            raise give_up(self.run, self.state, self.rollbacks)
        good = last_good(directory)
        self.say(
            f'WARNING: {self.in_a_row} steps in a row were skipped: going back to step {good}, and on with batch {batch}'
        )
        self.rollbacks, self.in_a_row = self.rollbacks + 1, 0
        self.checkpoints.remove_after(good)
        if good:
            state = restore(directory, good, self.run.like)
            self.clock.rewind(read_description(directory, good))
        else:
            state = self.fresh()
            self.clock.rewind({})
        self.state = with_next_batch(state, batch)
        if self.log is not None:
            self.log.rewind(good)
        self.watchdog.alive()

    def _stalled(self, index: int, seconds: float) -> None:
        reading = getattr(self.run.source, 'reading', None)
        cause = f'it is reading {reading}' if reading else 'nothing is being read: the time goes into making the batch'
        self.say(f'batch {index}: waited {seconds:.1f} s for data; {cause}')

    def _aside(self, work: Callable[..., None], *arguments: Any) -> None:
        """Does something between two steps, off the clock."""
        self._read()
        with self.clock.paused():
            work(*arguments)
        self.watchdog.alive()

    def _due(self, every: int, number: int) -> bool:
        return bool(every) and (number % every == 0 or number == self.run.config.steps)

    def _evaluates(self) -> bool:
        wanted = self.run.config.eval.every > 0
        if wanted and not self.run.validation_parts:
            self.say('eval: the data has no held-out part, so there is no evaluation')
            return False
        return wanted

    def _read(self) -> None:
        """Waits for the step in `waiting` to end; now and then fetches its metrics and reports them."""
        if self.waiting is None:
            return
        (number, metrics), self.waiting = self.waiting, None
        config = self.run.config
        self.in_a_row = int(metrics['skipped_in_a_row'])  # waits for the step to end
        self.clock.stepped(number, self.say)
        if number % config.log.every and number not in (1, config.steps):
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        speed = self.clock.lap(number) * config.batch.tokens
        self.last = {
            'step': number,
            'tokens': number * config.batch.tokens,
            **values,
            'skipped_steps': int(values['skipped_steps']),
            'goodput': self.clock.goodput(),
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
        """The loss on held-out text: of each source by its name, and of all by their weights."""
        losses = {part: self._held_out_loss(part, evaluate) for part in self.run.validation_parts}
        nll = sum(self.run.validation_parts[part][0] * loss for part, loss in losses.items())
        of_parts = {f'val_loss/{part}': loss for part, loss in losses.items() if part}
        self.last_validation = {'step': number, 'val_loss': nll, **of_parts, **self._bits(nll, 'validation_')}
        self._report(self.last_validation)

    def _held_out_loss(self, part: str, evaluate: Any) -> float:
        """The mean over all held-out tokens of `eval.batches` batches, added up on the host in double precision."""
        sums: dict[str, tuple[float, float]] = {}
        for index in range(self.run.config.eval.batches):
            found = jax.device_get(evaluate(self.state.weights, self.run.validation(index, part)))
            for name, (top, bottom) in found.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(top), before[1] + float(bottom))
        terms = {name: top / bottom if bottom else math.nan for name, (top, bottom) in sums.items()}
        return terms.get('nll', sum(terms.values()))

    def _sample(self, number: int) -> None:
        for text in sample(
            self.run.recipe.model, self.state.weights, self.run.source.tokenizer, self.run.config.sample
        ):
            self.say(f'sample at step {number}: {text}')

    def _save(self, number: int) -> None:
        validation = self.last_validation if self.last_validation.get('step') == number else {}
        description = {
            'pretrax': __version__,
            'jax': jax.__version__,
            'config': self.run.config.model_dump(mode='json'),
            'tokens': number * self.run.config.batch.tokens,
            'data': getattr(self.run.source, 'fingerprint', None),
            'tokenizer': getattr(getattr(self.run.source, 'tokenizer', None), 'sha256', None),
            'vocab_size': getattr(getattr(self.run.recipe.model, 'arch', None), 'vocab_size', None),
            'val_loss': validation.get('val_loss'),
            'skipped_in_a_row': self.in_a_row,
            'rollbacks': self.rollbacks,
            **self.clock.description(),
        }
        for write in (self.checkpoints.wait, lambda: self.checkpoints.save(number, self.state, description)):
            try:
                write()
            except SaveError as error:
                self.say(f'WARNING: {error}. Training goes on; the next checkpoint will be tried again')

    def _report(self, metrics: dict[str, float]) -> None:
        if self.log is not None:
            self.log.write(metrics)
            self.progress.update(metrics)

    def _result(self, stopped: str | None) -> Result:
        return Result(self.run, self.state, self.last, self.last_validation, stopped)


def _open_log(config: RunConfig, leader: bool, resumed: int, say: Callable[[str], None]) -> Any:
    """The metrics of the run, written by one process."""
    if not leader:
        return contextlib.nullcontext()
    trackers = open_trackers(
        tensorboard=config.log.tensorboard, wandb=config.log.wandb, mlflow=config.log.mlflow, directory=config.run_dir,
        name=config.name, config=config.model_dump(mode='json'), resumed_step=resumed, say=say,
    )  # fmt: skip
    return MetricsLog(config.run_dir / 'metrics.jsonl', trackers, resumed_step=resumed, say=say)
