"""Opens a run for training: its processes, its directory, its checkpoints, its state and its logs, in this order."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from pretrax.checkpoint import Checkpoints, Memory
from pretrax.config import RunConfig, feature, resolved_yaml
from pretrax.errors import Report
from pretrax.federation.island_state import stored_state
from pretrax.observe.profile import profiled
from pretrax.observe.progress import Progress
from pretrax.run.clock import Clock
from pretrax.run.compiled_step import Step
from pretrax.run.contracts import check_behavior, keeping_traceback
from pretrax.run.directory import RunDirectory, open_directory
from pretrax.run.processes import exiting_on_error, is_first_process, join_processes
from pretrax.run.resume import check_unchanged, writable
from pretrax.run.saving import open_checkpoints, open_memory, save, wait_until_saved
from pretrax.run.setup import Run, prepare_and_report
from pretrax.run.start import Start, entered, restore_or_start
from pretrax.run.start_check import check_start
from pretrax.run.startup import StartupLine
from pretrax.run.step_metrics import StepMetrics, open_log
from pretrax.run.validation import Evaluation
from pretrax.run.watch import Requests, Watchdog
from pretrax.train.step import TrainState

if TYPE_CHECKING:
    from pretrax.federation.island import Island


@dataclasses.dataclass(frozen=True)
class Session:
    """A run that trains. `requests`: to stop and to save. `report`: shows a line in the first process."""

    run: Run
    directory: RunDirectory
    checkpoints: Checkpoints
    memory: Memory
    start: Start  # the state to train from
    metrics: StepMetrics
    requests: Requests
    watchdog: Watchdog
    evaluation: Evaluation | None  # None: there is nothing to evaluate
    island: 'Island | None'  # in a federation; None: there is none
    report: Report

    def is_checkpoint_due(self, number: int) -> bool:
        """Whether to save a checkpoint after a step: at the end, and as the configuration or a signal says."""
        every, minutes = self.run.checkpoint.every, self.run.checkpoint.minutes
        is_time = self.requests.save(self.metrics.clock.is_time(minutes))
        return number == self.run.steps or bool(every and number % every == 0) or is_time

    def federate(self, number: int, state: TrainState, rollbacks: int) -> tuple[TrainState, bool]:
        """Takes part in the rounds that are due after a step. If it is asked to save while it waits, it does.

        Args:
            rollbacks: of the run so far.

        Returns:
            The state to train on from, and whether it is at another step or batch: other islands are ahead.
        """
        if self.island is None or not self.island.is_due(number):
            return state, False

        def asked(state: TrainState) -> bool:
            stop = self.requests.stop(number, is_waiting=True)
            if self.requests.save() and not stop:
                self.save_waiting(state, rollbacks)
            return stop

        self.metrics.read()
        batch = state.batch
        with self.watchdog.paused(), self.metrics.clock.paused('federate', number):
            state = self.island.take_part(number, state, self.metrics.counts(), asked)
        while self.island.metrics:
            self.metrics.note(self.island.metrics.pop(0))
        return state, state.batch is not batch

    def save_waiting(self, state: TrainState, rollbacks: int) -> None:
        """Saves a state between two rounds, which the next save of the same step replaces."""
        step = int(state.step)
        self.checkpoints.continue_from(step - 1)
        save(self, step, state, {'val_loss': None, 'rollbacks': rollbacks, **self.metrics.description()})

    def averaged(self, number: int, state: TrainState) -> TrainState:
        """The state with the weights that are evaluated: in a federation, those of the newest round."""
        return self.island.averaged(number, state) if self.island is not None else state

    def evaluate(self, number: int, state: TrainState) -> dict[str, float]:
        """The evaluation that is due after a step."""
        assert self.evaluation is not None
        found = self.evaluation.evaluate_if_due(self.averaged(number, state), number)
        if self.island is not None:
            self.island.evaluated(number, found.get('val_loss'))
        return found

    def traced(self, step: Step) -> contextlib.AbstractContextManager[Step]:
        """The step, with traces of the calls that `log.profile` and `log.profile_on_slow` choose."""
        return profiled(step, self.run.log, self.directory.local, self.report, self.metrics)

    def finish(self, step: int) -> None:
        """Waits until the state of the last step is saved. Raises as `wait_until_saved`."""
        with self.metrics.clock.paused('finish', step):
            wait_until_saved(self.checkpoints, step, self.report)
            if self.island is not None:
                self.island.finish(step == self.run.steps)


@contextlib.contextmanager
def open_session(config: RunConfig, allow_changes: bool, verbose: bool, progress: Progress) -> Iterator[Session]:
    """Everything that training needs, with the mesh of the run set. Raises UserError; see `pretrax.run.loop.train`."""
    began = time.perf_counter()
    with exiting_on_error(config.faults.heartbeat_seconds):
        join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
        report: Report = progress.message if is_first_process() else lambda text: None
        check_start(config, report, allow_changes=allow_changes)
        with (
            open_directory(config.run_dir, config.faults.lease_seconds, report) as directory,
            keeping_traceback(directory.local),
            writable(config.run_dir),
            contextlib.ExitStack() as opened,
        ):
            check_unchanged(config, allow_changes, report)
            prepared, startup = prepare_and_report(config, report, verbose)
            run, island = opened.enter_context(_joined(prepared, report))
            checkpoints = open_checkpoints(config.checkpoint, config.run_dir, directory)
            memory = open_memory(config.checkpoint, report)
            requests = Requests(config.faults.time_limit_minutes)
            with jax.set_mesh(run.mesh), checkpoints, memory, contextlib.closing(progress), requests.listening():
                restoring = time.perf_counter()
                start = restore_or_start(run, checkpoints.directory, memory.states(), allow_changes, report)
                restored = time.perf_counter()
                check_behavior(run, start.state)
                start = entered(island, start)
                checkpoints.continue_from(start.step)
                state = stored_state(start.state._replace(constants=None), island and island.arrays())
                kept = memory.begin(start.step, state, start.description)
                startup.add(StartupLine('state in memory', kept))
                if is_first_process():
                    (directory.local / 'config.yaml').write_text(resolved_yaml(config))
                    startup.write(directory.local)
                with open_log(run, directory.local, start.step, requests, report) as log:
                    clock = Clock(
                        directory.local,
                        is_first_process(),
                        int(start.state.step),
                        start.description,
                        age=time.perf_counter() - began,
                        restore=(restored - restoring) * bool(start.step),  # a fresh state is part of the preparation
                    )
                    session = Session(
                        run=run,
                        directory=directory,
                        checkpoints=checkpoints,
                        memory=memory,
                        start=start,
                        metrics=StepMetrics(run, start, clock, log, progress, report),
                        requests=requests,
                        watchdog=Watchdog(directory.local, run.faults, report),
                        evaluation=Evaluation.create(run, report),
                        island=island,
                        report=report,
                    )
                    yield _with_pending_round(session)


def _joined(run: Run, report: Report) -> contextlib.AbstractContextManager[tuple[Run, 'Island | None']]:
    """The run as an island of a federation, if it names one."""
    if run.federation.bucket is None:
        return contextlib.nullcontext((run, None))
    return feature('federation')(run, report)


def _with_pending_round(session: Session) -> Session:
    """The session after the round that its island was waiting for when it stopped.

    If that was the last one, or the others have trained to the end meanwhile, the state is saved.
    """
    start, first = session.start, int(session.start.state.step)
    is_over = start.step < first == session.run.steps
    if session.island is None or not (is_over or session.island.is_due(first)):
        return session
    rollbacks = start.description.get('rollbacks', 0)
    state, _ = session.federate(first, start.state, rollbacks)
    session = dataclasses.replace(session, start=dataclasses.replace(start, state=state))
    if int(state.step) == session.run.steps:
        session.save_waiting(state, rollbacks)
    return session
