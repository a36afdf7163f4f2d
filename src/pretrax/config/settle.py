"""Sets values that pretrax chose, with the reason as their origin."""

from collections.abc import Mapping
from typing import Any, Literal

from pretrax.config.schema import Mesh, RunConfig


def settle(
    config: RunConfig,
    *,
    mesh: Mapping[str, int] | None = None,
    micro: int | Literal['as it is'] | None = 'as it is',
    origin: str,
) -> RunConfig:
    """The configuration with another mesh or micro-batch, whose origin is `origin`."""
    changes: dict[str, Any] = {}
    origins = dict(config.origins)
    if mesh is not None:
        changes['mesh'] = Mesh(**mesh)
        origins = {path: place for path, place in origins.items() if path[0] != 'mesh'} | {('mesh',): origin}
        origins |= {('mesh', axis): origin for axis in mesh}
    if micro != 'as it is':
        changes['batch'] = config.batch.model_copy(update={'micro': micro})
        origins['batch', 'micro'] = origin
    settled = config.model_copy(update=changes)
    settled._origins = origins
    return settled
