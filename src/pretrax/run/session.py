"""Opens a run for training: its processes, its directory, its checkpoints, its state and its logs, in this order."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from pretrax.checkpoint import Checkpoints
from pretrax.config import RunConfig, resolved_yaml
from pretrax.errors import Report
from pretrax.observe.progress import Progress
from pretrax.run.clock import Clock
from pretrax.run.directory import RunDirectory, open_directory
from pretrax.run.processes import is_first_process, join_processes
from pretrax.run.resume import check_unchanged, writable
from pretrax.run.saving import open_checkpoints
from pretrax.run.setup import Run, prepare_and_report
from pretrax.run.start import Start, restore_or_start
from pretrax.run.step_metrics import StepMetrics, open_log
from pretrax.run.watch import Requests


@dataclasses.dataclass(frozen=True)
class Session:
    """A run that trains. `requests`: to stop and to save. `report`: shows a line in the first process."""

    run: Run
    directory: RunDirectory
    checkpoints: Checkpoints
    start: Start  # the state to train from
    metrics: StepMetrics
    requests: Requests
    report: Report


@contextlib.contextmanager
def open_session(config: RunConfig, allow_changes: bool, verbose: bool, progress: Progress) -> Iterator[Session]:
    """Everything that training needs, with the mesh of the run set. Raises UserError; see `pretrax.run.loop.train`."""
    join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
    report: Report = progress.message if is_first_process() else lambda text: None
    with open_directory(config.run_dir, config.faults.lease_seconds, report) as directory, writable(config.run_dir):
        check_unchanged(config, allow_changes, report)
        run, startup = prepare_and_report(config, report, verbose)
        checkpoints = open_checkpoints(config.checkpoint, config.run_dir, directory)
        requests = Requests(config.faults.time_limit_minutes)
        with jax.set_mesh(run.mesh), checkpoints, contextlib.closing(progress), requests.listening():
            start = restore_or_start(run, checkpoints.directory, allow_changes, report)
            checkpoints.continue_from(start.step)
            if is_first_process():
                (directory.local / 'config.yaml').write_text(resolved_yaml(config))
                startup.write(directory.local)
            with open_log(run, directory.local, start.step, requests, report) as log:
                clock = Clock(directory.local, is_first_process(), int(start.state.step), start.description)
                metrics = StepMetrics(run, start, clock, log, progress, report)
                yield Session(run, directory, checkpoints, start, metrics, requests, report)
