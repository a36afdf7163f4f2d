import pytest

from preloaded import programs
from runs import documents, values

__all__ = ['documents', 'values']


class _Forking:
    """The module `sys` of `launch/start_check.py`, whose Python is forked from a process that has imported JAX."""

    @property
    def executable(self):
        return str(programs() / 'python')


@pytest.fixture(autouse=True)
def quick_check(monkeypatch):
    monkeypatch.setattr('pretrax.launch.start_check.sys', _Forking())
