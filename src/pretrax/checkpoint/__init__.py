"""Save and restore of training states."""

from .manifest import read_description, read_manifest, steps_in, verify
from .store import Checkpoints, Keep, SaveError, newest_readable
from .streamed import CheckpointWeights, StreamedArray, write_streamed

__all__ = [
    'CheckpointWeights', 'Checkpoints', 'Keep', 'SaveError', 'StreamedArray', 'newest_readable', 'read_description',
    'read_manifest', 'steps_in', 'verify', 'write_streamed',
]  # fmt: skip
