"""The life of a run: `session.py` prepares and starts it, and here is the loop `state, metrics = step(state, batch)`.

The loop never makes the device wait: it reads the metrics of a step after it has dispatched the
next one, writes checkpoints in the background, and fetches batches ahead. The same command resumes
a run from its newest checkpoint.
"""

import contextlib
import math
from collections.abc import Callable

from pretrax.config import RunConfig
from pretrax.observe.progress import Progress
from pretrax.run.compiled_step import LoadStep, Step, compile_step
from pretrax.run.result import OnStep, Result
from pretrax.run.rollback import roll_back
from pretrax.run.saving import remember, save
from pretrax.run.session import Session, open_session


def train(
    config: RunConfig,
    *,
    allow_changes: bool = False,
    verbose: bool = False,
    progress: Progress | None = None,
    compiled: LoadStep | None = None,
    on_step: OnStep | None = None,
) -> Result:
    """Trains a run, or resumes it from its newest checkpoint.

    Args:
        allow_changes: resume although the configuration has changed since the run began.
        verbose: show the whole start-up report, not only its essential lines.
        progress: where reports are shown (default: the terminal).
        compiled: loads a step that was compiled before (`pretrax.plan.saved`).
        on_step: see `StepMetrics`.

    Raises:
        UserError: the configuration does not fit the data, the devices or the existing run; another
            process trains the run; none of its checkpoints is readable; or too many steps in a row
            were skipped.
    """
    progress = progress or Progress()
    with open_session(config, allow_changes, verbose, progress) as session:
        loop, first, session.metrics.on_step = _Loop(session), int(session.start.state.step), on_step
        if first >= config.steps:
            more = 'use a larger steps=' if session.island is None else 'begin another federation with init_from'
            session.report(f'all {config.steps} steps are done; to train more, {more}')
        else:
            progress.start(config.steps, first, session.run.tokens_before)
            loop.run_steps(compiled)
        return loop.result()


class _Loop:
    """The loop over steps, with evaluations, samples, checkpoints and rollbacks between them."""

    def __init__(self, session: Session):
        self.session, self.run, self.state = session, session.run, session.start.state
        self.watchdog, self.evaluation = session.watchdog, session.evaluation
        self.metrics, self.requests, self.report = session.metrics, session.requests, session.report
        self.rollbacks: int = session.start.description.get('rollbacks', 0)
        self.validation: dict[str, float] = {}

    def run_steps(self, load: LoadStep | None) -> None:
        """Compiles the step, and trains until the last step or a request to stop."""
        self._compile(int(self.state.step), load)
        self.requests.begin()
        step: Step = lambda state, batch: self.compiled(state, batch)  # noqa: E731 - compiled again for larger batches
        with self.watchdog, self.session.traced(step) as traced:
            while not self._train(traced):
                pass
            self.session.finish(int(self.state.step))

    def _compile(self, number: int, load: LoadStep | None = None) -> None:
        """Compiles the step that follows step `number`, for batches of the size of its batch."""
        with self.watchdog.paused():
            self.compiled = compile_step(self.run.at(int(self.state.batch)), self.state, load)
        self.metrics.compiled(self.compiled)

    def _train(self, step: Step) -> bool:
        """Trains until the last step or a request to stop; False after a jump to another step or batch."""
        run, first, first_batch = self.run, int(self.state.step), int(self.state.batch)
        most_skipped = run.faults.rollback_after or math.inf
        self.metrics.clock.start(first)
        numbers, jumped, stop = range(first_batch, first_batch + run.steps - first), False, False
        with contextlib.closing(run.batches(numbers, self.report, self.metrics.waiting)) as batches:
            for number, (index, batch) in enumerate(zip(numbers, batches, strict=True), first + 1):
                if self.compiled.run is not run.at(index):
                    self._pause_clock(self._compile, number - 1)
                self.metrics.before(number, index, self.state, batch)
                self.state, metrics = step(self.state, batch)
                self.metrics.after(number, metrics)
                self.watchdog.alive(step=True)
                self.session.directory.check()
                if self.metrics.skipped_in_a_row >= most_skipped:
                    self._roll_back()
                    return False
                self.state, jumped = self.session.federate(number, self.state, self.rollbacks)
                number = int(self.state.step) if jumped else number
                stop = self.requests.stop(number)
                if self.evaluation and self.evaluation.is_due(number):
                    self._pause_clock(self._evaluate, number)
                if self._is_due(run.sample.every, number):
                    self._pause_clock(self._sample, number)
                if self.session.is_checkpoint_due(number) or stop:
                    self._pause_clock(self._save, number)
                if self.session.memory.is_due(number):
                    self._settle(number)
                    self._pause_clock(self._remember, number)
                if stop or jumped:
                    break
        self.metrics.read()
        return stop or not jumped or int(self.state.step) == run.steps

    def _is_due(self, every: int, number: int) -> bool:
        return bool(every) and (number % every == 0 or number == self.run.steps)

    def _pause_clock(self, work: Callable[[int], None], number: int) -> None:
        """Does some work while no step is computed; the clock does not count it."""
        self.metrics.read()
        with self.metrics.clock.paused(work.__name__, number):
            work(number)
        self.watchdog.alive()

    def _evaluate(self, number: int) -> None:
        with self.watchdog.paused():  # tasks may take longer than a step may
            self.validation = {'step': number, **self.session.evaluate(number, self.state)}
        self.metrics.write(self.validation)

    def _sample(self, number: int) -> None:
        self.metrics.sample(number, self.session.averaged(number, self.state).weights)

    def _save(self, number: int) -> None:
        self.metrics.flush()
        is_evaluated = self.validation.get('step') == number
        loss = self.validation.get('val_loss') if is_evaluated else None
        description = {'val_loss': loss, 'rollbacks': self.rollbacks, **self.metrics.description()}
        save(self.session, number, self.state, description)

    def _settle(self, number: int) -> None:
        """Waits for the state in memory before this one, before this step is logged."""
        self.metrics.wait()
        with self.metrics.clock.paused('remember', number):
            self.session.memory.settle()

    def _remember(self, number: int) -> None:
        description = {'rollbacks': self.rollbacks, **self.metrics.description()}
        remember(self.session, number, self.state, description)

    def _roll_back(self) -> None:
        """Returns to the last good checkpoint and skips the data since. Raises UserError after too many rollbacks."""
        skipped = self.metrics.skipped_in_a_row
        start = roll_back(self.session, self.state, skipped, self.rollbacks)
        self.rollbacks, self.state = self.rollbacks + 1, start.state
        self.metrics.rewind(start)
        self.watchdog.alive()

    def result(self) -> Result:
        """How the run ended."""
        stopped = self.requests.why if int(self.state.step) < self.run.steps else None
        return Result(self.run, self.state, stopped)
