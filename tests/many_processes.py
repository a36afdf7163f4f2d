"""Many processes of a run, simulated one after another: their coordinator is a dict that counts requests."""

import collections
import contextlib
import itertools

import jax

from pretrax.checkpoint import agreement


class Coordinator:
    """The key-value store of JAX's coordination service. What would wait for another process raises an exception."""

    def __init__(self):
        self.values, self.requests, self.most = {}, collections.Counter(), 0
        self.process = 0
        self.wait = lambda key: None  # called before a process waits for a key that does not exist

    def _count(self):
        self.requests[self.process] += 1
        self.most = max(self.most, len(self.values))

    def key_value_set(self, key, value):
        assert key not in self.values
        self.values[key] = value
        self._count()

    def key_value_increment(self, key, increment):
        self.values[key] = str(int(self.values.get(key, 0)) + increment)
        self._count()
        return int(self.values[key])

    def blocking_key_value_get(self, key, milliseconds):
        self._count()
        if key not in self.values:
            self.wait(key)
        return self.values[key]

    def key_value_dir_get(self, key):
        self._count()
        return [(name, value) for name, value in self.values.items() if name.startswith(key.rstrip('/') + '/')]

    def key_value_delete(self, key):
        """Deletes the key and those below it."""
        self._count()
        for name in [name for name in self.values if name == key or name.startswith(key + '/')]:
            del self.values[name]


class Processes:
    """`count` processes. `turn` makes this one one of them, with what it remembers of earlier exchanges."""

    def __init__(self, count, monkeypatch):
        self.count, self.coordinator, self._patch = count, Coordinator(), monkeypatch
        self._exchanges = collections.defaultdict(lambda: collections.defaultdict(itertools.count))
        monkeypatch.setattr(jax, 'process_count', lambda: count)
        monkeypatch.setattr(jax, 'process_index', lambda: self.coordinator.process)
        monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
        monkeypatch.setattr(agreement, 'coordination_client', lambda: self.coordinator)
        monkeypatch.setattr(agreement, '_broadcasts', collections.defaultdict(list))
        monkeypatch.setattr(agreement, '_exchanges', self._exchanges[0])

    @contextlib.contextmanager
    def turn(self, index):
        before, self.coordinator.process = self.coordinator.process, index
        agreement._exchanges = self._exchanges[index]
        try:
            yield
        finally:
            self.coordinator.process = before
            agreement._exchanges = self._exchanges[before]
