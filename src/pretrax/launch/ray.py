"""Runs on an existing Ray cluster: one actor per worker, which runs `pretrax launch node` on its node.

Ray places the workers and notices nodes that are lost; restarts are decided by `pretrax.launch.supervisor`, as
everywhere. Ray's own `JaxTrainer` is not used: it does not initialize `jax.distributed` on CPUs.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pretrax.doctor.host_facts import Facts, facts, problem_of
from pretrax.errors import MISTAKE, Report
from pretrax.launch.group import Group, copy_output, free_port, identity, last_lines, output_file
from pretrax.launch.ray_cluster import Cluster, Place
from pretrax.launch.remote import from_shell
from pretrax.system.children import Child

_PLACED_SECONDS = 5.0  # to wait for the placement of workers before the launcher goes on
_REPORT_SECONDS = 10.0  # after which the user learns that workers wait for resources
_ELASTIC_SECONDS = 20.0  # that an elastic run waits for resources, before it goes on with what is there
_READ_SECONDS = 1.0  # that a worker waits for output
_END_SECONDS = 20.0  # for actors to end their processes


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a run."""

    count: int  # how many
    bundle: Mapping[str, float]  # the resources of each: {'CPU': 1, 'GPU': 8}
    arguments: Sequence[str]  # arguments of `pretrax launch node`
    words: Sequence[str]  # the file of the configuration and its changes
    token: str  # from `host_facts.write_token`
    directory: str  # the working directory on all nodes
    environment: Mapping[str, str]  # environment of the processes, besides their identity
    # The facts of this machine, which those of all nodes must match. They are asked for again at each start: a shared
    # checkout may change meanwhile.
    own: Facts = dataclasses.field(default_factory=dict)


class RayLaunch:
    """Starts the workers of an attempt.

    Args:
        directory: the run directory on this machine, for the output of the workers.
        elastic: go on without workers for which there are no resources.
    """

    def __init__(self, cluster: Cluster, workers: Workers, directory: pathlib.Path, elastic: bool, say: Report = print):
        self.cluster, self._workers, self.directory = cluster, workers, directory
        self.elastic, self.say = elastic, say
        self.strategy = cluster.strategy(workers.count)
        if self.strategy == 'SPREAD':
            say(f'launch: fewer than {workers.count} nodes have room for a worker, so some nodes get several')
        self.checked: set[str] = set()  # nodes that were found to be right
        self._wanted: list[Place] = []  # places for slots that are left out

    def start(self, slots: Sequence[int], attempt: str) -> 'RayGroup':
        """The workers of an attempt, for `Supervisor`."""
        while self._wanted:
            self.cluster.release(self._wanted.pop())
        workers = dataclasses.replace(
            self._workers,
            count=len(slots),
            arguments=[*self._workers.arguments, '--attempt', attempt],
            own=facts(self._workers.words[0], self._workers.words[1:], self._workers.token),
        )
        return RayGroup(self, workers)

    def ready(self, slots: Collection[int]) -> list[int]:
        """The slots for which the cluster has reserved resources. It returns at once.

        Nothing is reserved until there are more nodes than workers, if each worker has a node of its own.
        """
        room = self.cluster.room()
        places = sum(one > 0 for one in room) if self.strategy == 'STRICT_SPREAD' else sum(room)
        count = max(0, min(len(slots), places - (self._workers.count - len(slots))))
        while len(self._wanted) > count:
            self.cluster.release(self._wanted.pop())
        while len(self._wanted) < count:
            self._wanted.append(self.cluster.reserve(1, 'SPREAD'))
        return sorted(slots)[: sum(self.cluster.is_reserved(place) for place in self._wanted)]


class RayGroup(Group):
    """One actor per worker. They are placed, checked and started while `codes` is called.

    Args:
        launch: nodes that were found to be right are added to its `checked`.
    """

    def __init__(self, launch: RayLaunch, workers: Workers):
        cluster, directory = launch.cluster, launch.directory
        self._cluster, self._ray, self._workers, self._checked = cluster, cluster.ray, workers, launch.checked
        self._elastic, self._say, self._directory = launch.elastic, launch.say, directory
        self._nodes: list[str] = []  # of each worker
        self._names: dict[str, str] = {}
        self._actors: list[Any] = []
        self._asked: dict[int, Any] = {}  # answers about nodes that are not checked
        self._port: Any = None
        self._running: dict[int, Any] = {}
        self._reading: dict[int, Any] = {}
        self._read = [0] * workers.count  # bytes of output
        self._codes: dict[int, int] = {}
        self._broken: set[int] = set()  # workers whose actors are lost
        self._began, self._has_reported = time.monotonic(), False
        (directory / 'output').mkdir(parents=True, exist_ok=True)
        files = [output_file(directory, number) for number in range(workers.count)]
        self._begins = [file.stat().st_size if file.exists() else 0 for file in files]  # of the output of this attempt
        self._place: Place | None = cluster.reserve(workers.count, launch.strategy)
        cluster.is_reserved(self._place, _PLACED_SECONDS)
        self._create_actors()

    def __len__(self) -> int:
        return self._workers.count

    def codes(self) -> dict[int, int]:
        if not self._codes:
            if not self._actors:
                self._create_actors()
            elif not self._running:
                self._start()
        for number, code in self._ended(self._running).items():
            self._codes[number] = from_shell(code)
        for number, piece in self._ended(self._reading).items():
            self._copy(number, piece)
            self._reading[number] = self._actors[number].read.remote(self._read[number], _READ_SECONDS)
        return dict(self._codes)

    def _create_actors(self) -> None:
        """Creates the actors once there are resources for them."""
        if self._place is None or not self._cluster.is_reserved(self._place):
            self._wait_for_resources()
            return
        self._nodes = self._cluster.nodes_of(self._place)
        alive = {node['NodeID']: node for node in self._cluster.nodes()}
        self._names = {node: alive[node]['NodeManagerHostname'] for node in self._nodes if node in alive}
        self._actors = [self._cluster.actor(RayWorker, self._place, number) for number in range(len(self))]
        for number, node in enumerate(self._nodes):
            if node not in self._checked:
                question = self._workers.directory, self._workers.words, self._workers.token
                self._asked[number] = self._actors[number].facts.remote(*question)
        self._address = alive.get(self._nodes[0], {}).get('NodeManagerAddress', '')
        self._port = self._actors[0].free_port.remote()

    def _wait_for_resources(self) -> None:
        waited = time.monotonic() - self._began
        if waited > _REPORT_SECONDS and not self._has_reported:
            self._has_reported = True
            self._say(f'launch: waiting for resources: {sum(self._cluster.room())} of {len(self)} workers have a node')
        if self._elastic and waited > _ELASTIC_SECONDS:
            missing = max(1, len(self) - sum(self._cluster.room()))
            self._codes = dict.fromkeys(range(max(1, len(self) - missing), len(self)), -signal.SIGHUP)

    def _start(self) -> None:
        """Starts the processes once all nodes are found to be right."""
        for number, found in self._ended(self._asked).items():
            problem = found['problem'] if len(found) == 1 else problem_of(found, self._workers.own)
            if problem is None:
                self._checked.add(self._nodes[number])
            else:
                self._say(f'launch: {self.host(number)}: {problem}')
                self._codes[number] = MISTAKE
        if self._codes or self._asked:
            return
        port = self._ended({0: self._port}).get(0)
        if port is None:
            return
        hosts = [self.host(number) for number in range(len(self))]
        for number, actor in enumerate(self._actors):
            arguments = ['-m', 'pretrax', 'launch', 'node', *self._workers.arguments, '--controlled']
            environment = identity(number, hosts, f'{self._address}:{port}') | dict(self._workers.environment)
            self._running[number] = actor.run.remote(arguments, self._workers.directory, environment)
            self._reading[number] = actor.read.remote(0, _READ_SECONDS)

    def _ended(self, calls: dict[int, Any]) -> dict[int, Any]:
        """The results of the calls that have ended, which are removed. A worker whose call fails is lost."""
        if not calls:
            return {}
        found = {}
        ended, _ = self._ray.wait(list(calls.values()), num_returns=len(calls), timeout=0)
        for number in [number for number, call in calls.items() if call in ended]:
            try:
                found[number] = self._ray.get(calls.pop(number))
            except self._ray.exceptions.RayError as error:
                self._lose(number, error)
        return found

    def _lose(self, number: int, error: Exception) -> None:
        if number in self._codes:
            return
        if 'No module named' in str(error):
            self._codes[number] = MISTAKE
            reason = str(error).strip().splitlines()[-1]
            self._say(
                f'launch: {self.host(number)}: {reason}: install the same pretrax in the Python that Ray uses there'
            )
            return
        self._codes[number] = -signal.SIGKILL
        self._broken.add(number)

    def send(self, number: int) -> None:
        if not self._running:
            if number in (signal.SIGINT, signal.SIGTERM):
                self._codes = dict.fromkeys(range(len(self)), -number)
            return
        for actor in self._actors:
            actor.send.remote(number)

    def end(self) -> None:
        """Ends the processes of all workers, then their actors."""
        if self._place is None:
            return
        here = [actor for number, actor in enumerate(self._actors) if number not in self._broken]
        self._ray.wait(
            [actor.end.remote() for actor in here], num_returns=len(here), timeout=_END_SECONDS
        ) if here else None
        for number in set(self._reading) - self._broken:
            read = self._actors[number].read
            with contextlib.suppress(self._ray.exceptions.RayError):
                while piece := self._ray.get(read.remote(self._read[number], 0), timeout=_END_SECONDS):
                    self._copy(number, piece)  # the rest of its output
        for actor in self._actors:
            self._ray.kill(actor)
        self._cluster.release(self._place)
        self._place = None

    def _copy(self, number: int, piece: bytes) -> None:
        self._read[number] += len(piece)
        copy_output(self._directory, number, piece)

    def host(self, number: int) -> str:
        return self._names.get(self._nodes[number], 'a lost node') if self._nodes else 'no node yet'

    def tail(self, number: int) -> list[str]:
        file = output_file(self._directory, number)
        return last_lines(file, self._begins[number]) if file.exists() else []

    def gone(self) -> Sequence[int]:
        """The workers whose nodes have left the cluster, and those for which there were no resources."""
        if not self._nodes:
            return [number for number, code in self._codes.items() if code == -signal.SIGHUP]
        return [number for number in sorted(self._broken) if not self._cluster.is_alive(self._nodes[number])]


_NODE_SECONDS = 10.0  # seconds for the node command to end its training
_LOOK = 0.1  # seconds between two looks for output


class RayWorker:
    """A Ray actor: it runs `pretrax launch node` on its node. Several methods run at once. It needs no Ray."""

    def __init__(self) -> None:
        self._process: Child | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  until the actor ends

    def facts(self, directory: str, words: Sequence[str], token: str) -> Facts:
        """See `pretrax.doctor.host_facts`."""
        try:
            os.chdir(directory)
        except OSError as error:
            return {'problem': f'{directory}: {error.strerror}\nuse a directory that all nodes share: --directory PATH'}
        return facts(words[0], words[1:], token)

    def free_port(self) -> int:
        """A free port of this machine."""
        return free_port()

    def run(self, arguments: Sequence[str], directory: str, environment: Mapping[str, str]) -> int:
        """Runs Python to its end, and returns its exit code."""
        streams = {'stdin': subprocess.PIPE, 'stdout': self._output, 'stderr': subprocess.STDOUT}
        command, variables = [sys.executable, *arguments], {**os.environ, **environment}
        self._process = Child(command, variables, cwd=directory, **streams)
        return self._process.wait()

    def send(self, number: int) -> None:
        """Passes a signal to the training."""
        if self._process is not None:
            self._process.tell(number)

    def end(self) -> None:
        """Kills the process, and what it has started."""
        if self._process is None:
            return
        self._process.close_input()
        self._process.wait_up_to(_NODE_SECONDS)
        self._process.kill_all()
        self._process.wait_up_to(_NODE_SECONDS)

    def read(self, begin: int, seconds: float) -> bytes:
        """The output from an offset on. If there is none, it waits for some seconds."""
        until = time.monotonic() + seconds
        while not (piece := os.pread(self._output.fileno(), 1 << 16, begin)) and time.monotonic() < until:
            time.sleep(_LOOK)
        return piece
