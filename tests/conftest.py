"""Eight simulated CPU devices for every test, decided before JAX is imported, and programs that are compiled once."""

import os
import shutil
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'  # nothing from the user's home, and nothing into it
# Eight devices take turns on few cores: a collective may wait long for the last of them. LLVM's optimization does not pay
# for small programs that run a few times.
os.environ['XLA_FLAGS'] = ' '.join([
    '--xla_force_host_platform_device_count=8', '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    '--xla_backend_optimization_level=0',
])  # fmt: skip

import hypothesis
import pytest

hypothesis.settings.register_profile('pretrax', deadline=None, derandomize=True)
hypothesis.settings.load_profile('pretrax')

_programs = pytest.StashKey[str]()


def pytest_configure(config):
    """Keeps compiled programs for the tests of this process and for the processes that they start.

    Each worker has a directory of its own, since JAX does not write atomically.
    """
    config.stash[_programs] = tempfile.mkdtemp(prefix='pretrax-programs-')
    os.environ |= {
        'JAX_ENABLE_COMPILATION_CACHE': 'true',
        'JAX_COMPILATION_CACHE_DIR': config.stash[_programs],
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }


def pytest_unconfigure(config):
    shutil.rmtree(config.stash[_programs], ignore_errors=True)
