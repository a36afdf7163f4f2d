"""Save and restore of training states. What needs no JAX (manifests, where checkpoints are) imports none."""

import importlib
from typing import TYPE_CHECKING, Any

from pretrax.checkpoint.keep import Keep
from pretrax.checkpoint.manifest import (
    DamagedError,
    Manifest,
    check_sizes,
    checkpoints_of,
    find_checkpoint,
    is_checkpoint,
    read_description,
    read_manifest,
    steps_in,
    verify,
)
from pretrax.checkpoint.memory_pieces import PiecedState, memory_directory, newest_description, pieces_in, states_of
from pretrax.checkpoint.pieces import CheckpointArrays, CheckpointWeights, is_stacked

if TYPE_CHECKING:
    from pretrax.checkpoint.memory import Memory
    from pretrax.checkpoint.restoring import restore, restore_newest
    from pretrax.checkpoint.store import Checkpoints, SaveError
    from pretrax.checkpoint.streamed import StreamedArray, write_streamed

__all__ = [
    'CheckpointArrays',
    'CheckpointWeights',
    'Checkpoints',
    'DamagedError',
    'Keep',
    'Manifest',
    'Memory',
    'PiecedState',
    'SaveError',
    'StreamedArray',
    'check_sizes',
    'checkpoints_of',
    'find_checkpoint',
    'is_checkpoint',
    'is_stacked',
    'memory_directory',
    'newest_description',
    'pieces_in',
    'read_description',
    'read_manifest',
    'restore',
    'restore_newest',
    'states_of',
    'steps_in',
    'verify',
    'write_streamed',
]

_WITH_JAX = {
    'Memory': 'memory',
    'restore': 'restoring',
    'restore_newest': 'restoring',
    'Checkpoints': 'store',
    'SaveError': 'store',
    'StreamedArray': 'streamed',
    'write_streamed': 'streamed',
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_JAX:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_WITH_JAX[name]}'), name)
