"""Opens a run for training: its processes, its directory, its checkpoints, its state and its logs, in this order."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax

from pretrax.checkpoint import Checkpoints, Memory
from pretrax.config import RunConfig, resolved_yaml
from pretrax.errors import Report
from pretrax.observe.profile import profiled
from pretrax.observe.progress import Progress
from pretrax.run.clock import Clock
from pretrax.run.compiled_step import Step
from pretrax.run.contracts import check_behavior, keeping_traceback
from pretrax.run.directory import RunDirectory, open_directory
from pretrax.run.processes import exiting_on_error, is_first_process, join_processes
from pretrax.run.resume import check_unchanged, writable
from pretrax.run.saving import open_checkpoints, open_memory, wait_until_saved
from pretrax.run.setup import Run, prepare_and_report
from pretrax.run.start import Start, restore_or_start
from pretrax.run.start_check import check_start
from pretrax.run.startup import StartupLine
from pretrax.run.step_metrics import StepMetrics, open_log
from pretrax.run.validation import Evaluation
from pretrax.run.watch import Requests, Watchdog


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
    report: Report

    def is_checkpoint_due(self, number: int) -> bool:
        """Whether to save a checkpoint after a step: at the end, and as the configuration or a signal says."""
        every, minutes = self.run.checkpoint.every, self.run.checkpoint.minutes
        is_time = self.requests.save(number, self.metrics.clock.is_time(minutes))
        return number == self.run.steps or bool(every and number % every == 0) or is_time

    def traced(self, step: Step) -> contextlib.AbstractContextManager[Step]:
        """The step, with traces of the calls that `log.profile` and `log.profile_on_slow` choose."""
        return profiled(step, self.run.log, self.directory.local, self.report, self.metrics)

    def finish(self, step: int) -> None:
        """Waits until the state of the last step is saved. Raises as `wait_until_saved`."""
        with self.metrics.clock.paused('finish', step):
            wait_until_saved(self.checkpoints, step, self.report)


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
        ):
            check_unchanged(config, allow_changes, report)
            run, startup = prepare_and_report(config, report, verbose)
            checkpoints = open_checkpoints(config.checkpoint, config.run_dir, directory)
            memory = open_memory(config.checkpoint, report)
            requests = Requests(config.faults.time_limit_minutes)
            with jax.set_mesh(run.mesh), checkpoints, memory, contextlib.closing(progress), requests.listening():
                restoring = time.perf_counter()
                start = restore_or_start(run, checkpoints.directory, memory.states(), allow_changes, report)
                restored = time.perf_counter()
                check_behavior(run, start.state)
                checkpoints.continue_from(start.step)
                kept = memory.begin(start.step, start.state._replace(constants=None), start.description)
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
                    yield Session(
                        run=run,
                        directory=directory,
                        checkpoints=checkpoints,
                        memory=memory,
                        start=start,
                        metrics=StepMetrics(run, start, clock, log, progress, report),
                        requests=requests,
                        watchdog=Watchdog(directory.local, run.faults, report),
                        evaluation=Evaluation.create(run, report),
                        report=report,
                    )
