"""Hosts that are reached over ssh: each is a real sshd on an address of its own, 127.0.0.2 and so on.

As root, each has its own process ids, so that ending it ends everything that runs there, as a power cut does.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which('sshd') or '/usr/sbin/sshd'
MISSING = None if Path(SSHD).exists() else 'no sshd: apt-get install openssh-server'
NAMESPACE = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc']
SERVER = """
Port {port}
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
SetEnv {environment}
"""
CLIENT = """
Host box*
  Port {port}
  IdentityFile {directory}/key
  IdentitiesOnly yes
  UserKnownHostsFile {directory}/known_hosts
  {more}
"""


@dataclass
class Boxes:
    """The hosts 'box1', 'box2' and so on.

    Attributes:
        config: configuration of the ssh client, for `ssh -F`.
    """

    directory: Path
    names: list[str]
    port: int
    environment: dict[str, str]
    config: Path = field(init=False)
    _running: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __post_init__(self):
        self.config = self.directory / 'config'
        self.configure()
        for name in ('key', 'host_key'):
            subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', self.directory / name], check=True)
        (self.directory / 'authorized_keys').write_bytes((self.directory / 'key.pub').read_bytes())
        key = (self.directory / 'host_key.pub').read_text()
        known = [f'[{self.address(name)}]:{self.port} {key}' for name in self.names]
        (self.directory / 'known_hosts').write_text(''.join(known))
        Path('/run/sshd').mkdir(exist_ok=True)

    def address(self, name: str) -> str:
        return f'127.0.0.{self.names.index(name) + 2}'

    def configure(self, *lines: str) -> None:
        """Writes the configuration of the client, with these lines for all hosts."""
        hosts = ''.join(f'Host {name}\n  HostName {self.address(name)}\n' for name in self.names)
        more = '\n  '.join(lines)
        self.config.write_text(hosts + CLIENT.format(port=self.port, directory=self.directory, more=more))

    def start(self, name: str, private: Path | None = None) -> None:
        """Starts a host. At the path `private`, if given, it sees an empty directory of its own."""
        environment = ' '.join(f'"{key}={value}"' for key, value in self.environment.items())
        address, file = self.address(name), self.directory / f'{name}.sshd'
        file.write_text(SERVER.format(
            port=self.port, address=address, directory=self.directory, environment=environment
        ))  # fmt: skip
        mounted = ['sh', '-c', f'mount -t tmpfs none {private} && exec "$@"', 'sh'] if private else []
        with (self.directory / f'{name}.log').open('ab') as log:
            self._running[name] = subprocess.Popen(
                [*(NAMESPACE if os.getuid() == 0 else []), *mounted, SSHD, '-D', '-e', '-f', file],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection((address, self.port), 1).close()
                return
            except ConnectionRefusedError:
                log = (self.directory / f'{name}.log').read_text()
                assert time.monotonic() < until, log
                assert self._running[name].poll() is None, log
                time.sleep(0.02)

    def cut_power(self, name: str) -> None:
        """Ends a host and everything that runs on it, without notice."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def freeze(self, name: str, number: int = signal.SIGSTOP) -> None:
        """Stops everything on a host, as when its network is gone; with SIGCONT it runs again."""
        for process in reversed(descendants(self._running[name].pid)):
            os.kill(process, number)


def descendants(process: int) -> list[int]:
    """A process and all that it has started, parents first."""
    children = Path(f'/proc/{process}/task/{process}/children').read_text().split()
    return [process, *(found for child in children for found in descendants(int(child)))]


def running(*words: str) -> list[int]:
    """The processes whose command lines have these words."""
    found = []
    for path in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):
            line = (path / 'cmdline').read_bytes().decode(errors='replace').split('\0')
            if all(word in line for word in words):
                found.append(int(path.name))
    return found


def open_files(process: int) -> set[str]:
    """The names of the files that a process has open; some may be closed meanwhile."""
    names = set()
    with contextlib.suppress(OSError):
        for file in list(Path(f'/proc/{process}/fd').iterdir()):
            with contextlib.suppress(OSError):
                names.add(os.path.basename(os.readlink(file)))
    return names


def training(run_dir: Path, number: int, verb: str = 'train') -> int:
    """The process that trains as this number in a run directory, on any host; with 'node', the one that started it.

    It has its file for stacks open: the environment of a standby that took its place does not have the number.
    """
    for process in running('pretrax', 'train', f'run_dir={run_dir}'):
        if f'process-{number}.txt' in open_files(process):
            return process if verb == 'train' else parent(process)
    raise AssertionError(f'process {number} does not run')


def memory_of(process: int) -> Path:
    """The directory for the states in memory of a process that trains."""
    variables = dict(
        line.split('=', 1) for line in Path(f'/proc/{process}/environ').read_text().split('\0') if '=' in line
    )
    return Path(variables['PRETRAX_MEMORY'])


def parent(process: int) -> int:
    return int(Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[1])


@contextlib.contextmanager
def boxes(directory: Path, count: int, environment: dict[str, str]) -> Iterator[Boxes]:
    """Starts hosts; a program that is started there has this environment."""
    with socket.create_server(('127.0.0.2', 0)) as free:
        port = free.getsockname()[1]
    started = Boxes(directory, [f'box{number}' for number in range(1, count + 1)], port, environment)
    try:
        for name in started.names:
            started.start(name)
        yield started
    finally:
        for name in list(started._running):
            started.cut_power(name)
