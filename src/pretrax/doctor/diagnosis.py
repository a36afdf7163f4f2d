"""Examines the machines of a run, from the first check to the table."""

import contextlib
import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from pretrax.doctor.checks import DEVICES, JOIN, JOIN_FIX, MACHINE, Check
from pretrax.doctor.comparison import Diagnosis, Row, compare_nodes, names_of, slow_pairs
from pretrax.doctor.findings import Context, Finding, failure
from pretrax.doctor.network import clock_findings, connections, listen, shared_directory, token
from pretrax.errors import first_line
from pretrax.system.children import Child
from pretrax.system.rendezvous import AbsentError, Rendezvous

_NOISE = ('WARNING', 'I0', 'W0', '*** Check', '    @', '===', 'RPC:', 'Fatal Python')
_UNREACHED = (
    'is process 0 running, and on that host? then open that port between the nodes; JAX_COORDINATOR_ADDRESS sets it'
)
_ABSENT = 'look at the output of that node: was it started, does it run the same command, can it reach the first node?'


class ProbeProcess(contextlib.AbstractContextManager['ProbeProcess']):
    """The process, which imports JAX at once and waits for `run`. The end of the block kills it.

    Args:
        arguments: CONFIG and KEY=VALUE of the command line; may be empty.
    """

    def __init__(self, arguments: Sequence[str]):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the block
        variables = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'PYTHONWARNINGS': 'ignore'}
        command = [sys.executable, '-m', 'pretrax.doctor.probe', *(arguments or [''])]
        streams = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': self._errors}
        self._process = Child(command, variables | os.environ, **streams)

    def __exit__(self, *_: object) -> None:
        self._process.kill_all()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(OSError):
                file.close()

    def run(self, seconds: float) -> list[Finding]:
        """The findings of all checks.

        Args:
            seconds: for each check.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f'{seconds}\n'.encode())
            self._process.stdin.flush()
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        found: list[Finding] = []
        fixes, at = {check.name: check.fix for check in DEVICES} | {JOIN: JOIN_FIX}, JOIN
        until = time.monotonic() + seconds
        while True:
            try:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                found.append(failure(at, f'no result within {seconds:.0f} s', fixes[at]))
                return found
            if not line:
                found.append(failure(at, f'{self._end()}', fixes[at]))
                return found
            value = json.loads(line)
            if value == '':
                return found
            if isinstance(value, str):
                at, until = value, time.monotonic() + seconds
            else:
                found.append(Finding.from_json(value))

    def _read(self, lines: queue.Queue[bytes]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.put(line)
        lines.put(b'')

    def _end(self) -> str:
        """How the process has ended, in a line."""
        self._process.wait_up_to(10)
        code = self._process.poll() or 0
        how = f'ended by {signal.Signals(-code).name}' if code < 0 else f'ended with exit code {code}'
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors='replace').splitlines() if line.strip()]
        useful = [line for line in lines if not line.startswith(_NOISE)] or lines
        return f'{how}: {useful[-1][:200]}' if useful else how


def diagnose(context: Context, coordinator: str, arguments: Sequence[str], seconds: float) -> Diagnosis | int:
    """Runs all checks, together with the other processes.

    Args:
        coordinator: HOST:PORT of process 0; '' if there is one process.
        arguments: CONFIG and KEY=VALUE of the command line; may be empty.
        seconds: for each process to arrive, and for each check.

    Returns:
        In process 0 what was found; in others the exit code that process 0 has decided, or what was found here if
        process 0 cannot be reached.
    """
    began = time.monotonic()
    with ProbeProcess(arguments) as probe:  # imports JAX meanwhile
        found = [*check_machine(context)]
        calls = Rendezvous(coordinator, context.index, context.processes, seconds)
        try:
            calls.assemble()
            return _together(context, calls, probe, found, began)
        except AbsentError as error:
            lost = failure('first node', str(error), _UNREACHED)
            rows = compare_nodes({context.index: [*found, lost]})
            return Diagnosis(rows, {context.index: context.host}, time.monotonic() - began)
        finally:
            calls.close()


def check_machine(context: Context) -> list[Finding]:
    """The findings of all checks of the machine. A check that fails, or does not end, is a finding."""
    found: list[Finding] = []
    for check in MACHINE:
        name = getattr(check, '__name__', 'check').replace('_', ' ')
        results: list[Finding] = []
        # A daemon, so that one that hangs on a disk does not keep the process.
        thread = threading.Thread(
            target=lambda check=check, to=results: to.extend(_findings(check, context)), daemon=True
        )
        thread.start()
        limit = context.seconds / 2  # the other processes wait for this one as long as `seconds`
        thread.join(limit)
        if thread.is_alive():
            found.append(failure(name, f'no result within {limit:.0f} s', 'look at the disks of this node: df, dmesg'))
        else:
            found += results
    return found


def _findings(check: Check, context: Context) -> list[Finding]:
    try:
        return list(check(context))
    except Exception as error:  # a system that is unlike those we know
        name = getattr(check, '__name__', 'check').replace('_', ' ')
        fix = 'please report this; the other checks have run'
        return [Finding(name, f'{type(error).__name__}: {first_line(error)[:200]}', 'warning', fix)]


def _together(
    context: Context, calls: Rendezvous, probe: ProbeProcess, found: list[Finding], began: float
) -> Diagnosis | int:
    clocks = clock_findings(calls.clocks())
    listener = listen()
    hello = {'host': context.host, 'port': listener.getsockname()[1], 'found': [finding.to_json() for finding in found]}
    arrived = calls.gather(hello)
    with token(context) as path:
        addresses = calls.addresses()
        others = {
            index: {'host': value['host'], 'port': value['port'], 'address': addresses.get(index, '')}
            for index, value in arrived.items()
        }
        complete = len(arrived) == context.processes
        order = calls.share({'others': others, 'token': path, 'complete': complete})
        peers = {int(index): value for index, value in order['others'].items()}
        more: list[Finding] = []
        if len(peers) > 1:
            more += connections(context, peers)
            more += shared_directory(context, order['token'])
        if order['complete']:
            more += probe.run(calls.seconds)
        # Each of the checks of the devices of all nodes has a limit of its own.
        later = calls.gather([finding.to_json() for finding in more], 10 * calls.seconds)
    if context.index:
        code = int(calls.share())
        listener.close()  # only now: others may have connected until process 0 had their findings
        return code
    listener.close()
    everything = {
        index: [Finding.from_json(finding) for finding in [*value['found'], *later.get(index, [])]]
        for index, value in arrived.items()
    }
    for index, finding in clocks.items():
        everything.get(index, []).append(finding)
    hosts = {index: arrived[index]['host'] if index in arrived else '' for index in range(context.processes)}
    names = names_of(hosts)
    rows = _rows(everything, names)
    rows += [Row('nodes', 'failure', (index,), why, _ABSENT) for index, why in sorted(calls.lost.items())]
    if not complete:
        rows.append(
            Row('devices', 'warning', (0,), 'not checked: not all nodes are here', 'start again with all nodes')
        )
    result = Diagnosis(rows, names, time.monotonic() - began)
    calls.share(result.exit_code)
    return result


def _rows(everything: dict[int, list[Finding]], names: dict[int, str]) -> list[Row]:
    measured: dict[tuple[int, int], float] = {}
    for findings in everything.values():
        for finding in [finding for finding in findings if finding.check == 'pair']:
            a, b = map(int, finding.result.split())
            measured[a, b] = finding.amount or 0.0
            findings.remove(finding)
    every = tuple(everything)
    rows = compare_nodes(everything)
    rows += [Row(f.check, f.status, every, f.result, f.fix) for f in slow_pairs(measured, names)]
    return [
        dataclasses.replace(row, result=re.sub(r'\bprocess (\d+)', lambda m: names.get(int(m[1]), m[0]), row.result))
        for row in rows
    ]
