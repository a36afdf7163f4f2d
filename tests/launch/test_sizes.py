"""How many devices a process gets, and which numbers of processes a configuration allows."""

import pytest

from pretrax import config_from_values
from pretrax.errors import UserError
from pretrax.launch import sizes
from pretrax.launch.sizes import devices_per_process, misfit


@pytest.fixture
def config_of(values):
    def config(mesh, rows=12, **batch):
        return config_from_values(
            values | {'mesh': mesh, 'batch': {'tokens': 16 * rows, 'sequence_length': 16, **batch}}
        )

    return config


@pytest.mark.parametrize(
    ('mesh', 'processes', 'wanted', 'count'),
    [
        ({'r': 2, 'd': 2, 't': 2}, 4, None, 2),
        ({'r': 2, 'd': 2, 't': 2}, 1, None, 8),
        ({'d': 'auto'}, 3, 2, 2),
        ({}, 2, None, 3),  # of 7 cores here
        ({'t': 2}, 2, None, 3),
        ({}, 4, None, 1),
        ({'t': 4}, 2, None, 2),
        ({'d': 2, 'c': 2, 'p': 2}, 4, None, 2),
        ({'t': 16}, 2, None, 8),
    ],
)
def test_each_process_gets_the_devices_that_the_mesh_needs_or_its_share(
    config_of, monkeypatch, mesh, processes, wanted, count
):
    monkeypatch.setattr(sizes, '_devices_here', lambda: (7, 'cores'))
    assert devices_per_process(config_of(mesh), processes, wanted)[0] == count


@pytest.mark.parametrize(
    ('mesh', 'processes', 'wanted', 'message'),
    [
        (
            {'r': 2, 'd': 2},
            3,
            None,
            r'(?s)r=2 d=2 has 4 devices, which cannot be divided among 3 processes.*--processes [24]',
        ),
        ({'r': 2, 'd': 2}, 2, 1, r'(?s)2 processes with 1 device each: mesh: .* makes 4 devices, but there are 2'),
        ({'d': 'auto'}, 5, 1, '12 sequences per step cannot be sharded evenly over mesh r=1 x d=5 = 5 devices'),
        ({'d': 'auto', 't': 2}, 3, 1, 'leaves no whole number for d'),
    ],
)
def test_an_indivisible_mesh_is_refused_with_a_number_that_divides_it(config_of, mesh, processes, wanted, message):
    with pytest.raises(UserError, match=message):
        devices_per_process(config_of(mesh), processes, wanted)


def test_only_numbers_of_devices_that_the_mesh_and_batch_allow_fit(config_of):
    assert [n for n in range(1, 13) if misfit(config_of({'d': 'auto'}), n) is None] == [1, 2, 3, 4, 6, 12]
    assert [n for n in range(1, 13) if misfit(config_of({'d': 'auto'}, micro=3), n) is None] == [1, 2, 4]
    assert [n for n in range(1, 13) if misfit(config_of({'d': 4}), n) is None] == [4]
    assert [n for n in range(1, 13) if misfit(config_of({'d': 'auto', 'e': 2, 'c': 2}), n) is None] == [4, 8, 12]


def test_gpus_are_counted_without_jax(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,3')
    monkeypatch.delenv('JAX_PLATFORMS', raising=False)
    assert sizes._devices_here() == (2, 'GPUs')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    assert sizes._devices_here()[1] == 'cores'
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    assert sizes._devices_here()[1] == 'cores'
