"""Engines by name."""

import pytest

from pretrax.errors import UserError
from pretrax.launch.record import LaunchRecord
from pretrax.launch.registry import engine_of


def test_an_engine_of_another_version_is_refused():
    with pytest.raises(UserError, match='does not know'):
        engine_of(LaunchRecord(engine='nomad', job='1', nodes=1))
