"""Compiling for hardware that is not in this machine needs its plugin; tests/deviceless compiles for it."""

import pytest

from pretrax.cost.topology import parse_topology
from pretrax.errors import UserError
from pretrax.plan.absent_devices import absent_devices


def test_a_missing_plugin_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match='uv sync --inexact --extra tpu'):
        absent_devices(parse_topology('v5e-16'))
    with pytest.raises(UserError, match='uv sync --inexact --extra cuda'):
        absent_devices(parse_topology('h200'))
