"""A Ray cluster: its nodes, and the resources that are reserved on them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pretrax.errors import UserError

_NODE_SECONDS = 15.0  # to find out whether a node is gone


@dataclasses.dataclass(frozen=True)
class Place:
    """Resources of some workers that were asked for: a placement group, and what is there once it has them."""

    group: Any
    ready: Any


class Cluster:
    """A Ray cluster.

    Args:
        ray: the module, from `connect`.
        bundle: the resources of a worker.
    """

    def __init__(self, ray: Any, bundle: Mapping[str, float]):
        self.ray, self.bundle = ray, bundle

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive."""
        return [node for node in self.ray.nodes() if node['Alive']]

    def room(self) -> list[int]:
        """How many workers each node could have, if nothing else ran there."""
        needs = {name: amount for name, amount in self.bundle.items() if amount}
        return [
            int(min((node['Resources'].get(name, 0) / amount for name, amount in needs.items()), default=1))
            for node in self.nodes()
        ]

    def strategy(self, count: int) -> str:
        """How workers are placed: each on a node of its own, if there are enough nodes."""
        return 'STRICT_SPREAD' if sum(room > 0 for room in self.room()) >= count else 'SPREAD'

    def check(self, count: int) -> None:
        """Raises UserError if the workers do not fit on the nodes of the cluster, even if nothing else ran there."""
        if (room := sum(self.room())) >= count:
            return
        needs = ', '.join(f'{name} {amount:g}' for name, amount in self.bundle.items() if amount)
        nodes = sorted(
            ', '.join(
                f'{name} {amount:g}'
                for name, amount in sorted(node['Resources'].items())
                if ':' not in name and name not in ('memory', 'object_store_memory')
            )
            for node in self.nodes()
        )
        different = [f'  {nodes.count(text)} x {text or "nothing"}' for text in dict.fromkeys(nodes)]
        raise UserError(
            '\n'.join(
                [
                    f'{count} workers with {needs} each do not fit on this Ray cluster: there is room for {room}; its '
                    'nodes:',
                    *different[:5],
                    'ask for less, add nodes, or give --wait to wait for nodes that an autoscaler adds',
                ]
            )
        )

    def reserve(self, count: int, strategy: str) -> Place:
        """Asks for the resources of some workers, which an autoscaler sees too."""
        from ray.util.placement_group import placement_group

        group = placement_group([dict(self.bundle)] * count, strategy=strategy)
        return Place(group, group.ready())

    def is_reserved(self, place: Place, seconds: float = 0) -> bool:
        """Whether the resources are there. Waits for up to some seconds."""
        return bool(self.ray.wait([place.ready], timeout=seconds)[0])

    def release(self, place: Place) -> None:
        """Gives resources back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(place.group)

    def nodes_of(self, place: Place) -> list[str]:
        """The node of each worker."""
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(place.group)['bundles_to_node_id']
        return [nodes[number] for number in range(len(nodes))]

    def actor(self, kind: type, place: Place, number: int) -> Any:
        """An actor with the resources of a worker."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {name: amount for name, amount in self.bundle.items() if name not in ('CPU', 'GPU')}
        return (
            self.ray.remote(kind)
            .options(
                num_cpus=self.bundle.get('CPU', 0),
                num_gpus=self.bundle.get('GPU', 0),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(place.group, number),
                max_restarts=0,
                max_concurrency=8,
            )
            .remote()
        )

    def is_alive(self, node: str) -> bool:
        """Whether a node still runs tasks. It takes a moment."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        answer = self.ray.remote(_nothing).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0).remote()
        try:
            self.ray.get(answer, timeout=_NODE_SECONDS)
        except self.ray.exceptions.RayError:
            return False
        return True


def _nothing() -> None:
    pass
