"""Eight simulated CPU devices for every test, decided before JAX is imported, and programs that are compiled once.

Every worker imports all files of tests. So a package that takes long to import is imported by the test that uses it.
"""

import contextlib
import faulthandler
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)  # with it, each process compiles the sources of JAX again: 2 s
os.environ.pop('UV', None)  # commands are printed without `uv run`, however the tests were started
# Eight devices take turns on few cores: a collective may wait long for the last of them. LLVM's optimization does not
# pay for small programs that run a few times.
os.environ['XLA_FLAGS'] = ' '.join([
    '--xla_force_host_platform_device_count=8', '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    '--xla_backend_optimization_level=0',
])  # fmt: skip
# Compiled programs are kept for the tests of this process and for the processes that they start, and not in the user's
# home. Each worker has a directory of its own, since JAX does not write atomically. JAX reads these variables when it
# is imported, which the conftest.py of a room does before `pytest_configure` if the room is named on the command line.
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'true'
os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='pretrax-programs-')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

hypothesis.settings.register_profile('pretrax', deadline=None, derandomize=True)
hypothesis.settings.load_profile('pretrax')
sys.dont_write_bytecode = False


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers():
    """One worker more than there are cores: tests wait a fifth of the time, for servers and for other processes."""
    return (yield) + 1


def pytest_configure(config):
    """Gives signals that a shell ignores in the background their usual effect again, for tests and what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.set_threshold(10_000, 20, 100)  # tracing makes many objects and little garbage: a tenth of the time
    from pretrax.jax_compat import cache_only_what_can_be_loaded

    cache_only_what_can_be_loaded()  # before the tests that run programs of eight devices without a run


@pytest.fixture(autouse=True)
def own_buckets():
    """A run sets how its process reaches buckets; the next test of the process has the usual settings again."""
    yield
    if storage := sys.modules.get('pretrax.storage'):
        storage.use_settings(storage.StorageSettings())


@pytest.fixture(autouse=True)
def no_terminal():
    """The output of a test has no width: `readline`, which a worker imports, sets one for the whole process."""
    os.environ.pop('COLUMNS', None)


def pytest_unconfigure(config):
    shutil.rmtree(os.environ['JAX_COMPILATION_CACHE_DIR'], ignore_errors=True)


def pytest_runtest_setup(item):
    """Shows the stacks of a process that crashes,
    since a training run that has ended leaves them to captured output.
    """
    if item.config.stash.get(fault_handler_stderr_fd_key, None) is not None:
        faulthandler.enable(item.config.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, report):
    """Shows the stacks that a training run wrote when its process crashed."""
    del crashitem
    written = Path(tempfile.gettempdir()).glob('pytest-of-*/pytest-current/*/*/**/stacks/*.txt')
    for path in sorted((path for path in written if path.stat().st_size), key=lambda path: path.stat().st_mtime)[-2:]:
        report.longrepr = f'{report.longrepr}\n{path}:\n{path.read_text()}'


@pytest.fixture(scope='session')
def bucket_servers():
    """Starts the bucket server of a scheme, 's3' or 'gs', when a test first needs it."""
    from buckets import bucket_server

    with contextlib.ExitStack() as running:
        yield functools.cache(lambda scheme: running.enter_context(bucket_server(scheme)))


@pytest.fixture(params=['s3', 'gs'])
def bucket(request, bucket_servers, monkeypatch):
    """An empty bucket on a real server, S3 and then Cloud Storage, with the environment that clients need."""
    with _empty_bucket(bucket_servers(request.param), monkeypatch) as server:
        yield server


@pytest.fixture
def s3(bucket_servers, monkeypatch):
    """An empty bucket on a real S3 server, with the environment that clients need."""
    with _empty_bucket(bucket_servers('s3'), monkeypatch) as server:
        yield server


@pytest.fixture
def gs(bucket_servers, monkeypatch):
    """An empty bucket on a real server of Cloud Storage, with the environment that clients need."""
    with _empty_bucket(bucket_servers('gs'), monkeypatch) as server:
        yield server


@contextlib.contextmanager
def _empty_bucket(server, monkeypatch):
    server.reset()
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    yield server
    server.reset()


@pytest.fixture(scope='module')
def browser():
    """A Chromium for the tests of pages in one file."""
    from chromium import launched

    with launched() as opened:
        yield opened
