"""Accelerators of this machine, found without JAX, and JAX plugins for accelerators that it does not have.

Such a plugin is installed to compile ahead for other hardware. JAX starts every plugin that it finds, and each of these
then prints errors and a traceback before JAX falls back to the CPU. So the platforms that JAX starts are set
beforehand.
"""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from collections.abc import MutableMapping

# Plugins, by module: the platform that JAX starts for it, and its chip.
_PLUGINS = {
    'libtpu': ('tpu', 'TPU'),
    'jax_cuda13_plugin': ('cuda', 'NVIDIA GPU'),
    'jax_cuda12_plugin': ('cuda', 'NVIDIA GPU'),
}
# Device files of the drivers.
_DEVICES = {
    'TPU': ('/dev/accel*', '/dev/vfio/[0-9]*'),
    'NVIDIA GPU': ('/dev/nvidia*', '/dev/dxg', '/dev/nvhost*', '/dev/nvgpu*'),  # dxg: in WSL; the last two: Jetson
    'AMD GPU': ('/dev/kfd',),
}
_PCI = '/sys/bus/pci/devices/*/vendor'
_NVIDIA = '0x10de'


def has_accelerator() -> bool:
    """Whether the machine has an accelerator whose driver is loaded."""
    return any(_has_driver(chip) for chip in _DEVICES)


def skip_absent_accelerators(variables: MutableMapping[str, str] = os.environ) -> None:
    """Sets JAX_PLATFORMS so that JAX does not start plugins of absent chips. The user's own JAX_PLATFORMS stays.

    Call it before JAX starts its backends; JAX may be imported already.
    """
    if 'JAX_PLATFORMS' in variables or not idle_plugins() or _has_other_plugins():
        return
    present = dict.fromkeys(name for plugin, (name, chip) in _PLUGINS.items() if _is_installed(plugin) and _has(chip))
    variables['JAX_PLATFORMS'] = platforms = ','.join([*present, 'cpu'])
    jax = sys.modules.get('jax')
    if jax is not None and variables is os.environ and not jax.config.jax_platforms:  # it has read its variables
        jax.config.update('jax_platforms', platforms)


def reserve_gpu_memory(variables: MutableMapping[str, str] = os.environ) -> None:
    """Lets JAX use 92 % of a GPU's memory instead of its default of 75 %. The user's own setting stays.

    The rest is for CUDA, cuDNN and NCCL. Call it before JAX starts its backends.
    """
    if not {'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'} & variables.keys():
        variables['XLA_PYTHON_CLIENT_MEM_FRACTION'] = '0.92'


def gpu_files() -> list[str]:
    """The device files of the NVIDIA GPUs of this machine or container, one for each."""
    return glob.glob('/dev/nvidia[0-9]*')


def idle_plugins() -> str:
    """Plugins without their chip: 'libtpu is installed, but this machine has no TPU'; '' if there are none."""
    idle = {plugin: chip for plugin, (_, chip) in _PLUGINS.items() if _is_installed(plugin) and not _has(chip)}
    if not idle:
        return ''
    plugins, chips = ' and '.join(idle), ' and no '.join(dict.fromkeys(idle.values()))
    return f'{plugins} {"is" if len(idle) == 1 else "are"} installed, but this machine has no {chips}'


def _is_installed(plugin: str) -> bool:
    return importlib.util.find_spec(plugin) is not None


def _has_other_plugins() -> bool:
    """Whether JAX would find a plugin that this file does not know, such as that of another maker."""
    found = {point.value.partition(':')[0] for point in importlib.metadata.entry_points(group='jax_plugins')}
    return any(not name.startswith('jax_plugins.xla_cuda') for name in found)


def _has(chip: str) -> bool:
    """Whether the chip is present. A GPU without a driver is: then JAX's own error says what is wrong."""
    return _has_driver(chip) or (chip == 'NVIDIA GPU' and _NVIDIA in _pci_vendors())


def _has_driver(chip: str) -> bool:
    return any(glob.glob(pattern) for pattern in _DEVICES[chip])


def _pci_vendors() -> set[str]:
    return {pathlib.Path(path).read_text().strip() for path in glob.glob(_PCI)}


def gpus_here() -> int:
    """Number of GPUs of this machine that JAX would use."""
    if os.environ.get('JAX_PLATFORMS', '') == 'cpu':
        return 0
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if visible is None:
        return len(list(pathlib.Path('/dev').glob('nvidia[0-9]*')))
    return len([name for name in visible.split(',') if name and not name.startswith('-')])
