"""Checks hosts over ssh, all at once, before anything starts there."""

import concurrent.futures
import contextlib
import json
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from pretrax.config import RunConfig
from pretrax.doctor.host_facts import Facts, facts, problem_of, remove_token, write_token
from pretrax.errors import UserError
from pretrax.launch.ssh import LOST, NO_DIRECTORY, Host, Ssh, SshLaunch

_MOST_PROBLEMS, _MOST_LINES = 3, 3  # that are shown, and lines of each
_SECONDS = 120.0  # for a host to answer
# What ssh says about a host that it does not reach, and what to do.
_ADVICE = [
    (r'Permission denied', 'let this machine in without a password: ssh-copy-id {host}'),
    (r'Host key verification failed', 'its key is not known here, or has changed: run ssh {host} once'),
    (r'Could not resolve hostname', 'check the spelling, or describe it in ~/.ssh/config'),
    (r'refused', 'start sshd there, or give its port: {target}:PORT'),
    (r'timed out|not responding|No route|unreachable', 'is it switched on? try: ssh {host}'),
]


class _Conversation:
    """A host that runs `pretrax.doctor.host_facts`."""

    def __init__(self, ssh: Ssh, host: Host, request: dict[str, Any]):
        self.host, self._ssh = host, ssh
        line = ssh.python_line(['-m', 'pretrax.doctor.host_facts', json.dumps(request)])
        self._process = subprocess.Popen(
            ssh.command(host, line),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(_SECONDS, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        self.facts: Facts = {}
        self.problem: str | None = None

    def receive(self) -> None:
        """Waits for the facts. Sets `problem` if none come."""
        line = self._read()
        if line is None:
            self.problem = self._why_not()
        else:
            self.facts = line

    def reaches(self, address: str, port: int) -> str | None:
        """Why the host does not reach this port; None: it does."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f'{address} {port}\n')
            self._process.stdin.flush()
        line = self._read()
        return 'it no longer answers' if line is None else line['problem']

    def _read(self) -> Any:
        """The next line of JSON; lines of login scripts are skipped. None: there is none."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                if isinstance(found := json.loads(line), dict):
                    return found
        return None

    def _why_not(self) -> str:
        _, errors = self._process.communicate()
        code, lines = self._process.returncode, [line.strip() for line in errors.splitlines() if line.strip()]
        last = lines[-1][:200] if lines else f'exit code {code}'
        if code == -signal.SIGKILL:
            return f'no answer within {_SECONDS:.0f} s'
        if code == LOST:
            advice = next((advice for words, advice in _ADVICE if re.search(words, errors)), 'try: ssh {host}')
            return f'{last}\n{advice.format(host=self.host.words, target=self.host.target)}'
        if code == NO_DIRECTORY:
            return f'it has no directory {self._ssh.directory}\nput pretrax there, or give its place: --directory PATH'
        if code in (126, 127):
            return f'it has no Python at {self._ssh.python}\ninstall pretrax there, or give its Python: --python PATH'
        if 'No module named' in errors:
            return f'{last}\ninstall the same pretrax there, or give the Python that has it: --python PATH'
        return last

    def close(self) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


def check_hosts(launch: SshLaunch, config: RunConfig, words: Sequence[str]) -> list[Facts]:
    """The facts of all hosts, which can run this configuration.

    Every host answers, has the same directory, pretrax and configuration, sees the same run directory, and reaches the
    first one.

    Args:
        words: the file of the configuration, and changes to it.

    Raises:
        UserError: some hosts do not; the message names them and what to do.
    """
    hosts, ssh = launch.hosts, launch.ssh
    by_address: dict[tuple[str | None, ...], Host] = {}
    for host in hosts:
        found = ssh.settings(host)
        other = by_address.setdefault((found.get('hostname'), found.get('port')), host)
        if other != host:
            raise UserError(
                f'{other.name} and {host.name} are the same host, which runs one process on all its devices\n'
                'nothing was started'
            )
    token = write_token(config)
    request = {'config': words[0], 'overrides': list(words[1:]), 'token': token}
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool, contextlib.ExitStack() as stack:
        stack.callback(remove_token, config, token)
        started = list(pool.map(lambda host: _Conversation(ssh, host, request), hosts))
        for one in started:
            stack.callback(one.close)
        list(pool.map(_Conversation.receive, started))
        own = facts(**request)
        for one in started:
            one.problem = one.problem or problem_of(one.facts, own)
        _raise_problems(started)
        first, *others = started
        address, port = launch.coordinator(first.host), first.facts['port']
        for one, why in zip(others, pool.map(lambda one: one.reaches(address, port), others), strict=True):
            one.problem = why and (
                f'it does not reach {first.host.name} at {address}: {why}\n'
                'open the ports between the hosts, or give another address of it: --coordinator-address ADDRESS'
            )
        _raise_problems(started)
        return [one.facts for one in started]


def _raise_problems(started: Sequence[_Conversation]) -> None:
    """Raises a UserError about the hosts with a problem. The same problem is explained once."""
    by_text: dict[str, list[str]] = {}
    for one in started:
        if one.problem:
            by_text.setdefault(one.problem, []).append(one.host.name)
    if not by_text:
        return
    shown = []
    for text, names in list(by_text.items())[:_MOST_PROBLEMS]:
        shown += f'{", ".join(names)}: {text}'.splitlines()[:_MOST_LINES]
    more = len(by_text) - _MOST_PROBLEMS
    raise UserError('\n'.join([*shown, 'nothing was started' + (f'; {more} more problems' if more > 0 else '')]))


def devices_of_hosts(hosts: Sequence[Host], found: Sequence[Facts]) -> int:
    """Devices of each host: its GPUs, or one CPU. Raises UserError if the hosts differ."""
    gpus = [one['gpus'] for one in found]
    if len(set(gpus)) > 1:
        few, many = min(gpus), max(gpus)
        raise UserError(
            f'{hosts[gpus.index(few)].name} has {few} GPUs, and {hosts[gpus.index(many)].name} has {many}\n'
            f'use as many on each: --devices-per-node {max(few, 1)}'
        )
    return gpus[0] or 1
