"""JAX is not asked to start plugins whose chips are absent; one line says so instead of their tracebacks."""

import pytest

from pretrax.system import accelerators
from pretrax.system.accelerators import idle_plugins, reserve_gpu_memory, skip_absent_accelerators


@pytest.fixture
def machine(monkeypatch):
    """Sets the plugins that are installed and the chips that the machine has."""

    def have(plugins='', drivers='', vendors=(), entry_points=()):
        class Point:
            def __init__(self, value):
                self.value = value

        monkeypatch.setattr(accelerators, '_is_installed', lambda plugin: plugin in plugins.split())
        monkeypatch.setattr(accelerators, '_has_driver', lambda chip: chip in drivers.split(', '))
        monkeypatch.setattr(accelerators, '_pci_vendors', lambda: set(vendors))
        monkeypatch.setattr(
            accelerators.importlib.metadata, 'entry_points', lambda group: [Point(value) for value in entry_points]
        )

    return have


def platforms(given=None):
    variables = {} if given is None else {'JAX_PLATFORMS': given}
    skip_absent_accelerators(variables)
    return variables.get('JAX_PLATFORMS')


def test_a_plugin_without_its_chip_is_not_started(machine):
    machine('libtpu')
    assert platforms() == 'cpu'
    assert idle_plugins() == 'libtpu is installed, but this machine has no TPU'
    machine('libtpu jax_cuda13_plugin', entry_points=['jax_plugins.xla_cuda13'])
    assert platforms() == 'cpu'
    assert idle_plugins() == (
        'libtpu and jax_cuda13_plugin are installed, but this machine has no TPU and no NVIDIA GPU'
    )


def test_a_gpu_is_used_although_a_plugin_for_tpus_is_installed(machine):
    machine('libtpu jax_cuda13_plugin', 'NVIDIA GPU', entry_points=['jax_plugins.xla_cuda13:initialize'])
    assert platforms() == 'cuda,cpu'
    assert idle_plugins() == 'libtpu is installed, but this machine has no TPU'


def test_a_gpu_without_a_driver_is_left_to_the_error_of_jax(machine):
    machine('jax_cuda13_plugin', vendors=['0x10de'])
    assert platforms() is None
    assert idle_plugins() == ''


@pytest.mark.parametrize(
    ('plugins', 'drivers'), [('', ''), ('libtpu', 'TPU'), ('jax_cuda12_plugin', 'NVIDIA GPU'), ('', 'AMD GPU')]
)
def test_a_machine_without_idle_plugins_is_left_to_jax(machine, plugins, drivers):
    machine(plugins, drivers)
    assert platforms() is None
    assert idle_plugins() == ''


def test_the_users_choice_and_unknown_plugins_stay(machine):
    machine('libtpu')
    assert platforms('tpu') == 'tpu'
    machine('libtpu', entry_points=['jax_plugins.another_maker'])
    assert platforms() is None


@pytest.mark.parametrize('name', ['XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION'])
def test_the_share_of_memory_that_the_user_has_set_stays(name):
    variables = {name: '0.5'}
    reserve_gpu_memory(variables)
    assert variables == {name: '0.5'}
    variables = {}
    reserve_gpu_memory(variables)
    assert variables == {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92'}
