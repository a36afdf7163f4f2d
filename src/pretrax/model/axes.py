"""The mesh axes and what each of them shards. Every mesh has all six; unused axes have size 1.

r   replica: shards the sequences of a batch, over a slow network; every replica has all weights
d   data: shards the sequences, and every matrix at rest
e   expert: shards the sequences, and the experts of a mixture
c   context: shards each sequence
t   tensor: shards heads, feed-forward and vocabulary, and the sequence between blocks
p   pipeline: shards the layers
"""

import math
from collections.abc import Mapping

AXES = ('r', 'd', 'e', 'c', 't', 'p')  # all axes of a mesh
OUTSIDE_IN = ('r', 'p', 'd', 'e', 'c', 't')  # from the slowest network to the closest neighbors: run/placement.py
ROWS = 'r d e'  # shard the sequences of a batch
TOKENS = 'r d e c'  # shard its tokens: a sum over tokens is a partial sum along these axes


def along(axes: str, sizes: Mapping[str, int]) -> int:
    """The number of devices along some axes of a mesh: `along(ROWS, mesh.shape)`."""
    return math.prod(sizes[axis] for axis in axes.split())
