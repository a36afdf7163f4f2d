"""The size of every mesh axis, from the `mesh:` section and the devices; and values that pretrax chose itself."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pretrax.config.schema import Mesh, RunConfig
from pretrax.errors import UserError


def resolve_mesh(mesh: Mesh, n_devices: int, platform: str, slices: int = 1) -> dict[str, int]:
    """The size of each mesh axis; their product is the number of devices.

    One axis may be auto. If both r and d are, d takes the devices of each slice and r is the number of `slices`, which
    a slow network connects; so the largest model fits. On CPUs r takes them, since simulated devices share one memory.
    `platform` is '' if it is not known.

    Raises:
        UserError: no sizes fit; the message lists the ones that do.
    """
    if mesh.is_planned:
        raise UserError(
            '`pretrax train` and `pretrax compile` plan mesh: auto\n'
            'in a program, use config = pretrax.plan.auto.settled(config, print)'
        )
    sizes = {'r': mesh.r, 'd': mesh.d, 'e': mesh.e, 'c': mesh.c, 't': mesh.t, 'p': mesh.p}
    if mesh.r == mesh.d == 'auto':
        sizes['d' if platform == 'cpu' else 'r'] = 1 if platform == 'cpu' else slices
    given = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    product = math.prod(given.values())
    free = [axis for axis in sizes if axis not in given]
    if product == n_devices or (free and n_devices % product == 0):
        return {axis: given.get(axis, n_devices // product) for axis in sizes}

    given = {
        axis: size for axis, size in given.items() if size != 1 or axis in 'rdt'
    }  # leave out axes that are not used
    written = ' '.join(f'{axis}={size}' for axis, size in given.items())
    devices = f'{n_devices} {platform}{" " if platform else ""}device{"" if n_devices == 1 else "s"}'
    factors = [str(n) for n in range(1, n_devices + 1) if n_devices % n == 0]
    lines = [f'mesh: {written} makes {product} devices, but there are {devices}']
    if free:
        lines = [f'mesh: {written} leaves no whole number for {free[0]}: {product} does not divide the {devices}']
    rest = {axis: product // size for axis, size in given.items()}  # the product of the other axes
    fits = [f'mesh.{axis}={n_devices // rest[axis]}' for axis in given if not free and n_devices % rest[axis] == 0]
    if fits:
        lines.append(f'    valid: {" or ".join(fits)}')
    lines.append(f'    each axis must be one of {", ".join(factors)}, and their product {n_devices}')
    if platform == 'cpu':
        lines.append(f'    or simulate devices: XLA_FLAGS=--xla_force_host_platform_device_count={product}')
    raise UserError('\n'.join(lines))


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
