"""Ordinary runs as processes of a search, of repeats with other seeds, or of a fit of scaling laws.

A run is started by `pretrax train CONFIG`, or by an engine: `pretrax launch ENGINE CONFIG`. If it is killed or fails,
it is started again, and resumes from its newest checkpoint. A local process ends with the process that started it,
after it has saved. Nothing here imports JAX, which would occupy the devices that the runs need.
"""

import contextlib
import functools
import os
import pathlib
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from pretrax.config import RunConfig, load
from pretrax.errors import DONE, MISTAKE, TRY_AGAIN, Report, UnavailableError, UserError, first_line, system_errors
from pretrax.experiments.base_file import RunOptions
from pretrax.experiments.trial_job import FOREGROUND, TrialJob, check_launch, dry_run, launch_command, write_config
from pretrax.launch.group import last_lines
from pretrax.launch.local import pretrax_command, share_of
from pretrax.launch.restarts import LONGEST_WAIT, Outcome, Restarts, newest_checkpoint, outcome
from pretrax.system.atomic import write_file
from pretrax.system.children import STOP, Child, handling, prepare_training
from pretrax.system.locks import DirectoryLock, LockedError, holder_of, is_locked, lock, lock_directory
from pretrax.view.compare.arms import arms_of, mean_metrics, summary_text
from pretrax.view.record.columns import Columns, parse_columns, read_metrics_columns
from pretrax.view.record.run_record import read_run

CONTINUES = 'the same command continues'
_DEFAULTS = RunOptions()
_LOOK = 0.2  # seconds between two checks of the processes
_LOOK_AT_ENGINE = 10.0  # of a job, which takes a request to a scheduler


class Training:
    """A run that trains, from its start to its end, over any number of attempts.

    Args:
        config: the run; `run_dir` is on a disk.
        place: directory for its configuration and the output of its processes.
        options: `launch`, such as ['slurm', '--nodes', '1'], and `retries`.

    Attributes:
        why: the reason why it has failed; '' if it has not.
        refused: the reason why the engine starts no run, which is not a fault of this one; '' if it does.
    """

    def __init__(
        self,
        config: RunConfig,
        place: pathlib.Path,
        options: RunOptions = _DEFAULTS,
        environment: dict[str, str] | None = None,
        say: Report = print,
    ):
        launch = options.launch
        assert isinstance(config.run_dir, pathlib.Path)
        self.config, self.run_dir, self.why, self.refused = config, config.run_dir, '', ''
        self._launch, self._environment, self._say = list(launch), environment or {}, say
        self._uses_jobs = bool(launch) and launch[0] not in FOREGROUND
        self._place, self._output = place, place / 'output' / f'{config.name}.txt'
        self._process: Child | None = None
        self._begin = 0  # size of the output when the process was started
        self._job, self._before = TrialJob(self.run_dir, self._output), None
        self._restarts = Restarts(options.retries, newest_checkpoint(self.run_dir))
        self._next = 0.0  # time of the next start, or of the next question to the engine
        self._submitted = False  # there is a job
        self._elsewhere = False  # a job, an earlier search or a request to stop was at the run when last looked at
        self._stopping = self._leaves = self._is_silent = False
        self._traceless = 0  # jobs in a row that left nothing in the run directory

    @property
    def steps_done(self) -> int:
        """The last step with a line of metrics; 0: none."""
        return int(self.metrics(()).steps.max(initial=0))

    def metrics(self, keys: Sequence[str]) -> Columns:
        """The numbers of these keys so far."""
        path = self.run_dir / 'metrics.jsonl'
        return read_metrics_columns(path, lambda text: None, keys) if path.is_file() else parse_columns(b'')

    def is_over(self) -> bool:
        """Starts the next attempt if it is time. Returns whether the run has finished, failed or was stopped."""
        if self._process is not None:
            return self._process_is_over(self._process)
        if self._leaves or self.refused:
            return True
        if time.monotonic() < self._next:
            return self._stopping and not self._elsewhere
        self._elsewhere = self._runs_elsewhere() or self._job.is_asking()
        if self.refused:
            return True
        if self._elsewhere:
            if self._stopping:
                self._job.ask_to_stop()
            return False
        if self._submitted:
            return self._job_is_over()
        if self._stopping or self._is_finished():
            return True
        self._start()
        return False

    def stop(self, leave_jobs: bool = False) -> None:
        """Asks the run to save and to end. `is_over` says when it has. `leave_jobs`: jobs of a scheduler continue."""
        first, self._stopping = not self._stopping, True
        self._leaves = leave_jobs and (first or self._leaves)
        if first:
            self._next = 0.0
            if self._process is not None and not self._uses_jobs:  # a submission ends by itself
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM)

    def _is_finished(self) -> bool:
        return self.steps_done >= self.config.steps and newest_checkpoint(self.run_dir) >= self.config.steps

    def _start(self) -> None:
        file = write_config(self.config, self._place)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._before = self._job.record()
        if self._uses_jobs:
            self.run_dir.mkdir(parents=True, exist_ok=True)  # launch.json is there, and not in runs/NAME
            self._job.begin()
        launched = [*launch_command(self._launch, file), '--unchecked'] if self._launch else []  # `check_launch` has
        command = launched or pretrax_command('train', str(file))
        with self._output.open('ab') as output:
            self._begin = output.tell()
            with contextlib.suppress(OSError):  # a file system without locks
                lock(output)  # until the process ends: if this one is killed, the next search waits for it
            prepare = None if self._uses_jobs else prepare_training
            streams = {'stdout': output, 'stderr': subprocess.STDOUT}
            self._process = Child(command, os.environ | self._environment, prepare, **streams)

    def _process_is_over(self, process: Child) -> bool:
        code = process.poll()
        if code is None:
            return False
        process.kill_all()  # those that it has started
        self._process = None
        if self._uses_jobs and code == DONE:
            self._submitted, self._elsewhere, self._next = True, True, 0.0
            return self._leaves
        if self._uses_jobs and code == TRY_AGAIN and not self._stopping:
            self._warn(self._last_line())
            self._next = time.monotonic() + LONGEST_WAIT
            return False
        return self._attempt_is_over(outcome({0: code}, (), newest_checkpoint(self.run_dir)))

    def _job_is_over(self) -> bool:
        self._submitted = False
        code, why, left_something = self._job.end()
        self._traceless = 0 if left_something else self._traceless + 1
        if self._traceless > 1 and not self._stopping:
            self.refused = f'{why}\nit left nothing in {self.run_dir}: do its machines see that directory?'
            return True
        if self._is_finished():
            return True
        return self._attempt_is_over(Outcome(code, why, newest_checkpoint(self.run_dir)))

    def _attempt_is_over(self, ended: Outcome) -> bool:
        if self._stopping or (ended.code == DONE and self._is_finished()):
            return True
        if ended.code == MISTAKE and holder_of(self.run_dir) is not None:  # an earlier process saves and ends
            self._next = time.monotonic() + 1
            return False
        if ended.code == DONE:  # it was stopped on request
            ended = Outcome(TRY_AGAIN, ended.why, ended.step)
        said = '' if self._uses_jobs and self._job.record() != self._before else self._last_line()
        if ended.code == MISTAKE and self._launch and self._job.record() == self._before:
            tried = dry_run(self._launch, write_config(self.config, self._place))
            if not tried.returncode:
                self.refused = self._last_lines()
                return True
            said = next(line for line in tried.stderr.splitlines() if not line.startswith('WARNING'))[:200]
        wait = self._restarts.wait(ended)
        if wait is None:
            self.why = f'{said or ended.why}; see {self._log()}'
            return True
        self._next = time.monotonic() + wait
        return False

    def _runs_elsewhere(self) -> bool:
        """Whether a job, or a process of an earlier search that submits or saves, trains this run."""
        self._next = time.monotonic() + 0.5
        if is_locked(self._output):
            return True
        if not self.run_dir.is_dir():
            return False
        record = self._job.record()
        try:
            is_running = self._job.is_running()
        except UserError as error:
            if not self._submitted and not isinstance(error, UnavailableError):
                self.refused = str(error)
                return False
            self._warn(first_line(error))
            self._next = time.monotonic() + _LOOK_AT_ENGINE
            return True
        self._is_silent = False
        if is_running and record is not None and record.engine not in FOREGROUND:
            self._submitted = True
            self._next = time.monotonic() + _LOOK_AT_ENGINE
            return True
        return is_running or holder_of(self.run_dir) is not None

    def _warn(self, problem: str) -> None:
        """Warns of an engine that does not answer, once until it does."""
        if not self._is_silent:
            self._say(f'WARNING: {self.config.name}: {problem}; asking again')
        self._is_silent = True

    def _log(self) -> str:
        record = self._job.record() if self._uses_jobs else None
        return str(record.facts.get('log', self.run_dir)) if record else str(self._output)

    def _last_lines(self) -> str:
        """The end of what the process has printed, without warnings."""
        lines = last_lines(self._output, self._begin)
        return '\n'.join(
            [line.rstrip()[:200] for line in lines if line.strip() and not line.startswith('WARNING')][-8:]
        )

    def _last_line(self) -> str:
        return self._last_lines().rpartition('\n')[2].strip()


class StopRequest:
    """Whether this process was asked to stop, inside `listening`. A second request ends it at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator['StopRequest']:
        """Handles signals inside this context."""
        with handling(STOP, self._asked):
            yield self

    def _asked(self, number: int) -> None:
        if self.number is not None:
            raise SystemExit(128 + number)
        self.number = number


def train_all(
    configs: Sequence[RunConfig],
    place: pathlib.Path,
    options: RunOptions = _DEFAULTS,
    say: Report = print,
) -> list[Training]:
    """Trains runs to their end, the first `options.at_once` at once. Runs that are finished are not started.

    Args:
        configs: the runs, each with a name and a run directory of its own.
        place: directory for their configurations and output, which is locked.

    Returns:
        The runs in this order; `why` says which have failed.

    Raises:
        UserError: another process works in this directory, or the engine starts no runs.
        SystemExit: a signal has asked this process to stop; the runs have saved.
    """
    runs: dict[int, Training] = {}
    waiting, going, slots, refused = list(range(len(configs))), {}, list(range(options.at_once)), ''
    with locked(place), StopRequest().listening() as request:
        check_launch(options.launch, configs[0], place, say)
        while waiting or going:
            stops = request.number is not None or bool(refused)
            while waiting and slots and not stops:
                number, slot = waiting.pop(0), slots.pop(0)
                share = share_of(slot, options.devices)
                runs[number] = Training(configs[number], place, options, share, say)
                going[number] = slot
            for number in list(going):
                run = runs[number]
                if stops:
                    run.stop(leave_jobs=True)
                if run.is_over():
                    slots.append(going.pop(number))
                    slots.sort()
                    if run.refused:
                        refused = f'{configs[number].name} cannot be launched: {run.refused}\n{CONTINUES}'
                    else:
                        say(f'{configs[number].name}: {f"failed: {run.why}" if run.why else f"{run.steps_done} steps"}')
            if not going and request.number is not None:
                say(f'stopped; {CONTINUES}')
                raise SystemExit(128 + request.number)
            if not going and refused:
                raise UserError(refused)
            time.sleep(_LOOK)
    return [runs[number] for number in range(len(configs))]


def locked(directory: pathlib.Path, what: str = 'works here') -> DirectoryLock:
    """The lock of a directory for runs. Raises UserError if another process has it, and says `what` it does.

    A file system that does not support locks is accepted silently.
    """
    try:
        with system_errors(f'{directory} cannot be written', '\ngive another directory: --out DIR'):
            return lock_directory(directory, warn=lambda reason: None)
    except LockedError as error:
        raise UserError(
            f'{directory}: another process {what} ({error.holder})\nwait until it ends, or give another --out'
        ) from None


def train_seeds(config: str, overrides: Sequence[str], seeds: int, refused: Sequence[str] = ()) -> int:
    """Trains with seeds from `seed` on, in RUN_DIR-seed-S; their mean is in RUN_DIR-seeds.

    Returns 1 if a run has failed, else 0. Raises UserError if there are `refused` options.
    """
    if refused:
        raise UserError(f'--seeds starts processes of its own, which take no {" and no ".join(refused)}\nleave one out')
    loaded = load(config, overrides)
    if not isinstance(loaded.run_dir, pathlib.Path):
        raise UserError(f'run_dir={loaded.run_dir}: --seeds needs a directory on a disk')
    configs = [_with_seed(config, overrides, loaded, loaded.seed + number) for number in range(seeds)]
    place = loaded.run_dir.with_name(f'{loaded.run_dir.name}-seeds')
    say = functools.partial(print, flush=True)
    say(f'{seeds} runs, one after another; their output is in {place}/output')
    runs = train_all(configs, place, say=say)
    if failed := [run.config.name for run in runs if run.why]:
        say(f'{len(failed)} of {seeds} runs failed; the same command tries again')
        return 1
    arm, *changed = arms_of([read_run(str(run.run_dir)) for run in runs])
    if changed:
        left_out = ', '.join(str(seed) for one in changed for seed in one.seeds)
        say(
            f'WARNING: seed {left_out}: not in the mean, since its code is not that of seed {loaded.seed}; remove its '
            'run'
        )
    text = summary_text(arm)
    write_file(place / 'summary.txt', ('\n'.join(text) + '\n').encode())
    write_file(place / 'metrics.jsonl', mean_metrics(arm).encode())
    say('\n' + '\n'.join(text))
    own = ' '.join(shlex.quote(str(run.run_dir)) for run in runs)
    say(f'\nwrote {place}/summary.txt and metrics.jsonl; with another arm: pretrax compare {own} RUN...')
    return 0


def _with_seed(config: str, overrides: Sequence[str], loaded: RunConfig, seed: int) -> RunConfig:
    assert isinstance(loaded.run_dir, pathlib.Path)
    kept = [word for word in overrides if word.partition('=')[0] not in ('name', 'run_dir', 'seed')]
    run_dir = loaded.run_dir.with_name(f'{loaded.run_dir.name}-seed-{seed}')
    return load(config, [*kept, f'name={loaded.name}-seed-{seed}', f'run_dir={run_dir}', f'seed={seed}'])
