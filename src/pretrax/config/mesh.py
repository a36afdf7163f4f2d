"""The size of every mesh axis, from the `mesh:` section and the available devices."""

import math

from pretrax.config.schema import Mesh
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
    given = {axis: size for axis, size in sizes.items() if size != 'auto'}
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
