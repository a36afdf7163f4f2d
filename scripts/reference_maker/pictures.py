"""Pictures of the mesh: all six axes, and what each of them shards and sends.
Types and collectives are those of the source.
"""

import ast
import re
from typing import NamedTuple

from reference_maker.collectives import Collective, collectives, declared, shards
from reference_maker.source import tree
from reference_maker.svg import COLORS, GREY, INK, PALE, document, rectangle, text, type_text

AXES = ('r', 'd', 'e', 'c', 't', 'p')
DEVICES = 4  # along the axis of a picture
ROW = 24  # height of a line


class Held(NamedTuple):
    """An array: its name in the picture, where its type is declared, and whether it is a weight."""

    name: str
    file: str
    owner: str
    field: str
    is_weight: bool


HELD = (
    Held('tokens of the batch', 'loss.py', 'Batch', 'tokens', False),
    Held('hidden states between blocks', 'mlp.py', 'feed_forward', 'h', False),
    Held('queries', 'attention.py', 'context_parallel_attention', 'q', False),
    Held('logits', 'loss.py', 'cross_entropy', 'logits', False),
    Held('weights: queries', 'attention.py', 'AttentionWeights', 'q', True),
    Held('weights: feed-forward, up', 'mlp.py', 'FeedForwardWeights', 'up', True),
    Held('weights: experts, up', 'moe.py', 'ExpertWeights', 'expert_up', True),
    Held('weights: norm', 'weights.py', 'Layer', 'norm1', True),
    Held('weights: embedding', 'weights.py', 'Weights', 'embed', True),
)
# What the types do not say: when a collective runs.
NOTES = {
    'r': 'Nothing moves in the forward pass. The sum runs layer by layer in the backward pass, or at the end of the '
    'step.',
    'd': 'A matrix is gathered before its product and not kept: the backward pass gathers it again.',
    'e': 'Tokens travel to the devices of their experts, and the results travel back.',
    'c': 'Attention alone needs other tokens: model.attention.context chooses all_to_all or ring (ppermute).',
    't': 'Each block gathers its tokens, and scatters the sum of its results.',
    'p': 'In each tick, every stage sends its result to the next one, and in the backward pass a gradient to the one '
    'before.',
}
TRANSPOSES = {
    'all_gather': 'psum_scatter',
    'psum_scatter': 'all_gather',
    'all_to_all': 'all_to_all',
    'ppermute': 'ppermute',
}
INTEGERS = {'B', 'L', 'two'}  # dimensions of arrays of integers
MOST = 8  # lines of collectives in the forward pass


def mesh() -> str:
    """64 devices, two along each axis, nested from the slowest network to the closest neighbors."""
    order = _constant('OUTSIDE_IN')
    meanings = _meanings()
    left, top, cell = 30, 78, 34
    gaps = dict(zip(order, (34, 34, 16, 16, 5, 5), strict=True))
    across, down = order[::2], order[1::2]

    def place(bits: dict[str, int]) -> tuple[float, float]:
        def along(axes: tuple[str, ...]) -> float:
            size, offset = cell, 0.0
            for axis in reversed(axes):
                offset += bits[axis] * (size + gaps[axis])
                size = 2 * size + gaps[axis]
            return offset

        return left + along(across), top + along(down)

    shapes = [text(left, 34, 'A mesh of 64 devices: two along each axis', size=16, weight=700)]
    shapes.append(text(left, 56, 'Colored: the neighbor of device 0 along each axis, to which it sends.', fill=GREY))
    for number in range(64):
        bits = {axis: number >> (5 - depth) & 1 for depth, axis in enumerate(order)}
        x, y = place(bits)
        own = [axis for axis in order if bits[axis]]
        fill = COLORS[own[0]] if len(own) == 1 else INK if not own else PALE
        shapes.append(rectangle(x, y, cell, cell, fill=fill, radius=4))
        name = own[0] if len(own) == 1 else '0' if not own else ''
        if name:
            shapes.append(
                text(x + cell / 2, y + cell / 2 + 5, name, fill='white', weight=700, anchor='middle', size=15)
            )
    side = place(dict.fromkeys(order, 1))
    x = side[0] + cell + 48
    shapes.append(text(x, top + 12, 'from the slowest network', fill=GREY))
    for row, axis in enumerate(order):
        y = top + 40 + row * 46
        shapes.append(rectangle(x, y - 15, 20, 20, fill=COLORS[axis], radius=4))
        shapes.append(text(x + 10, y, axis, fill='white', weight=700, anchor='middle'))
        name, _, rest = meanings[axis].partition(': ')
        shapes.append(text(x + 30, y, name, weight=700))
        shapes.append(text(x + 30, y + 17, rest, fill=GREY, size=12))
    shapes.append(text(x, top + 40 + 6 * 46 - 4, 'to the closest neighbors', fill=GREY))
    return document(1000, round(side[1] + cell + 30), shapes, 'A mesh of 64 devices with six axes, nested')


def of_axis(axis: str) -> str:
    """What the devices along an axis hold, and what they send."""
    color, (name, _, meaning) = COLORS[axis], _meanings()[axis].partition(': ')
    shapes = [
        rectangle(24, 18, 30, 30, fill=color, radius=5),
        text(39, 39, axis, fill='white', size=18, weight=700, anchor='middle'),
        text(66, 33, name, size=16, weight=700),
        text(66, 50, meaning, fill=GREY),
    ]
    held, bottom = _held(axis, 92)
    moved, end = _moved(axis, 92)
    height = max(bottom, end) + 22
    shapes.append(text(24, height - 16, NOTES[axis], fill=INK))
    return document(1040, height, [*shapes, *held, *moved], f'What the mesh axis {axis} shards and sends')


def type_of(each: Held) -> str:
    """The type of an array, as it is declared; weights of a layer are stacked over the layers."""
    spec = declared(each.file, each.owner, each.field)
    stacked = declared('weights.py', 'Weights', 'layers').replace('_', 'layers')
    return f'{stacked} {spec}' if each.is_weight and each.owner != 'Weights' else spec


def _held(axis: str, top: int) -> tuple[list[str], int]:
    """The shapes of what each device has, and where they end."""
    shapes = [text(24, top, f'{DEVICES} devices along {axis} hold', weight=700)]
    width, x0 = 24, 436
    shapes += [text(x0 + k * (width + 6) + width / 2, top, str(k), fill=GREY, anchor='middle') for k in range(DEVICES)]
    y = top
    for each in HELD:
        y += ROW + (8 if each.name in ('weights: queries',) else 0)
        spec = type_of(each)
        shapes += [text(24, y, each.name), type_text(240, y, spec, axis, size=11.5)]
        for k in range(DEVICES):
            x, is_sharded = x0 + k * (width + 6), shards(spec, axis)
            part = width / DEVICES
            shapes.append(rectangle(x, y - 12, width, 15, line=GREY, fill='white' if is_sharded else PALE))
            if is_sharded:
                shapes.append(rectangle(x + k * part, y - 12, part, 15, fill=COLORS[axis], radius=1))
    y += ROW
    shapes.append(rectangle(240, y - 11, 12, 12, fill=COLORS[axis]))
    shapes.append(text(258, y, 'its part', fill=GREY, size=12))
    shapes.append(rectangle(318, y - 11, 12, 12, fill=PALE, line=GREY))
    shapes.append(text(336, y, f'all of it, as far as {axis} is concerned', fill=GREY, size=12))
    return shapes, y + ROW


def _moved(axis: str, top: int) -> tuple[list[str], int]:
    """The shapes of the collectives, and where they end."""
    x, y = 600, top
    shapes = []
    forward: dict[tuple[str, str], list[str]] = {}
    for each in collectives(axis):
        forward.setdefault((each.name, each.spec), []).append(each.file)
    parts = [
        ('forward pass', [Collective(name, spec, f'in {", ".join(files)}') for (name, spec), files in forward.items()]),
        ('backward pass: gradients', [_transposed(each) for each in forward if _has_gradient(each)]),
        ('once per step', _of_step(axis)),
    ]
    for title, found in parts:
        shapes.append(text(x, y, title, weight=700))
        for each in found[:MOST]:
            y += ROW - 5
            shapes.append(text(x + 8, y, each.name, fill=COLORS[axis], weight=700, size=12))
            shown = each.spec if '->' in each.spec else ''
            shapes.append(
                type_text(x + 106, y, shown.replace('->', '→'), axis, size=11)
                if shown
                else text(x + 106, y, each.file, fill=GREY, size=12)
            )
        if len(found) > MOST:
            y += ROW - 5
            shapes.append(text(x + 106, y, f'and {len(found) - MOST} more, of other weights', fill=GREY, size=12))
        if not found:
            y += ROW - 5
            shapes.append(text(x + 8, y, 'nothing', fill=GREY, size=12))
        y += ROW + 8
    return shapes, y


def _has_gradient(forward: tuple[str, str]) -> bool:
    """Whether the argument of a collective has one: segments and random words are integers."""
    names = {dim.partition('/')[0] for dim in forward[1].partition(' -> ')[0].split()}
    return forward[0] in TRANSPOSES and not names <= INTEGERS


def _transposed(forward: tuple[str, str]) -> Collective:
    """The collective of the gradient: the transpose of the collective in the forward pass."""
    name, spec = forward
    before, arrow, after = spec.partition(' -> ')
    return Collective(
        TRANSPOSES[name], f'{after}{arrow}{before}' if arrow else spec, 'the other way' if not arrow else ''
    )


def _of_step(axis: str) -> list[Collective]:
    """Sums of gradients: of the weights that the axis does not shard, if it shards tokens or layers."""
    whole = [each.name.removeprefix('weights: ') for each in HELD if each.is_weight and not shards(type_of(each), axis)]
    works_on_parts = axis in _constant('TOKENS') or any(shards(type_of(each), axis) for each in HELD)
    if not (whole and works_on_parts):
        return []
    named = 'all weights' if len(whole) == sum(each.is_weight for each in HELD) else '; '.join(whole)
    return [Collective('psum', '', f'of the gradients of what {axis} does not shard:'), Collective('', '', named)]


def _meanings() -> dict[str, str]:
    """{axis: 'data: shards the sequences ...'} of the docstring of model/axes.py."""
    docstring = ast.get_docstring(tree('model/axes.py')) or ''
    return {
        axis: f'{name}: {rest}' for axis, name, rest in re.findall(r'^([a-z])   (\w+): (.*)$', docstring, re.MULTILINE)
    }


def _constant(name: str) -> tuple[str, ...]:
    """The axes in a constant of model/axes.py."""
    for node in tree('model/axes.py').body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', None) == name:
            value = ast.literal_eval(node.value)
            return tuple(value.split() if isinstance(value, str) else value)
    raise KeyError(name)
