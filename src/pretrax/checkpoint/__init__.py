"""Checkpoints of runs."""

from .store import Checkpoints, read_description, steps_in
from .streamed import CheckpointWeights, StreamedArray, write_streamed

__all__ = ['CheckpointWeights', 'Checkpoints', 'StreamedArray', 'read_description', 'steps_in', 'write_streamed']
