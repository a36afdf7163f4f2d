"""Runs on hosts that are reached with OpenSSH: for a few machines without a scheduler.

Each host runs `pretrax launch node --lasting`, which ends when the connection does. `~/.ssh/config` is respected.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from pretrax.errors import Report, UserError, system_errors
from pretrax.launch.group import identity, likely_free_port
from pretrax.launch.node import request
from pretrax.launch.options import SshOptions
from pretrax.launch.remote import Agents, RemoteGroup, RemoteProcess
from pretrax.launch.sizes import restricted_to
from pretrax.system.children import Child

LOST = 255  # exit code of `ssh` if there is no connection, or if it broke
NO_DIRECTORY = 41  # exit code of the program on a host
_DEFAULTS = {
    'connecttimeout': ('none', 'ConnectTimeout=10'),
    'serveraliveinterval': ('0', 'ServerAliveInterval=5'),
}
_HOST = re.compile(
    r'(?P<target>(?:[^@\s:/-][^@\s:/]*@)?(?:\[[0-9A-Fa-f:.%]+\]|[^@\s:/\[\]-][^@\s:/\[\]]*))(?::(?P<port>\d+))?'
)
_PROBE_SECONDS = 20.0  # for a host to answer
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0  # seconds between two attempts to reach a host


@dataclasses.dataclass(frozen=True)
class Host:
    """A host as the user names it, such as 'user@box3:2222'."""

    name: str
    target: str
    port: str | None = None

    @property
    def address(self) -> list[str]:
        """The arguments of ssh that name it."""
        return [*(['-p', self.port] if self.port else []), self.target]

    @property
    def words(self) -> str:
        """`address` as one string."""
        return shlex.join(self.address)


def parse_hosts(texts: Sequence[str]) -> list[Host]:
    """The hosts of a list such as ['box1', 'user@box3:2222'].

    Raises:
        UserError: one of them is not the name of a host, or occurs twice.
    """
    hosts = []
    for text in texts:
        match = _HOST.fullmatch(text)
        if match is None:
            raise UserError(f'{text!r} is not a host\nexpected box1, user@box1, box1:2222 or [fe80::1]:2222')
        hosts.append(Host(text, match['target'].replace('[', '').replace(']', ''), match['port']))
    twice = sorted({host.name for host in hosts if hosts.count(host) > 1})
    if twice:
        raise UserError(f'{twice[0]} is listed twice; each host runs one process, which uses all its devices')
    if not hosts:
        raise UserError('there are no hosts\ngive --hosts box1,box2 or --hosts-file FILE')
    return hosts


def hosts_of(options: SshOptions) -> list[Host]:
    """The hosts that the options name. Raises UserError."""
    if (options.hosts is None) == (options.hosts_file is None):
        raise UserError('give --hosts box1,box2 or --hosts-file FILE' + (', not both' if options.hosts else ''))
    return parse_hosts(
        (options.hosts or '').split(',') if options.hosts_file is None else read_hosts(options.hosts_file)
    )


def read_hosts(file: pathlib.Path) -> list[str]:
    """The hosts in a file, one per line; `#` begins a comment. Raises UserError."""
    with system_errors(f'--hosts-file: {file} cannot be read'):
        lines = file.read_text('utf-8').splitlines()
    return [text for line in lines if (text := line.partition('#')[0].strip())]


class Ssh:
    """How commands run on hosts.

    Args:
        program: 'ssh', with options of its own.
        directory: the working directory on the hosts; it may begin with '~/'.
        python: Python with pretrax on the hosts.

    Raises:
        UserError: there is no such program.
    """

    def __init__(self, program: str, directory: str, python: str):
        self.program = shlex.split(program)
        self.directory, self.python = directory, python
        self._settings: dict[Host, Mapping[str, str]] = {}
        if not self.program or shutil.which(self.program[0]) is None:
            raise UserError(f'there is no {program or "ssh"!r} on this machine: apt-get install openssh-client')

    def settings(self, host: Host) -> Mapping[str, str]:
        """What ssh would use for a host, after its configuration files: {'hostname': ..., 'port': ...}."""
        if host in self._settings:
            return self._settings[host]
        done = subprocess.run([*self.program, '-G', *host.address], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f'{shlex.join(self.program)} fails: {(done.stderr.strip().splitlines() or ["?"])[0][:200]}')
        pairs = (line.partition(' ') for line in done.stdout.splitlines())
        self._settings[host] = {key: value for key, _, value in pairs}
        return self._settings[host]

    def command(self, host: Host, text: str) -> list[str]:
        """The local command that runs a line of a shell on a host."""
        found = self.settings(host)
        options = ['BatchMode=yes', 'ControlPath=none', 'ClearAllForwardings=yes']
        options += [option for key, (default, option) in _DEFAULTS.items() if found.get(key, default) == default]
        return [*self.program, '-T', *(f'-o{option}' for option in options), *host.address, text]

    def python_line(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """The line of a shell that runs Python in the directory."""
        assignments = [f'{name}={value}' for name, value in (environment or {}).items()]
        program = shlex.join(['exec', *(['env', *assignments] if assignments else []), self.python, *arguments])
        home, _, rest = self.directory.partition('/')
        place = f'~/{shlex.quote(rest)}' if home == '~' and rest else shlex.quote(self.directory)
        return f'cd {place} || exit {NO_DIRECTORY}; {program}'


class Probe:
    """Finds out in the background which hosts can be reached."""

    def __init__(self, ssh: Ssh, hosts: Collection[Host]):
        self._began = time.monotonic()
        self._asked = {
            host: Child(ssh.command(host, 'exit 0'), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for host in hosts
        }

    def is_over(self) -> bool:
        """Whether all hosts have answered or failed to, or have had enough time."""
        is_late = time.monotonic() - self._began > _PROBE_SECONDS
        return is_late or all(process.poll() is not None for process in self._asked.values())

    def answers(self) -> set[Host]:
        """Waits a limited time, and returns the hosts that answer: sshd may do so while a login shell hangs."""
        until = self._began + _PROBE_SECONDS
        for process in self._asked.values():
            process.wait_up_to(until - time.monotonic())
        self.close()
        return {host for host, process in self._asked.items() if process.returncode == 0}

    def close(self) -> None:
        for process in self._asked.values():
            process.kill()
            process.wait()


class SshLaunch:
    """Starts the processes of an attempt, one on each host.

    Args:
        options: the hosts, and how they are reached. A slot is an index of a host.
        arguments: arguments of `pretrax launch node`.

    Attributes:
        lost: hosts that are waited for before an attempt.
    """

    def __init__(
        self,
        options: SshOptions,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: pathlib.Path,
        say: Report = print,
    ):
        self.hosts = hosts_of(options)
        if options.spares >= len(self.hosts):
            raise UserError(
                f'--spares {options.spares}: there are {len(self.hosts)} hosts, and at least one must train'
            )
        self.spares = [*range(len(self.hosts) - options.spares, len(self.hosts))]  # for `Slots`
        self.ssh = Ssh(options.program, options.directory or os.getcwd(), options.python or sys.executable)
        self.directory, self.say, self._coordinator = directory, say, options.coordinator
        self.patience = 0.0 if options.elastic else 60 * options.patience  # seconds for lost hosts to come back
        self.lost: set[Host] = set()
        self._arguments, self._environment = arguments, {**restricted_to(options.devices), **environment}
        self.agents = Agents(directory)
        self._probe: Probe | None = None
        self._next_probe = 0.0

    def start(self, slots: Sequence[int], attempt: str) -> 'SshGroup':
        """The processes of an attempt, for `Supervisor`. Spare hosts get an agent with a standby."""
        for spare in self.spares:
            self.agents.prepare(self.agent(self.hosts[spare]))
        return SshGroup(self, [self.hosts[slot] for slot in slots], attempt)

    def processes(self, hosts: Sequence[Host], attempt: str | None = None) -> list[RemoteProcess]:
        """How the processes on these hosts are started; the port of the first one is random.

        `attempt`: its label; None: each command trains once, and has its identity in its environment.
        """
        address = self.coordinator(hosts[0])
        coordinator = f'{f"[{address}]" if ":" in address else address}:{likely_free_port()}'
        names = [host.name for host in hosts]
        identities = [identity(number, names, coordinator) for number in range(len(hosts))]
        if attempt is None:
            return [self._process(host, '--controlled', own) for host, own in zip(hosts, identities, strict=True)]
        return [self.agent(host, request(attempt, own)) for host, own in zip(hosts, identities, strict=True)]

    def agent(self, host: Host, asked: bytes = b'') -> RemoteProcess:
        """How the agent of a host is started, and what asks it for a training."""
        return self._process(host, '--lasting', {})._replace(request=asked)

    def _process(self, host: Host, flag: str, own: Mapping[str, str]) -> RemoteProcess:
        arguments = ['-m', 'pretrax', 'launch', 'node', *self._arguments, flag]
        line = self.ssh.python_line(arguments, {**own, **self._environment})
        return RemoteProcess(host.name, self.ssh.command(host, line))

    def coordinator(self, host: Host) -> str:
        """The address of a host as the others see it."""
        if self._coordinator is not None and host == self.hosts[0]:
            return self._coordinator
        return self.ssh.settings(host).get('hostname', host.target)

    def ready(self, slots: Collection[int]) -> list[int]:
        """The slots whose hosts have just answered. It does not block: a later call returns the answers."""
        if self._probe is None:
            if time.monotonic() >= self._next_probe:
                self._probe = Probe(self.ssh, [self.hosts[slot] for slot in slots])
                self._next_probe = time.monotonic() + _FIRST_WAIT
            return []
        if not self._probe.is_over():
            return []
        answers, self._probe = self._probe.answers(), None
        self.lost -= answers
        return [slot for slot in slots if self.hosts[slot] in answers]


class SshGroup(RemoteGroup):
    """One process on each host. Hosts that were lost are waited for before all of them are started.

    Args:
        launch: hosts that are lost are added to its `lost`.
    """

    def __init__(self, launch: SshLaunch, hosts: Sequence[Host], attempt: str):
        self._ssh, self._hosts, self._lost, self._say = launch.ssh, hosts, launch.lost, launch.say
        self._until, self._pause = time.monotonic() + launch.patience, _FIRST_WAIT
        self._next_look = time.monotonic()
        self._probe: Probe | None = None
        self._given_up: dict[int, int] = {}
        self._missing = {host for host in hosts if host in launch.lost}
        if self._missing:
            launch.say(f'launch: waiting up to {launch.patience:.0f} s for {_names(self._missing)}')
        super().__init__(launch.processes(hosts, attempt), launch.agents, at_once=not self._missing)

    def codes(self) -> dict[int, int]:
        if self._given_up:
            return self._given_up
        if self._missing:
            self._look_for_missing()
            return {}
        return {number: -signal.SIGHUP if code == LOST else code for number, code in super().codes().items()}

    def _look_for_missing(self) -> None:
        if self._probe is not None and self._probe.is_over():
            self._missing -= self._probe.answers()
            self._probe = None
        if not self._missing:
            self._lost.clear()
            self.start_all()
        elif time.monotonic() >= self._until:
            self._say(f'launch: no answer from {_names(self._missing)}')
            self._give_up(-signal.SIGHUP)
        elif self._probe is None and time.monotonic() >= self._next_look:
            self._probe = Probe(self._ssh, self._missing)
            self._next_look = time.monotonic() + self._pause
            self._pause = min(_LONGEST_WAIT, 2 * self._pause)

    def _give_up(self, code: int) -> None:
        self._given_up = {number: code for number, host in enumerate(self._hosts) if host in self._missing}

    def send(self, number: int) -> None:
        if self._missing and number in (signal.SIGINT, signal.SIGTERM):
            self._give_up(-number)
        super().send(number)

    def end(self) -> None:
        if self._probe is not None:
            self._probe.close()
        super().end()

    def gone(self) -> Sequence[int]:
        """The processes whose hosts do not answer."""
        doubtful = {
            host: number
            for number, host in enumerate(self._hosts)
            if host in self._missing or not self.is_there(number)
        }
        self._lost |= set(doubtful) - Probe(self._ssh, doubtful).answers()
        return [number for host, number in doubtful.items() if host in self._lost]


def _names(hosts: Collection[Host]) -> str:
    return ' and '.join(sorted(host.name for host in hosts))
