"""Runs on an existing Ray cluster: one actor per worker, which runs `pretrax launch node --lasting` on its node.

Ray places the workers, notices nodes that are lost and finds others; restarts are decided by
`pretrax.launch.supervisor`, as everywhere. Ray's own `JaxTrainer` is not used: it does not initialize
`jax.distributed` on CPUs.
"""

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pretrax.doctor.host_facts import Facts, facts, problem_of
from pretrax.errors import MISTAKE, Report
from pretrax.launch.group import identity, likely_free_port
from pretrax.launch.node import request
from pretrax.launch.ray_cluster import Bundle, Cluster
from pretrax.launch.remote import Agents, RemoteGroup, RemoteProcess
from pretrax.system.children import Child

_PLACED_SECONDS = 5.0  # to wait for the placement of workers before the launcher goes on
_REPORT_SECONDS = 10.0  # after which the user learns that workers wait for resources
_ELASTIC_SECONDS = 20.0  # that an elastic run waits for resources, before it goes on with what is there
_LOST_SECONDS = 60.0  # in which Ray notices, too, that a node is lost
_LOOK = 0.05  # seconds between two looks for the nodes


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a run."""

    count: int  # how many
    arguments: Sequence[str]  # arguments of `pretrax launch node`
    words: Sequence[str]  # the file of the configuration and its changes
    token: str  # from `host_facts.write_token`
    directory: str  # the working directory on all nodes
    environment: Mapping[str, str]  # environment of the processes, besides their identity


class RayLaunch:
    """Starts the workers of an attempt. A slot is one of the bundles that Ray reserves.

    Args:
        directory: the run directory on this machine, for the output of the workers.
        elastic: go on without workers for which there are no resources.
    """

    def __init__(self, cluster: Cluster, workers: Workers, directory: pathlib.Path, elastic: bool, say: Report = print):
        self.cluster, self.workers, self.elastic, self.say = cluster, workers, elastic, say
        self.agents = Agents(directory)
        self.strategy = cluster.strategy(workers.count)
        if self.strategy == 'SPREAD':
            say(f'launch: fewer than {workers.count} nodes have room for a worker, so some nodes get several')
        self.checked: set[str] = set()  # nodes that were found to be right
        self.bundles: dict[int, Bundle] = {}  # of slots
        self._lost: dict[str, float] = {}  # when nodes were found to be lost

    def start(self, slots: Sequence[int], attempt: str) -> 'RayGroup':
        """The workers of an attempt, for `Supervisor`."""
        if missing := [slot for slot in slots if slot not in self.bundles]:
            self.bundles |= zip(missing, self.cluster.reserve(len(missing), self.strategy), strict=True)
        return RayGroup(self, slots, attempt)

    def nodes(self, slots: Sequence[int]) -> list[str]:
        """The node of each slot; '' if it has none now."""
        now = time.monotonic()
        lost = {node for node, at in self._lost.items() if now - at < _LOST_SECONDS}
        found = self.cluster.nodes_of([self.bundles[slot] for slot in slots])
        return ['' if node in lost else node for node in found]

    def lose(self, nodes: Collection[str]) -> set[str]:
        """The nodes among these that are lost. They get no worker until Ray has noticed it, too."""
        lost = set(nodes) - self.cluster.alive(nodes)
        self._lost |= dict.fromkeys(lost, time.monotonic())
        return lost

    def give_up(self) -> None:
        """Asks no longer for the resources of all slots if none of them was reserved."""
        if not any(self.nodes([*self.bundles])):
            self.close_bundles()

    def ready(self, slots: Collection[int]) -> list[int]:
        """The slots for which the cluster has reserved resources. It returns at once.

        Nothing is reserved until there are more nodes than workers, if each worker has a node of its own.
        """
        room = self.cluster.room()
        places = sum(one > 0 for one in room) if self.strategy == 'STRICT_SPREAD' else sum(room)
        missing = sorted(slot for slot in slots if slot not in self.bundles)
        for slot in missing[: max(0, places - len(self.bundles))]:
            (self.bundles[slot],) = self.cluster.reserve(1, 'SPREAD')
        asked = sorted(slot for slot in slots if slot in self.bundles)
        return [slot for slot, node in zip(asked, self.nodes(asked), strict=True) if node]

    def close_bundles(self) -> None:
        """Gives all resources back."""
        self.cluster.release(self.bundles.values())
        self.bundles.clear()

    def close(self) -> None:
        """Ends what runs on the nodes."""
        self.agents.close()
        self.close_bundles()


class RayGroup(RemoteGroup):
    """One actor per worker. They are placed, checked and started while `codes` is called."""

    def __init__(self, launch: RayLaunch, slots: Sequence[int], attempt: str):
        super().__init__([], launch.agents, at_once=False)
        self._launch, self._cluster, self._workers = launch, launch.cluster, launch.workers
        self._slots, self._attempt = slots, attempt
        self._nodes: list[str] = []  # of each worker, once all have one
        self._facts: dict[str, dict[str, Any]] = {}  # what Ray says about them
        self._asked: dict[int, Any] = {}  # answers about nodes that are not checked
        self._given_up: dict[int, int] = {}
        # A shared checkout may have changed since the last attempt.
        self._own = facts(self._workers.words[0], self._workers.words[1:], self._workers.token)
        self._began, self._has_reported = time.monotonic(), False
        while not self._find_nodes() and time.monotonic() < self._began + _PLACED_SECONDS:
            time.sleep(_LOOK)

    def __len__(self) -> int:
        return len(self._slots)

    def codes(self) -> dict[int, int]:
        if not self._given_up and not self._started and (self._nodes or self._find_nodes()):
            self._check()
        return dict(self._given_up) or super().codes()

    def _find_nodes(self) -> bool:
        """Looks whether there are resources for all workers, and asks for the facts of their nodes."""
        nodes = self._launch.nodes(self._slots)
        if not all(nodes):
            self._wait_for_resources(nodes)
            return False
        self._nodes, self._facts = nodes, {node['NodeID']: node for node in self._cluster.nodes()}
        question = self._workers.directory, self._workers.words, self._workers.token
        self._asked = {
            number: self._cluster.ask(node, node_facts, *question)
            for number, node in enumerate(nodes)
            if node not in self._launch.checked
        }
        return True

    def _wait_for_resources(self, nodes: Sequence[str]) -> None:
        waited, room = time.monotonic() - self._began, sum(self._cluster.room())
        # At first, nothing is reserved until there is room for all.
        here = [number for number, node in enumerate(nodes) if node] or [*range(min(room, len(self) - 1))]
        if waited > _REPORT_SECONDS and not self._has_reported:
            self._has_reported = True
            self._launch.say(f'launch: waiting for resources: {len(here)} of {len(self)} workers have a node')
        if self._launch.elastic and waited > _ELASTIC_SECONDS:
            self._launch.give_up()
            missing = [number for number in range(len(self)) if number not in (here or [0])]
            self._given_up = dict.fromkeys(missing, -signal.SIGHUP)

    def _check(self) -> None:
        """Starts the workers once all nodes are found to be right."""
        ray = self._cluster.ray
        for number, asked in list(self._asked.items()):
            if not ray.wait([asked], timeout=0)[0]:
                continue
            del self._asked[number]
            try:
                found = ray.get(asked)
                problem = found['problem'] if len(found) == 1 else problem_of(found, self._own)
            except ray.exceptions.RayError as error:
                if 'No module named' not in str(error):
                    self._given_up[number] = -signal.SIGKILL
                    continue
                reason = str(error).strip().splitlines()[-1]
                problem = f'{reason}: install the same pretrax in the Python that Ray uses there'
            if problem is None:
                self._launch.checked.add(self._nodes[number])
            else:
                self._launch.say(f'launch: {self.host(number)}: {problem}')
                self._given_up[number] = MISTAKE
        if not self._given_up and not self._asked:
            self._remote = self._processes()
            self.start_all()

    def _processes(self) -> list[RemoteProcess]:
        hosts = [self.host(number) for number in range(len(self))]
        address = f'{self._facts[self._nodes[0]]["NodeManagerAddress"]}:{likely_free_port()}'
        command = ['-m', 'pretrax', 'launch', 'node', *self._workers.arguments, '--lasting']
        return [
            RemoteProcess(
                f'{node}:{slot}',
                command,
                self._workers.environment,
                request(self._attempt, identity(number, hosts, address)),
                functools.partial(RayProgram, self._cluster, self._launch.bundles[slot], self._workers.directory),
            )
            for number, (slot, node) in enumerate(zip(self._slots, self._nodes, strict=True))
        ]

    def send(self, number: int) -> None:
        if not self._started and number in (signal.SIGINT, signal.SIGTERM):
            self._given_up = dict.fromkeys(range(len(self)), -number)
        super().send(number)

    def host(self, number: int) -> str:
        return self._facts[self._nodes[number]]['NodeManagerHostname'] if self._nodes else 'no node yet'

    def gone(self) -> Sequence[int]:
        """The workers whose nodes have left the cluster, and those for which there were no resources."""
        if not self._nodes:
            return [number for number, code in self._given_up.items() if code == -signal.SIGHUP]
        doubtful = {number: node for number, node in enumerate(self._nodes) if not self.is_there(number)}
        lost = self._launch.lose(set(doubtful.values()))
        return [number for number, node in doubtful.items() if node in lost]


class RayProgram:
    """A program that an actor runs, as `Agent` uses a `Child`. The last arguments are those of a `Child`."""

    def __init__(
        self,
        cluster: Cluster,
        bundle: Bundle,
        directory: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        **streams: Any,
    ):
        del streams
        self._ray = cluster.ray
        self._actor = cluster.actor(RayWorker, bundle, command, directory, environment)
        self._told: Any = None  # Ray's reference to the newest call that has to be done before the next
        self.returncode: int | None = None
        reading, writing = os.pipe()
        self.stdout = open(reading, 'rb', 0)  # noqa: SIM115  the agent closes it
        self._reader = threading.Thread(target=self._read, args=(writing,), name='actor', daemon=True)
        self._reader.start()

    def _read(self, writing: int) -> None:
        """Copies the output, and then learns the exit code; that of an actor that is lost is SIGKILL."""
        with open(writing, 'wb', 0) as output:
            try:
                while isinstance(piece := self._ray.get(self._actor.read.remote()), bytes):
                    output.write(piece)
            except self._ray.exceptions.RayError:
                piece = -signal.SIGKILL
            self.returncode = piece

    def poll(self) -> int | None:
        """The exit code; None: it runs."""
        return self.returncode

    def write_line(self, line: bytes) -> None:
        """See `Child`."""
        self._told = self._actor.write_line.remote(line, self._told)

    def close_input(self) -> None:
        """See `Child`."""
        self._told = self._actor.close_input.remote(self._told)

    def wait_up_to(self, seconds: float) -> None:
        """See `Child`."""
        self._reader.join(max(0.0, seconds))

    def end(self, seconds: float) -> None:
        """Kills it, waits for its end, but no longer than these seconds, and ends its actor."""
        self._actor.end.remote()
        self.wait_up_to(seconds)
        self._ray.kill(self._actor)


class RayWorker:
    """A Ray actor that runs Python with some arguments. The program ends with it. It needs no Ray.

    Methods run at once. What has to be done before a method is an argument of it, which Ray waits for.
    """

    def __init__(self, arguments: Sequence[str], directory: str, environment: Mapping[str, str]):
        streams: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
        variables = {**os.environ, **environment}
        self._program = Child([sys.executable, *arguments], variables, cwd=directory, **streams)

    def write_line(self, line: bytes, before: None) -> None:
        """Writes a line to its standard input."""
        del before
        self._program.write_line(line)

    def close_input(self, before: None) -> None:
        """Ends its standard input, on which it ends."""
        del before
        self._program.close_input()

    def end(self) -> None:
        """Kills it."""
        self._program.kill_all()

    def read(self) -> bytes | int:
        """Waits for output; at the end it is the exit code."""
        assert self._program.stdout is not None
        return os.read(self._program.stdout.fileno(), 1 << 16) or self._program.wait()


def node_facts(directory: str, words: Sequence[str], token: str) -> Facts:
    """The facts of a node, see `pretrax.doctor.host_facts`."""
    try:
        os.chdir(directory)
    except OSError as error:
        return {'problem': f'{directory}: {error.strerror}\nuse a directory that all nodes share: --directory PATH'}
    return facts(words[0], words[1:], token)
