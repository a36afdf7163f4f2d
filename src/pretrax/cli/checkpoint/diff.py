"""Compare configurations, shapes and values of two checkpoints.

The arrays with the largest differences come first.
"""

import math
from typing import TYPE_CHECKING

from pretrax.errors import UserError
from pretrax.option import argument, option

if TYPE_CHECKING:
    from pretrax.checkpoint import CheckpointArrays
    from pretrax.storage import AnyPath


def diff(
    one: str = argument('A run or a checkpoint.', metavar='A'),
    other: str = argument('Another run or checkpoint.', metavar='B'),
    optimizer: bool = option('Compare the optimizer state as well.', default=False),
    most: int = option('Print at most N arrays.', default=20, min=1, metavar='N'),
) -> None:
    from pretrax.checkpoint import find_checkpoint, read_manifest
    from pretrax.config import ABSENT, diff_values, upgraded
    from pretrax.storage import locate_run

    places = [find_checkpoint(locate_run(path)) for path in (one, other)]
    before, after = (read_manifest(*place) for place in places)
    print(f'{one}: step {before.step:,}\n{other}: step {after.step:,}')
    configs = [upgraded(manifest.description.get('config') or {}) for manifest in (before, after)]
    # A null is a key that the other version of pretrax may not have.
    changes = [change for change in diff_values(*configs) if {*change[1:]} != {ABSENT, None}]
    print(f'configuration: {len(changes)} values differ')
    for key, old, new in changes:
        print(f'  {key}: {old} -> {new}')
    for field in ('weights', 'optimizer')[: 2 if optimizer else 1]:
        _diff_field(places, field, most)


def _diff_field(places: 'list[tuple[AnyPath, int]]', field: str, most: int) -> None:
    from pretrax.checkpoint import CheckpointArrays

    one, other = (CheckpointArrays(*place, field) for place in places)
    unlike = [
        f'{path}: {_shape(one.shapes.get(path))} -> {_shape(other.shapes.get(path))}'
        for path in sorted(one.shapes.keys() | other.shapes)
        if one.shapes.get(path) != other.shapes.get(path)
    ]
    print(f'{field}: {len(unlike)} arrays differ in shape')
    for line in unlike:
        print(f'  {line}')
    common = [path for path in one.shapes if other.shapes.get(path) == one.shapes[path]]
    if not common and not unlike:
        raise UserError(f'{places[0][0]} has no {field}')
    found = sorted(((*_norms(one, other, path), path) for path in common), key=lambda row: -row[0])
    same = sum(apart == 0 for apart, _, _ in found)
    whole = math.hypot(*(apart for apart, _, _ in found)), math.hypot(*(size for _, size, _ in found))
    print(f'{field}: {same} of {len(found)} arrays of one shape are equal')
    for apart, size, name in [(*whole, 'all of them together'), *[row for row in found if row[0]][:most]]:
        relative = apart / size if size else math.inf if apart else 0.0
        print(f'  {apart:10.4g}  {relative:10.3g} of |a|  {name}')
    if len(found) - same > most:
        print(f'  and {len(found) - same - most} more; --most shows them')


def _norms(one: 'CheckpointArrays', other: 'CheckpointArrays', path: str) -> tuple[float, float]:
    """|b - a| and |a| of the arrays a and b of two checkpoints."""
    import numpy as np

    apart = size = 0.0
    for (_, a), (_, b) in zip(one.rows(path), other.rows(path), strict=True):
        apart += float(np.sum(np.square(b.astype(np.float64) - a)))
        size += float(np.sum(np.square(a, dtype=np.float64)))
    return math.sqrt(apart), math.sqrt(size)


def _shape(shape: tuple[int, ...] | None) -> str:
    from pretrax.checkpoint.manifest import shape_text
    from pretrax.config import ABSENT

    return str(ABSENT) if shape is None else shape_text(shape)
