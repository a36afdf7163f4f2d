"""pretrax: pretrain decoder-only language models in JAX.

    from pretrax import load_config, pretrain
    result = pretrain(load_config('configs/quickstart.yaml', ['steps=100']))

JAX is imported when a name that needs it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrax.config import from_values as config_from_values
    from pretrax.config import load as load_config
    from pretrax.config import register
    from pretrax.run.loop import Result
    from pretrax.run.loop import train as pretrain
    from pretrax.run.setup import Run, prepare

__version__ = '0.2.0'
__all__ = ['Result', 'Run', 'config_from_values', 'load_config', 'prepare', 'pretrain', 'register']

_PUBLIC = {
    'config_from_values': 'config:from_values',
    'load_config': 'config:load',
    'register': 'config:register',
    'Result': 'run.loop:Result',
    'pretrain': 'run.loop:train',  # not `train`: that is the subpackage
    'Run': 'run.setup:Run',
    'prepare': 'run.setup:prepare',
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, _, attribute = _PUBLIC[name].partition(':')
    return getattr(importlib.import_module(f'{__name__}.{module}'), attribute)
