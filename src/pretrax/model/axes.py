"""The mesh axes, and which of them share out what. Every mesh has all six; those that are not used have size 1.

r   replicas over a slow network: share out the sequences of a batch; each has all weights
d   data, fully sharded: share out the sequences, and at rest every matrix
e   experts: share out the sequences, and the experts of a mixture
c   context: share out each sequence
t   tensor: share out heads, feed-forward and vocabulary, and between blocks the sequence
p   pipeline stages: share out the layers
"""

import math
from collections.abc import Mapping

AXES = ('r', 'd', 'e', 'c', 't', 'p')
ROWS = 'r d e'  # share out the sequences of a batch
TOKENS = 'r d e c'  # share out its tokens: along these a sum over tokens is a partial sum on each device


def along(axes: str, sizes: Mapping[str, int]) -> int:
    """How many devices there are along some axes of a mesh of these sizes: `along(ROWS, mesh.shape)`."""
    return math.prod(sizes[axis] for axis in axes.split())
