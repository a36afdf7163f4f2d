"""pretrax: pretrain decoder-only language models in JAX.

    import pretrax
    result = pretrax.pretrain('quickstart', ['steps=100'])
    print(result, pretrax.load(result).generate('def '))

JAX is imported when a name that needs it is first used. docs/library.md describes each name.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrax.config import from_values as config_from_values
    from pretrax.config import load as load_config
    from pretrax.config import register
    from pretrax.errors import UserError
    from pretrax.library import load, prepare, pretrain
    from pretrax.run.result import Result
    from pretrax.run.setup import Run
    from pretrax.weights.loaded import LoadedModel

__version__ = '0.2.0'
__all__ = [
    'LoadedModel',
    'Result',
    'Run',
    'UserError',
    'config_from_values',
    'load',
    'load_config',
    'prepare',
    'pretrain',
    'register',
]

_PUBLIC = {
    'config_from_values': 'config:from_values',
    'load': 'library:load',
    'load_config': 'config:load',
    'LoadedModel': 'weights.loaded:LoadedModel',
    'prepare': 'library:prepare',
    'pretrain': 'library:pretrain',  # not `train`: that is the subpackage
    'register': 'config:register',
    'Result': 'run.result:Result',
    'Run': 'run.setup:Run',
    'UserError': 'errors:UserError',
}


if not TYPE_CHECKING:  # a type checker would take it for a promise that every name exists

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        module, _, attribute = _PUBLIC[name].partition(':')
        return getattr(importlib.import_module(f'{__name__}.{module}'), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
