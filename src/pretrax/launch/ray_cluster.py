"""A Ray cluster: its nodes, and the resources that are reserved on them."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pretrax.errors import UserError

_NODE_SECONDS = 15.0  # to find out whether a node is gone


class Bundle(NamedTuple):
    """The resources of a worker, which were asked for. Ray finds others if their node is lost."""

    group: Any  # Ray's placement group
    number: int  # in the group


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

    def reserve(self, count: int, strategy: str) -> list[Bundle]:
        """Asks for the resources of some workers, which an autoscaler sees too. All of them are reserved at once."""
        from ray.util.placement_group import placement_group

        group = placement_group([dict(self.bundle)] * count, strategy=strategy)
        return [Bundle(group, number) for number in range(count)]

    def release(self, bundles: Collection[Bundle]) -> None:
        """Gives resources back, those of whole groups."""
        from ray.util.placement_group import remove_placement_group

        for group in {bundle.group for bundle in bundles}:
            remove_placement_group(group)

    def nodes_of(self, bundles: Sequence[Bundle]) -> list[str]:
        """The node of each; '' until the resources are there, and if its node is lost."""
        from ray.util.placement_group import placement_group_table

        alive = {node['NodeID'] for node in self.nodes()}
        tables = {group: placement_group_table(group) for group in {bundle.group for bundle in bundles}}
        nodes = {
            group: table['bundles_to_node_id'] if table['state'] in ('CREATED', 'RESCHEDULING') else {}
            for group, table in tables.items()
        }
        found = [nodes[group].get(number, '') for group, number in bundles]
        return [node if node in alive else '' for node in found]

    def actor(self, kind: type, bundle: Bundle, *arguments: Any) -> Any:
        """An actor with the resources of a worker. Several of its methods run at once."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {name: amount for name, amount in self.bundle.items() if name not in ('CPU', 'GPU')}
        return (
            self.ray.remote(kind)
            .options(
                num_cpus=self.bundle.get('CPU', 0),
                num_gpus=self.bundle.get('GPU', 0),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(*bundle),
                max_restarts=0,
                max_concurrency=8,
            )
            .remote(*arguments)
        )

    def ask(self, node: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function on a node. Returns Ray's reference to the answer."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return (
            self.ray.remote(function)
            .options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
            .remote(*arguments)
        )

    def alive(self, nodes: Collection[str]) -> set[str]:
        """The nodes among these that run tasks. It takes a moment."""
        asked = {node: self.ask(node, _nothing) for node in nodes}
        answers = self.ray.wait([*asked.values()], num_returns=len(asked), timeout=_NODE_SECONDS)[0] if asked else []
        found = set()
        for node, answer in asked.items():
            with contextlib.suppress(self.ray.exceptions.RayError):
                if answer in answers:
                    self.ray.get(answer)
                    found.add(node)
        return found


def _nothing() -> None:
    pass
