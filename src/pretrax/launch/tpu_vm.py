"""Runs on TPU VMs outside Kubernetes: slices are asked for as a queued resource of Google Cloud, through `gcloud`.

Each VM starts the training by itself at every boot, with a startup script, and again after a failure. So the run does
not depend on the machine that launched it, except for one thing: slices that Google takes back do not return. `Watch`
deletes what is left, asks for new slices, and the run continues from its bucket.

References: docs.cloud.google.com/tpu/docs/queued-resources, .../multislice-introduction, and
`gcloud compute tpus --help`.
"""

import dataclasses
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrax.errors import CONFIGURATION, DONE, MISTAKE, TRY_AGAIN, Report, UserError
from pretrax.launch.engine import Engine
from pretrax.launch.options import SliceOptions
from pretrax.launch.record import LaunchRecord
from pretrax.launch.shipped import CONFIG, STOPPED, fill_template
from pretrax.storage import AnyPath, BucketPath
from pretrax.system.children import NO_ANSWER, run_tool

LARGEST = 256 * 1024  # bytes of one value of metadata
_STATE = '/var/lib/pretrax'  # on each VM
_LOST = ('SUSPENDING', 'SUSPENDED')  # taken back: spot slices, or the end of a reservation
_CODE = re.compile(r'^pretrax: process (\d+) exit code (\d+)$', re.MULTILINE)
_GRACE = 300  # seconds for the last checkpoint
_WAIT = 120.0  # seconds for an answer of gcloud
_LONG = 900.0  # the same, if it creates or deletes VMs
_PATIENCE = 30 * 60.0  # seconds for which a watch goes on while gcloud fails


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices(SliceOptions):
    """The slices of a run. `accelerator`: as gcloud names it, such as 'v5p-128'."""

    name: str  # of the queued resource; see `manifests.object_name`
    hosts: int  # VMs of one slice
    runtime: str = ''  # software of the VMs
    words: tuple[str, ...] = ()  # appended to `pretrax launch node CONFIG`

    @property
    def processes(self) -> int:
        return self.hosts * self.slices


def check_run_dir(run_dir: AnyPath) -> None:
    """Raises UserError unless the run directory is in a bucket of Cloud Storage, which outlives the VMs."""
    if not isinstance(run_dir, BucketPath) or not str(run_dir).startswith('gs://'):
        raise UserError(f'run_dir: {run_dir} is lost with the TPU VMs\ngive a bucket: run_dir=gs://BUCKET/runs/NAME')


def check_gcloud() -> None:
    """Raises UserError if there is no gcloud, or nobody is logged in."""
    if shutil.which('gcloud') is None:
        raise UserError(
            'there is no gcloud on the PATH\ninstall it: https://cloud.google.com/sdk/docs/install, '
            'or print the commands for another machine: --dry-run'
        )
    done = run_tool(['gcloud', 'auth', 'list', '--filter=status:ACTIVE', '--format=value(account)'], _WAIT)
    if done.returncode or not done.stdout.strip():
        raise UserError('gcloud has no active account\nlog in: gcloud auth login')


def startup_script(slices: Slices, files: Mapping[str, str]) -> str:
    """The script that every VM runs at boot.

    The number of a VM comes from its metadata server, and is used in file names. In the training, JAX asks the same
    server.
    """
    directory = f'{_STATE}/{slices.name}'
    train = ['pretrax', 'launch', 'node', f'{directory}/{CONFIG}', '--until-done', *slices.words]
    if slices.image:
        setup = f'docker pull --quiet {shlex.quote(slices.image)}'
        mount = f'--volume {directory}:{directory} --workdir {directory} --env PRETRAX_PROCESS'
        mount += ' --volume /dev/shm:/dev/shm --env PRETRAX_MEMORY'
        train = [*shlex.split(f'docker run --rm --privileged --network host --user 0 {mount}'), slices.image, *train]
    else:
        setup = slices.setup
    return fill_template(
        'tpu_vm.sh',
        name=slices.name,
        directory=directory,
        hosts=slices.hosts,
        restarts=slices.restarts,
        files='\n'.join(_write_file(name, text) for name, text in files.items()),
        setup=setup,
        train=shlex.join(train),
        ends=[DONE, MISTAKE, CONFIGURATION],
        mistake=MISTAKE,
        try_again=TRY_AGAIN,
        stopped=STOPPED,
    )


def create_command(slices: Slices, script: str) -> list[str]:
    """Asks for the slices. `script` is the path of the startup script."""
    several = ['--node-count', str(slices.slices), '--node-prefix', slices.name]
    optional = [
        *(['--spot'] if slices.spot else []),
        *([f'--network={slices.network}'] if slices.network else []),
        *([f'--service-account={slices.service_account}'] if slices.service_account else []),
    ]
    return [
        *_resource('create', slices),
        *(several if slices.slices > 1 else ['--node-id', slices.name]),
        f'--accelerator-type={slices.accelerator}',
        f'--runtime-version={slices.runtime}',
        f'--metadata-from-file=startup-script={script}',
        '--labels=managed-by=pretrax',
        *optional,
    ]


def describe_command(slices: Slices) -> list[str]:
    """Prints the state of the queued resource."""
    return [*_resource('describe', slices), '--format=value(state.state)']


def delete_command(slices: Slices) -> list[str]:
    """Deletes the queued resource and its VMs."""
    return [*_resource('delete', slices), '--force', '--quiet']


def ssh_command(slices: Slices, script: str, node: str = 'all', worker: str = 'all') -> list[str]:
    """Runs a shell command on the VMs."""
    place = [f'--node={node}', f'--worker={worker}', '--quiet']
    return [*_resource('ssh', slices), *place, f'--command={script}']


def dry_run(slices: Slices, files: Mapping[str, str]) -> str:
    """What is done, as a shell script."""
    script = startup_script(slices, files)
    commands = [
        _write_file('startup.sh', script, 'END_OF_SCRIPT'),
        shlex.join(create_command(slices, 'startup.sh')),
        '# every minute; if it is SUSPENDED, delete, and create again:',
        shlex.join(describe_command(slices)),
        shlex.join(ssh_command(slices, _codes(slices))),
        shlex.join(delete_command(slices)),
    ]
    return '\n'.join(commands) + '\n'


def _write_file(name: str, text: str, end: str = 'END_OF_FILE') -> str:
    """A shell command that writes a text. Its last line is not in the text, or the shell would run the rest."""
    while end in text:
        end += '_'
    return f"cat > {shlex.quote(name)} <<'{end}'\n{text.rstrip()}\n{end}"


class GcloudError(UserError):
    """A call of gcloud failed, or did not end. A later one may succeed."""


class Watch:
    """Waits for a run, and replaces slices that Google takes back.

    Calls of gcloud that fail are repeated: a token expires, a service is unavailable, a notebook sleeps.

    Args:
        slices, files: of the run.
        every: seconds between two looks.
    """

    def __init__(self, slices: Slices, files: Mapping[str, str], say: Report, every: float = 60.0):
        self._slices, self._script, self._say, self._every = slices, startup_script(slices, files), say, every
        self._seen = ''  # the state that was reported
        self._code: int | None = None  # the exit code of the run, which has ended
        self._is_silent = False  # the VMs do not answer, which was reported
        if len(self._script.encode()) > LARGEST:
            raise UserError(
                f'the configuration and its plugins have {len(self._script.encode()):,} bytes; '
                f'metadata has at most {LARGEST:,}\nput the plugins into the image, and name the module in plugins'
            )

    def create(self) -> None:
        """Asks for the slices, unless they are there or have been asked for."""
        state = _state(self._slices)
        if state is not None:
            self._say(f'launch: queued resource {self._slices.name} is there already: {state}')
            return
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, 'startup.sh')
            path.write_text(self._script)
            _checked(create_command(self._slices, str(path)), _LONG)
        self._say(f'launch: asked for {self._slices.slices} x {self._slices.accelerator}: {self._slices.name}')

    def run(self) -> int:
        """Returns the exit code of the run once it has ended. The slices are deleted then.

        Raises:
            UserError: the queued resource has failed, or gcloud has failed for half an hour.
        """
        answered, reported = time.monotonic(), ''
        while True:
            try:
                if self._look() and self._code is not None:
                    return self._code
                answered, reported = time.monotonic(), ''
            except GcloudError as error:
                if time.monotonic() - answered > _PATIENCE:
                    cost = f'the slices may cost money: {shlex.join(delete_command(self._slices))}'
                    what = (
                        'the run goes on' if self._code is None else f'the run has ended with {self._code}, but {cost}'
                    )
                    raise UserError(f'gcloud has failed for {_PATIENCE / 60:.0f} min; {what}\n{error}') from error
                if str(error) != reported:
                    self._say(f'launch: trying again every {self._every:g} s: {error}')
                    reported = str(error)
            time.sleep(self._every)

    def _look(self) -> bool:
        """Does what is to be done now. Returns whether the run has ended, and its slices are deleted."""
        state = _state(self._slices)
        if self._code is None and state == 'ACTIVE':
            self._code = self._ended()
        if self._code is not None:
            if state is not None:
                _checked(delete_command(self._slices), _LONG)
            return True
        if state is None:
            self._say(f'launch: there is no queued resource {self._slices.name}: asking for it')
            self.create()
        elif state == 'FAILED':
            raise UserError(
                f'queued resource {self._slices.name} has failed\n'
                f'see why: {shlex.join(describe_command(self._slices)[:-1])}\n'
                f'delete it: {shlex.join(delete_command(self._slices))}'
            )
        elif state in _LOST:
            self._say(f'launch: {state}: Google has taken the slices back; asking for new ones')
            _checked(delete_command(self._slices), _LONG)
            self.create()
        if state and state != self._seen:
            self._say(f'launch: {self._slices.name} is {state}')
            self._seen = state
        return False

    def _ended(self) -> int | None:
        """The exit code of the run; None: it trains, or the VMs do not answer."""
        done = run_tool(ssh_command(self._slices, _codes(self._slices)), _WAIT)
        if done.returncode == NO_ANSWER and not self._is_silent:
            self._say(f'launch: the VMs do not answer ssh: {_last(done.stderr)}')
        self._is_silent = done.returncode == NO_ANSWER
        codes = {int(process): int(code) for process, code in _CODE.findall(done.stdout)}
        bad = {process: code for process, code in codes.items() if code not in (DONE, TRY_AGAIN, STOPPED)}
        if bad:
            process, code = next(iter(bad.items()))
            node, worker = divmod(process, self._slices.hosts)
            tail = ssh_command(self._slices, _tail(self._slices.name, 20, False), str(node), str(worker))
            last = run_tool(tail, _WAIT)
            self._say(f'{last.stdout.rstrip()}\nlaunch: process {process} has ended with exit code {code}')
            return MISTAKE if code == CONFIGURATION else code
        if len(codes) < self._slices.processes:
            return None
        return max(codes.values())


def record_of(slices: Slices) -> LaunchRecord:
    """What `status`, `logs` and `stop` need, for the run's launch.json."""
    kept = {key: value for key, value in dataclasses.asdict(slices).items() if key not in ('setup', 'image', 'words')}
    return LaunchRecord(engine='tpu-vm', job=slices.name, nodes=slices.processes, facts=kept)


class TpuVm(Engine):
    """Queued resources, through gcloud."""

    def status(self, record: LaunchRecord) -> str:
        slices = Slices(**record.facts)
        state = _state(slices)
        what = f'{slices.slices} x {slices.accelerator} in {slices.zone}'
        return f'tpu-vm: queued resource {record.job}, {what}: {
            state or "it does not exist: it was stopped, or has ended"
        }'

    def log_command(
        self, record: LaunchRecord, run_dir: AnyPath, process: int | None, lines: int, follow: bool
    ) -> list[str]:
        slices = Slices(**record.facts)
        node, worker = divmod(process or 0, slices.hosts)
        return ssh_command(slices, _tail(slices.name, lines, follow), str(node), str(worker))

    def stop(self, record: LaunchRecord) -> str:
        slices = Slices(**record.facts)
        state = _state(slices)
        if state is None:
            return f'tpu-vm: there is no queued resource {record.job}: it was stopped before, or has ended'
        saved = ''
        if state == 'ACTIVE':
            done = run_tool(ssh_command(slices, _stop(slices)), _GRACE + _WAIT)
            saved = f'; {len(_CODE.findall(done.stdout))} of {slices.processes} processes have saved and ended'
        _checked(delete_command(slices), _LONG)
        return f'tpu-vm: queued resource {record.job} is deleted{saved}'


ENGINE = TpuVm()


def _resource(verb: str, slices: Slices) -> list[str]:
    place = [f'--zone={slices.zone}', *([f'--project={slices.project}'] if slices.project else [])]
    return ['gcloud', 'compute', 'tpus', 'queued-resources', verb, slices.name, *place]


def _codes(slices: Slices) -> str:
    """Shell command: a line for each process that has ended."""
    return (
        f'cd {_STATE}/{slices.name} && [ -e exit-code ] && echo "pretrax: process $(cat process) exit code $(cat '
        'exit-code)"'
    )


def _stop(slices: Slices) -> str:
    wait = f'for i in $(seq {_GRACE}); do [ -e exit-code ] && break; sleep 1; done'
    return f'cd {_STATE}/{slices.name} && sudo touch stop && sudo kill -TERM $(cat pid); {wait}; {_codes(slices)}'


def _tail(name: str, lines: int, follow: bool) -> str:
    return f'tail -n {lines}{" -F" if follow else ""} {_STATE}/{name}/output.txt'


def _state(slices: Slices) -> str | None:
    """The state of a queued resource: WAITING_FOR_RESOURCES, ACTIVE, ...; None: it does not exist."""
    done = run_tool(describe_command(slices), _WAIT)
    if done.returncode and re.search('not.?found', done.stderr, re.IGNORECASE):
        return None
    _check(done)
    return done.stdout.strip() or 'UNKNOWN'


def _checked(command: Sequence[str], seconds: float) -> None:
    _check(run_tool(command, seconds))


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise GcloudError(
            f'{shlex.join(done.args[:6])}: {_last(done.stderr)}\n'
            'if it fails again: gcloud auth login; gcloud compute tpus queued-resources list --zone=ZONE'
        )


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return '\n'.join([*[line for line in lines if line.startswith('ERROR')], *lines][:3])[:600]
