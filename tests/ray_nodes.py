"""A real Ray cluster of several nodes on this machine: each is a raylet with resources of its own."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any


class RayNodes:
    """A cluster whose head has no CPUs.

    Attributes:
        address: for `ray.init` and `--address`.
        nodes: the other nodes, each with one CPU.
    """

    def __init__(self, count: int, environment: Mapping[str, str]):
        from ray.cluster_utils import Cluster

        self._environment = environment
        self._cluster = Cluster()
        self._start(num_cpus=0, include_dashboard=False)
        self.address = self._cluster.address
        self.nodes: list[Any] = []
        for _ in range(count):
            self.add()

    def add(self) -> None:
        """Adds a node."""
        self.nodes.append(self._start(num_cpus=1, object_store_memory=80 << 20))

    def _start(self, **options: Any) -> Any:
        """Starts a node; the first one is the head. Ray gives it 30 seconds,
        which may be too short on a busy machine.
        """
        for _ in range(2):
            with contextlib.suppress(Exception), self._with_environment():
                return self._cluster.add_node(**options)
        with self._with_environment():
            return self._cluster.add_node(**options)

    @contextlib.contextmanager
    def _with_environment(self) -> Iterator[None]:
        """Nodes, and what their workers start, have the environment of this process when they are started."""
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def remove(self, node: Any) -> None:
        """Ends a node as a power cut does."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(count: int, environment: Mapping[str, str]) -> Iterator[RayNodes]:
    """Starts a cluster; what its workers start has this environment."""
    started = RayNodes(count, environment)
    try:
        yield started
    finally:
        started.close()


def raylet_of(process: int) -> int:
    """The raylet on whose node a process runs."""
    while 'raylet' not in _name(process):
        process = _parent(process)
        assert process > 1
    return process


def _name(process: int) -> str:
    with open(f'/proc/{process}/comm') as file:
        return file.read()


def _parent(process: int) -> int:
    with open(f'/proc/{process}/stat') as file:
        return int(file.read().rpartition(')')[2].split()[1])
