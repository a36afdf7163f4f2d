"""Checkpoints of runs."""

from .store import Checkpoints, read_description, steps_in

__all__ = ['Checkpoints', 'read_description', 'steps_in']
