"""Supervises a run from inside a Slurm job: starts a step on each node, and restarts all of them when one is lost.

When a node is lost, the supervisor exits with code 75: the job is requeued, and gets other nodes. An elastic run
continues on the remaining nodes instead. The supervisor also exits with 75 when the job is preempted, which Slurm
announces only to the steps. The job of an elastic run has `--no-kill`, with which Slurm does not requeue a job that
loses the node of the supervisor: a step on another node does.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrax.config import RunConfig
from pretrax.errors import TRY_AGAIN, Report, UserError
from pretrax.launch.elastic import Slots
from pretrax.launch.group import identity
from pretrax.launch.node import request
from pretrax.launch.remote import Agents, RemoteGroup, RemoteProcess
from pretrax.launch.restarts import RestartOptions, newest_checkpoint
from pretrax.launch.shipped import fill_template
from pretrax.launch.sizes import misfit
from pretrax.launch.slurm_client import host_names, job_facts, nodes_down
from pretrax.launch.supervisor import Supervisor
from pretrax.observe.attempts import note, read_attempts
from pretrax.storage.locate import working_directory
from pretrax.system.children import Child

ALLOCATED, RELEASED = 'allocated', 'released'  # events in attempts.jsonl
_KILLED = 128 + signal.SIGKILL
_PROBE = 30.0  # seconds in which a node must start a process; Slurm itself waits SlurmdTimeout, usually 300
_LOOK = 0.5  # seconds between two looks at that
# Requeues the job once it has lost the node $1. Slurm does not announce that loss.
_REQUEUE_WITHOUT = fill_template('slurm_requeue.sh')
_FIRST_PORT, _PORTS = 10_000, 20_000  # below those that Linux gives to outgoing connections


class SlurmJob:
    """The job that this process runs in.

    Args:
        environment: environment of a batch script: SLURM_JOB_ID, SLURM_JOB_NODELIST, SLURM_RESTART_COUNT.
        container: image in which the processes run, through Pyxis; None: no container.
        gpus_per_node: GPUs of each process; None: as the job says.
        mounts: directories that the container sees, besides the current one.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        container: str | None = None,
        gpus_per_node: int | None = None,
        mounts: Sequence[Path] = (),
    ):
        if 'SLURM_JOB_ID' not in environment or 'SLURM_JOB_NODELIST' not in environment:
            raise UserError(
                'this is not inside a Slurm job: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set\n'
                'pretrax launch slurm submits one; or write this command in a batch script'
            )
        self.number = environment['SLURM_JOB_ID']
        self.restarts = int(environment.get('SLURM_RESTART_COUNT') or 0)
        self.nodes = host_names(environment['SLURM_JOB_NODELIST'])
        self._container, self._gpus, self._mounts = container, gpus_per_node, mounts
        self._watch: tuple[str, Child] | None = None  # a node, and the step on it
        self._starts = 0

    def start(self, agents: Agents, slots: Sequence[int], command: Sequence[str], attempt: str) -> 'SlurmGroup':
        """Starts a process on each of these nodes, given by their places in the list.

        Args:
            command: that of an agent.
            attempt: the label of this attempt.
        """
        nodes = [self.nodes[slot] for slot in slots]
        port = _FIRST_PORT + (int(self.number) * 31 + self._starts) % _PORTS
        self._starts += 1
        processes = [
            RemoteProcess(
                node,
                [*self.srun(node), *self._in_container(), *command],
                request=request(attempt, identity(number, nodes, f'{nodes[0]}:{port}')),
            )
            for number, node in enumerate(nodes)
        ]
        return SlurmGroup(processes, agents, self)

    def srun(self, node: str) -> list[str]:
        """The command that runs another one on a node of the job, with all that the job has there."""
        gpus = [f'--gpus-per-node={self._gpus}'] if self._gpus else []
        return [
            'srun',
            '--overlap',
            '--export=ALL',
            '--nodes=1',
            '--ntasks=1',
            f'--nodelist={node}',
            '--cpu-bind=none',
            *gpus,
        ]

    def watch(self, node: str) -> None:
        """Starts a step on a node that requeues the job if it loses the first node, unless that step runs."""
        if self._watch is not None:
            if self._watch[0] == node and self._watch[1].poll() is None:
                return
            self.end_watch()
        self._watch = node, self._step(node, 'bash', '-c', _REQUEUE_WITHOUT, 'watch', self.nodes[0])

    def end_watch(self) -> None:
        """Ends that step."""
        if self._watch is not None:
            self._watch[1].kill()
            self._watch[1].wait()
            self._watch = None

    def _in_container(self) -> list[str]:
        if self._container is None:
            return []
        here = Path.cwd()
        mounts = [here, *(path for path in self._mounts if not path.is_relative_to(here))]
        return [
            f'--container-image={self._container}',
            f'--container-mounts={",".join(f"{path}:{path}" for path in mounts)}',
            f'--container-workdir={here}',
        ]

    def gone(self, nodes: Sequence[str]) -> set[str]:
        """The nodes among these that the job has lost: Slurm reports them as down, or they start no process while
        others do. All of them if the job is being preempted; none if Slurm does not answer.
        """
        if self.is_preempted():
            return set(nodes)
        probes = {node: self._step(node, 'true') for node in nodes}
        until = time.monotonic() + _PROBE
        try:
            while True:
                down, codes = nodes_down(nodes), {node: probe.poll() for node, probe in probes.items()}
                silent = {node for node, code in codes.items() if code is None} - down
                if not silent or time.monotonic() >= until:
                    # If none answers, the cause is not a node: the first one runs this program.
                    return down | {node for node, code in codes.items() if code != 0} if 0 in codes.values() else down
                time.sleep(_LOOK)
        finally:
            for probe in probes.values():
                probe.kill()
                probe.wait()

    def _step(self, node: str, *command: str) -> Child:
        """Starts a command on a node, without input and output."""
        return Child([*self.srun(node), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_preempted(self) -> bool:
        """Whether the job is being preempted; False if Slurm does not answer."""
        try:
            return job_facts(self.number).get('PreemptTime', 'None') != 'None'
        except UserError:
            return False


class SlurmGroup(RemoteGroup):
    """The steps of one attempt."""

    def __init__(self, processes: Sequence[RemoteProcess], agents: Agents, job: SlurmJob):
        super().__init__(processes, agents)
        self._job = job

    def gone(self) -> list[int]:
        hosts = self.processes()
        if all(map(self.is_there, range(len(hosts)))):
            return [*range(len(hosts))] if self._job.is_preempted() else []
        lost = self._job.gone(hosts)
        return [number for number, host in enumerate(hosts) if host in lost]


def supervise(
    config: RunConfig,
    job: SlurmJob,
    command: Sequence[str],
    options: RestartOptions,
    *,
    devices_per_node: int,
    say: Report,
) -> int:
    """Trains on the nodes of a job. Returns its exit code; 75: requeue the job.

    Args:
        command: command of the agent of a node.
        options: when the processes are started again; `retries` also counts allocations of the job.
    """
    directory = working_directory(config.run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    step = newest_checkpoint(config.run_dir)
    events = [*read_attempts(config.run_dir)]
    note(directory, ALLOCATED, job=job.number, restarts=job.restarts, nodes=job.nodes, step=step)
    say(
        f'launch: Slurm job {job.number} on {len(job.nodes)} node{"s" if len(job.nodes) > 1 else ""}: '
        f'{", ".join(job.nodes)}{f"; requeued {job.restarts} times" if job.restarts else ""}'
    )
    if (count := fruitless(events, job.number, step)) > options.retries:
        say(f'launch: {count} allocations in a row made no new checkpoint: giving up')
        return 1
    slots = Slots(len(job.nodes), lambda count: misfit(config, count * devices_per_node) is None)

    agents = Agents(directory)

    def start(used: Sequence[int], label: str) -> SlurmGroup:
        if options.elastic and len(used) > 1:
            job.watch(job.nodes[used[1]])
        return job.start(agents, used, command, label)

    def at_end(code: int) -> None:
        note(directory, RELEASED, job=job.number, code=code, preempted=code == TRY_AGAIN and job.is_preempted())

    supervisor = Supervisor(config, start, slots, dataclasses.replace(options, requeued=True), at_end=at_end, say=say)
    try:
        code = supervisor.run()
    finally:
        agents.close()
        job.end_watch()
    return 1 if code == _KILLED else code  # the script requeues a supervisor that was killed itself


def fruitless(events: Sequence[dict], job: str, step: int) -> int:
    """How many of the latest allocations of a job, in a row, left the newest checkpoint at `step`. Preempted ones do
    not count: they are not faults of the run.
    """
    count, was_preempted = 0, False
    for event in reversed(events):
        if event.get('job') == job and event['event'] == RELEASED:
            was_preempted = bool(event.get('preempted'))
        elif event.get('job') == job and event['event'] == ALLOCATED:
            if event.get('step') != step:
                break
            count, was_preempted = count + (not was_preempted), False
    return count


def node_python(container: str | None) -> str:
    """The Python that runs pretrax on a node: that of the image, or this one."""
    return sys.executable if container is None else 'python'


def devices_here(gpus_per_node: int | None) -> int:
    """Devices of a process: GPUs, or the simulated ones of a CPU."""
    return gpus_per_node or int(os.environ.get('JAX_NUM_CPU_DEVICES') or 1)
