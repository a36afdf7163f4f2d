"""Versions and compiler flags, which a compiled program depends on, and packages that may be missing."""

import importlib.util
import os
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from pretrax import __version__
from pretrax.errors import UserError, install_extra

_PACKAGES = ('jax', 'jaxlib', 'libtpu', 'jax-cuda13-plugin', 'jax-cuda13-pjrt')
_FLAGS = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
# Flags that determine where a program runs, but do not change it.
_NO_MATTER = re.compile(r'--xla_force_host_platform_device_count=\d+|--xla_cpu_collective_\w+=\d+')


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Versions of pretrax, of every package that affects a compiled program, and of `more`, by name."""
    found = {'pretrax': __version__}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def flags() -> dict[str, str]:
    """Compiler flags by environment variable, without those that do not affect the program."""
    said = {name: ' '.join(_NO_MATTER.sub('', os.environ.get(name, '')).split()) for name in _FLAGS}
    return {name: flags for name, flags in said.items() if flags}


def need_extra(extra: str, what: str, package: str) -> None:
    """Raises UserError if a package of an optional extra is not installed. `what` needs it: 'a picture'."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f'{what} needs the package {package}\n  {install_extra(extra)}')
