"""The size of every mesh axis from the `mesh:` line and the devices."""

import pytest

from pretrax.config import Mesh, resolve_mesh
from pretrax.errors import UserError


@pytest.mark.parametrize(
    ('mesh', 'devices', 'platform', 'sizes'),
    [
        (Mesh(), 1, 'cpu', (1, 1, 1)),
        (Mesh(), 8, 'cpu', (8, 1, 1)),
        (Mesh(), 8, 'tpu', (1, 8, 1)),
        (Mesh(t=2), 8, 'gpu', (1, 4, 2)),
        (Mesh(t=2), 8, 'cpu', (4, 1, 2)),
        (Mesh(d=4, t=2), 8, 'cpu', (1, 4, 2)),
        (Mesh(r=8), 8, 'gpu', (8, 1, 1)),
        (Mesh(d='auto'), 8, 'cpu', (1, 8, 1)),
        (Mesh(r='auto', d=2), 8, 'gpu', (4, 2, 1)),
        (Mesh(r=2, d='auto', t=2), 8, 'gpu', (2, 2, 2)),
        (Mesh(r=2, d=2, t=2), 8, 'gpu', (2, 2, 2)),
    ],
)
def test_the_free_axis_takes_the_devices_that_are_left(mesh: Mesh, devices: int, platform: str, sizes: tuple) -> None:
    assert resolve_mesh(mesh, devices, platform) == dict.fromkeys('ecp', 1) | dict(zip('rdt', sizes, strict=True))


def test_what_is_free_is_sharded_inside_each_slice() -> None:
    assert resolve_mesh(Mesh(t=2), 16, 'tpu', slices=2) == {'r': 2, 'd': 4, 'e': 1, 'c': 1, 't': 2, 'p': 1}
    assert resolve_mesh(Mesh(r=1, d='auto'), 16, 'tpu', slices=2)['d'] == 16


@pytest.mark.parametrize(
    ('mesh', 'devices', 'said'),
    [
        (Mesh(d=4), 8, 'valid: mesh.r=2 or mesh.d=8 or mesh.t=2'),
        (Mesh(d=3), 8, 'mesh: r=1 d=3 t=1 makes 3 devices, but there are 8 gpu devices'),
        (Mesh(r=2, d=4, t=2), 8, 'valid: mesh.r=1 or mesh.d=2 or mesh.t=1'),
        (Mesh(t=3), 8, '3 does not divide the 8 gpu devices'),
        (Mesh(t=16), 8, 'one of 1, 2, 4, 8'),
        (Mesh(t=2), 1, '2 does not divide the 1 gpu device'),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_what_does(mesh: Mesh, devices: int, said: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_mesh(mesh, devices, 'gpu')
    assert said in str(error.value)


def test_on_a_cpu_devices_can_be_simulated() -> None:
    with pytest.raises(UserError, match='xla_force_host_platform_device_count=8'):
        resolve_mesh(Mesh(d=4, t=2), 1, 'cpu')
