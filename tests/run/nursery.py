"""Runs of the bigram model, each in a process of its own that is forked from this one, and killed where it is told.

Forking after the imports, and before JAX has a backend, makes a process in a tenth of a second instead of several.
A line of JSON in: {"values": configuration, "event": n, pattern or null, "seconds": s or null, "memory": directory for
states in memory, whose changes are those that count, or null}; a line out: the signal or the exit code.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import warnings

import jax
from jax._src import xla_bridge

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import Checkpoints  # noqa: F401  # imported before the fork
from pretrax.checkpoint.memory_pieces import VARIABLE
from runs import Quiet

CHANGES = ('os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'os.truncate')


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Kill(Quiet):
    """Kills the process some seconds after the first step was reported."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def update(self, metrics):
        if self.seconds is not None:
            threading.Thread(
                target=lambda seconds: (time.sleep(seconds), die()), args=[self.seconds], daemon=True
            ).start()
            self.seconds = None


def die_before(which, directory):
    """Kills the process just before a change of a file below the directory:
    the which-th, or the first that it matches.
    """
    counted = []

    def hook(event, arguments):
        if event not in CHANGES and not (event == 'open' and arguments[1] and set(arguments[1]) & set('wax')):
            return
        path = arguments[0]
        below = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(directory)
        if below or (event in ('os.remove', 'os.rmdir') and arguments[1] != -1):  # a name in an open directory
            counted.append(f'{event} {path}')
            if len(counted) == which or (isinstance(which, str) and re.match(which, counted[-1])):
                die()

    sys.addaudithook(hook)


def child(values, event, seconds, memory):
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(silent, descriptor)
    if event is not None:
        die_before(event, memory or os.path.join(values['run_dir'], 'checkpoints'))
    if memory is not None:
        os.environ[VARIABLE] = memory
    pretrain(config_from_values(values), progress=Kill(seconds))
    os._exit(0)


def main(cache):
    jax.config.update('jax_enable_compilation_cache', True)
    jax.config.update('jax_compilation_cache_dir', cache)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)
    assert not xla_bridge.backends_are_initialized()
    warnings.filterwarnings('ignore', 'os.fork')
    for line in sys.stdin:
        order = json.loads(line)
        if not (process := os.fork()):
            try:
                child(**order)
            finally:
                os._exit(1)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
