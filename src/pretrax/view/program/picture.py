"""The picture of a compiled program: a page whose groups open, and an SVG file of the whole.

Both are laid out and drawn by `picture.js`, with dagre (MIT license). For SVG files it runs in
QuickJS, a package of the extra `pictures`.
"""

import base64
import gzip
import importlib.resources
import json
from typing import Any

from markupsafe import Markup

from pretrax.hlo.program import Operation, Program
from pretrax.storage import AnyPath
from pretrax.view.definitions import PROGRAM_FIGURES
from pretrax.view.program.file import write
from pretrax.view.program.graph import Group, communication_name, edges_of, groups_of
from pretrax.view.template import template

PHASES = {
    'forward': 'forward',
    'backward': 'backward',
    'recomputation': 'recomputation',
    'update': 'optimizer and metrics',
    'input': 'inputs',
}
BOXES = 1500  # of an SVG file, at most about


def page_of(program: Program, title: str, where: str = '') -> str:
    """An HTML page that needs no network."""
    data = _data(program, title)
    axes = [(_axis_class((axis,)), f'collectives over {axis}') for axis, n in program.mesh.items() if n > 1]
    if len(axes) > 1:
        axes.append(('many', 'over several axes'))
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(',', ':')).encode(), 6, mtime=0)).decode()
    return template('program/page.html').render(
        title=title,
        where=where,
        phases=PHASES.items(),
        axes=axes if any(one.collective for one in program.operations.values()) else [],
        definitions=PROGRAM_FIGURES.items(),
        program=packed,
        picture_css=Markup(_asset('picture.css')),
        dagre_js=Markup(_asset('dagre.min.js')),
        picture_js=Markup(_asset('picture.js')),
    )


def svg_of(program: Program, title: str, most: int = BOXES) -> str:
    """An SVG picture with all groups open, as far as it has at most about `most` boxes."""
    import quickjs

    context = quickjs.Context()
    context.eval('globalThis.structuredClone = (value) => JSON.parse(JSON.stringify(value))')
    for name in ('dagre.min.js', 'picture.js'):
        context.eval(_asset(name))
    context.set('written', json.dumps(_data(program, title)))
    context.set('style', _asset('picture.css'))
    drawn = context.eval(
        'const program = Picture.prepare(JSON.parse(written));'
        f'JSON.stringify(Picture.file(program, Picture.everything(program, {most}), style))'
    )
    return json.loads(drawn)


def write_picture(path: AnyPath, program: Program, title: str, where: str = '') -> int:
    """Writes a page or an SVG file, by the file's name, and returns its size in bytes.

    Raises:
        UserError: the file cannot be written.
    """
    content = (page_of(program, title, where) if path.suffix == '.html' else svg_of(program, title)).encode()
    write(path, content)
    return len(content)


def _asset(name: str) -> str:
    return (importlib.resources.files(str(__package__)) / name).read_text(encoding='utf-8')


def _data(program: Program, title: str) -> dict[str, Any]:
    """What the page draws. The keys are short, because there are many nodes: `_operation` and `_group` explain them."""
    nodes: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    types: dict[str, int] = {}

    def add(group: Group) -> int:
        children = [add(inner) for inner in group.groups.values()]
        for one in group.operations:
            numbers[one.name] = len(nodes)
            children.append(len(nodes))
            nodes.append(_operation(program, one))
        nodes.append(_group(group, children))
        return len(nodes) - 1

    whole = groups_of(program)
    whole.name = 'training step'
    root = add(whole)
    edges = [
        (numbers[edge.source], numbers[edge.target], types.setdefault(edge.type, len(types)), edge.bytes)
        for edge in edges_of(program)
        if edge.source in numbers and edge.target in numbers
    ]
    phases = list(PHASES)
    return {'title': title, 'root': root, 'nodes': nodes, 'edges': edges, 'types': list(types), 'phases': phases}


def _group(group: Group, children: list[int]) -> dict[str, Any]:
    held = sum(one.size for one in group.everything())  # of arguments
    return {
        'g': 1,
        'n': group.name,
        'p': list(PHASES).index(group.phase),
        'c': children,
        'k': group.kernels,
        'f': group.flops,
        'b': group.bytes if group.kernels else held,
        'a': sum(1 for _ in group.everything()),
        'm': [
            (name, n, _axis_class(name.partition(' over ')[2].split())) for name, n in group.communication.most_common()
        ],
    }


def _operation(program: Program, one: Operation) -> dict[str, Any]:
    node = _node(program, one) | {'p': list(PHASES).index(one.phase), 't': one.times}
    if one.is_kernel:
        node['r'] = (one.read, one.written)
    if one.collective is not None:
        collective = one.collective
        node['m'] = (communication_name(one), collective.bytes, _axis_class(collective.axes), collective.asynchronous)
    if one.operation == 'fusion' and (contents := program.contents(one)):
        places = {inner.name: number for number, inner in enumerate(contents)}
        operands = [[places[name] for name in inner.operands if name in places] for inner in contents]
        node['x'] = [_node(program, inner) | {'a': each} for inner, each in zip(contents, operands, strict=True)]
    return node


def _node(program: Program, one: Operation) -> dict[str, Any]:
    """An operation, also one in a fusion: there, 'a' are its operands, as numbers in the fusion."""
    node: dict[str, Any] = {'n': one.name, 'o': one.operation, 's': one.shape, 'z': one.size}
    if one.flops:
        node['f'] = one.flops
    if source := program.source(one):
        node['u'] = source
    return node


def _axis_class(axes: tuple[str, ...] | list[str]) -> str:
    """The color of collectives: of their axis, or one for several axes."""
    return axes[0] if len(axes) == 1 and axes[0] in ('r', 'd', 'e', 'c', 't', 'p') else 'many'
