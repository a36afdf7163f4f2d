"""`pretrax launch` for a run of a search: a dry run before the first one, the job that it submits, and its end."""

import pathlib
import shlex
import subprocess
from collections.abc import Sequence

from pretrax.config import RunConfig, resolved_yaml
from pretrax.errors import CONFIGURATION, DONE, MISTAKE, TRY_AGAIN, Report, UserError, first_line
from pretrax.launch.local import pretrax_command
from pretrax.launch.record import FILE, LaunchRecord, read_record
from pretrax.launch.registry import engine_of
from pretrax.observe.attempts import read_attempts
from pretrax.system.atomic import write_file
from pretrax.system.children import Child

FOREGROUND = ('local', 'ssh', 'ray')  # engines whose launcher runs as long as the run
_ENGINES = (*FOREGROUND, 'slurm', 'kubernetes')
_OF_A_RUN = ('name=', 'run_dir=')  # changes that the search makes itself


class TrialJob:
    """The job of an engine that trains a run, as the run's launch.json names it.

    Args:
        output: a file that receives what `pretrax launch stop` prints.
    """

    def __init__(self, run_dir: pathlib.Path, output: pathlib.Path):
        self._run_dir, self._output = run_dir, output
        self._events = 0  # lines of attempts.jsonl that are older than the job
        self._request: Child | None = None
        self._asking: tuple[str, int] | None = None
        self._asked: tuple[str, int] | None = None

    def record(self) -> LaunchRecord | None:
        """The newest launch of the run; None: there is none."""
        return read_record(self._run_dir) if (self._run_dir / FILE).is_file() else None

    def begin(self) -> None:
        """Call it before a job is submitted: what is in the run directory by then is not of that job."""
        self._events = len(read_attempts(self._run_dir))

    def is_running(self) -> bool:
        """Whether the newest launch runs, or waits to run. Raises UserError if its engine cannot be asked."""
        record = self.record()
        return record is not None and engine_of(record).is_running(record)

    def ask_to_stop(self) -> None:
        """Asks the job to save and to end, in another process: Kubernetes answers when the pods have ended.

        Each attempt of the job is asked once, since a second request would end it before it has saved.
        """
        if self.is_asking():
            return
        record = self.record()
        if self._request is not None:
            if self._request.returncode == DONE:
                self._asked = self._asking
            self._request = None
        attempt = record.job if record else '', sum(event['event'] == 'began' for event in read_attempts(self._run_dir))
        if record is None or attempt == self._asked:
            return
        self._asking = attempt
        with self._output.open('ab') as output:
            stop = pretrax_command('launch', 'stop', str(self._run_dir))
            self._request = Child(stop, stdout=output, stderr=subprocess.STDOUT)

    def is_asking(self) -> bool:
        """Whether the process of a request to stop still runs."""
        return self._request is not None and self._request.poll() is None

    def end(self) -> tuple[int, str, bool]:
        """Exit code and reason of a job that has ended, and whether it has left anything in the run directory."""
        events = read_attempts(self._run_dir)[self._events :]
        ended = next((event for event in reversed(events) if event['event'] == 'ended'), {})
        if ended.get('code') in (MISTAKE, CONFIGURATION):
            return MISTAKE, ended.get('why', ''), True
        return TRY_AGAIN, ended.get('why') or self.status(), bool(events)

    def status(self) -> str:
        """What the engine says about the job, in a line."""
        record = self.record()
        if record is None:
            return f'there is no {self._run_dir / FILE}'
        try:
            return engine_of(record).status(record)
        except UserError as error:
            return first_line(error)


def check_words(words: Sequence[str]) -> None:
    """Raises UserError if these cannot be the words after `pretrax launch` of a trial."""
    if not words:
        return
    if words[0] == 'tpu-vm':
        raise UserError(
            'launch: runs on TPU VMs are in a bucket, but those of a search or a grid are on a disk\n'
            f'expected one of {", ".join(_ENGINES)}'
        )
    if words[0] not in _ENGINES:
        raise UserError(f'launch: {words[0]!r} is not an engine; expected one of {", ".join(_ENGINES)}')
    for word in words[1:]:
        if word.startswith(_OF_A_RUN):
            raise UserError(
                f'launch: {word}: names and run directories are set for each run\nremove it; --out says where'
            )
        if word in ('--dry-run', '--help'):
            raise UserError(f'launch: {word} starts no run\nremove it')


def check_launch(words: Sequence[str], config: RunConfig, place: pathlib.Path, say: Report) -> None:
    """Asks `pretrax launch` for a dry run, and passes its warnings on.

    Args:
        words: after `pretrax launch`; none: there is no dry run.
        config: of one of several runs.

    Raises:
        UserError: an option does not exist, the engine cannot train the run, or the runs would be islands.
    """
    if config.federation.bucket is not None:
        raise UserError(
            f'federation.bucket is {config.federation.bucket}, in which all these runs would be islands of one model\n'
            'set federation.bucket=null'
        )
    if not words:
        return
    # Not in the file of that run, which a job that waits may read.
    done = dry_run(words, write_config(config, place, 'dry-run.yaml'))
    if done.returncode:
        raise UserError(f'launch: {shlex.join(words)}\n{done.stderr.strip()}')
    for line in done.stderr.splitlines():
        if line.startswith('WARNING'):
            say(line)


def dry_run(words: Sequence[str], file: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """`pretrax launch ENGINE FILE ... --dry-run`, which submits and starts nothing."""
    command = launch_command(words, file)
    return subprocess.run([*command, '--dry-run'], stdin=subprocess.DEVNULL, capture_output=True, text=True)


def launch_command(words: Sequence[str], file: pathlib.Path) -> list[str]:
    """The command that launches a configuration: it is inserted after the name of the engine."""
    return pretrax_command('launch', words[0], str(file), *words[1:])


def write_config(config: RunConfig, place: pathlib.Path, name: str | None = None) -> pathlib.Path:
    """Writes a run's configuration below the directory of the search, and returns its path. `name`: the file's."""
    file = place / 'configs' / (name or f'{config.name}.yaml')
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, resolved_yaml(config).encode())
    return file
