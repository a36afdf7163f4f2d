"""Importing pretrax changes nothing in the process that imports it."""

import ast
import subprocess
import sys

import pytest

# Imports all modules twice. The first time may load libraries, which have effects of their own; the second time has
# only the effects of pretrax's modules. What would look the same after a second time is reset before it.
_PROGRAM = """
import importlib, locale, logging, os, pkgutil, signal, sys, threading, warnings

environment = dict(os.environ)

def import_all():
    import pretrax
    for module in pkgutil.walk_packages(pretrax.__path__, 'pretrax.'):
        if not module.name.endswith('__main__'):
            importlib.import_module(module.name)

def state():
    import jax
    from jax._src import monitoring
    loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    return {
        'warnings': [str(one) for one in warnings.filters],
        'loggers': {one.name: (one.level, len(one.filters), len(one.handlers), one.propagate) for one in loggers},
        'hooks': [str(hook) for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)],
        'environment': dict(os.environ),
        'signals': {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        'threads': sorted(thread.name for thread in threading.enumerate()),
        'path': sys.path, 'directory': os.getcwd(), 'recursion limit': sys.getrecursionlimit(),
        'locale': locale.setlocale(locale.LC_ALL), 'JAX': {key: str(value) for key, value in jax.config.values.items()},
        'listeners': len(monitoring._event_duration_secs_listeners) + len(monitoring._event_listeners),
        'backends': list(jax._src.xla_bridge._backends),
    }

import_all()
warnings.resetwarnings()
sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
threading.excepthook = threading.__excepthook__
os.environ.clear()
os.environ.update(environment)
before = state()
for name in [name for name in sys.modules if name.split('.')[0] == 'pretrax']:
    del sys.modules[name]
PLANTED
import_all()
after = state()
print({key: (before[key], after[key]) for key in before if before[key] != after[key]})
"""


def _changes(planted: str = '') -> dict[str, tuple[object, object]]:
    program = [sys.executable, '-c', _PROGRAM.replace('PLANTED', planted)]
    return ast.literal_eval(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('planted', 'changed'),
    [
        ('', set()),
        ("logging.getLogger('absl').addFilter(lambda record: True); os.environ['X'] = '1'", {'loggers', 'environment'}),
    ],
)
def test_importing_every_module_changes_nothing_in_the_process(planted: str, changed: set[str]) -> None:
    assert _changes(planted).keys() == changed
