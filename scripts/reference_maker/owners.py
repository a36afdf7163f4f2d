"""The picture of the exchange of whole matrices with their owners. Its types are those of train/owners.py."""

import ast

from pretrax.cost.links import wire_bytes
from reference_maker.source import calls
from reference_maker.svg import COLORS, GREY, INK, document, rectangle, text

SIZES = {'r': 2, 'd': 2}
MATRIX = 4096 * 4096 * 2  # bytes in bf16
NAMES = {'n': 'N', 'rows': 'R/d', 'columns': 'C', 'idle': 'r'}
COLLECTIVES = ('all_to_all', 'all_to_all', 'all_gather')
FILLS = [COLORS[axis] for axis in 'dret']  # of the matrices
CELL, GAP, TOP = 34, 8, 132


def picture() -> str:
    """Four matrices on four devices: their slices, their owners, and the slices of the results."""
    to_owners, back, gather = types()
    slices, share = 4 * MATRIX / SIZES['d'], 2 * MATRIX / SIZES['d']  # on a device, and those that it takes
    sent = [wire_bytes('all-to-all', share, SIZES['d'])] * 2 + [wire_bytes('all-gather', slices, SIZES['r'])]
    panels = [
        (gather.partition(' -> ')[2], 'slices; the share of a device is framed', _slices),
        (to_owners.partition(' -> ')[2], 'owners: the work', _whole),
        (back.partition(' -> ')[2], 'slices of results', _share),
        (gather.partition(' -> ')[2], 'slices of all results', _slices),
    ]
    shapes = [
        text(30, 34, 'Four matrices of 4,096 x 4,096 in bf16 on r=2 d=2, and their owners', size=16, weight=700),
        text(30, 56, 'A color is a matrix. Along r the slices are the same, so each device takes a share.', fill=GREY),
    ]
    for row in range(4):
        shapes.append(text(30, TOP + row * 56 + 22, f'r={row // 2} d={row % 2}', weight=700))
    for column, (spec, words, draw) in enumerate(panels):
        x = 110 + column * 258
        shapes += [text(x, TOP - 36, spec, weight=700), text(x, TOP - 18, words, fill=GREY, size=12)]
        for row in range(4):
            shapes += draw(x, TOP + row * 56, row // 2, row % 2, framed=column == 0)
    bottom = TOP + 4 * 56 + 20
    for column, (name, n_bytes) in enumerate(zip(COLLECTIVES, sent, strict=True)):
        x = 110 + column * 258 + 190
        shapes += [
            text(x, bottom, name, fill=INK, weight=700, anchor='middle'),
            text(x, bottom + 18, f'a device sends {n_bytes / 1e6:.1f} MB', fill=GREY, size=12, anchor='middle'),
        ]
    return document(1100, bottom + 40, shapes, 'Matrices, their owners, and the exchanges between them')


def types() -> list[str]:
    """The types of the three collectives of train/owners.py on this mesh, in the order in which they run."""
    names = NAMES | {'shared': 'N/r', 'moved': 'N/r/d'}
    found = []
    for call in calls('train/owners.py'):
        name = getattr(call.func, 'id', '')
        if name in COLLECTIVES and isinstance(call.args[0], ast.JoinedStr):
            parts = call.args[0].values
            known = names | {'n': 'N/r'} if name == 'all_to_all' else names
            written = [
                str(x.value) if isinstance(x, ast.Constant) else known[x.value.id]  # pyright: ignore
                for x in parts
            ]
            found.append((call.lineno, name, ''.join(written)))
    found.sort()
    assert tuple(name for _, name, _ in found) == COLLECTIVES, found
    return [spec for _, _, spec in found]


def _slices(x: float, y: float, r: int, d: int, *, framed: bool) -> list[str]:
    shapes = [_slice(x, y, d, matrix) for matrix in range(4)]
    left = x + 2 * r * (CELL + GAP) - 4
    return [*shapes, rectangle(left, y - 4, 2 * CELL + GAP + 8, CELL + 8, line=INK)] if framed else shapes


def _share(x: float, y: float, r: int, d: int, *, framed: bool) -> list[str]:
    return [_slice(x, y, d, 2 * r), _slice(x, y, d, 2 * r + 1)]


def _whole(x: float, y: float, r: int, d: int, *, framed: bool) -> list[str]:
    matrix = 2 * r + d
    return [rectangle(x + matrix * (CELL + GAP), y, CELL, CELL, fill=FILLS[matrix])]


def _slice(x: float, y: float, d: int, matrix: int) -> str:
    return rectangle(x + matrix * (CELL + GAP), y + d * CELL / 2, CELL, CELL / 2, fill=FILLS[matrix])
