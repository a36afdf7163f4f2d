"""Which weights belong to which fragment: round n of a federation is about fragment (n - 1) % P. Imports no JAX.

Layer i belongs to fragment i % P: the strided pattern of Douillard et al. 2025, arXiv:2501.18512, section 3.2. So every
stage of a pipeline takes part in every round. Weights outside of the layers, such as the embeddings, and arrays of
models that do not name layers, go to the fragment with the fewest numbers so far, the largest array first.
"""

import math
from collections.abc import Mapping, Sequence

from pretrax.errors import UserError

type Run = tuple[int, int]  # rows start to stop of the first dimension
type Fragment = dict[str, tuple[Run, ...] | None]  # by the name of an array; None: all of it


def fragments(
    shapes: Mapping[str, tuple[int, ...]], count: int, layers: Mapping[str, Sequence[int]] | None = None
) -> list[Fragment]:
    """Divides weights into `count` fragments.

    Args:
        shapes: of the weights, by dotted name.
        layers: for stacked weights [layers, ...], the number of the layer that each row belongs to. An array with a
            number in its name, as 'blocks.3.mlp.up', is not stacked: the number is that of its layer.

    Raises:
        UserError: a fragment would be empty.
    """
    if count == 1:
        return [dict.fromkeys(shapes)]
    parts: list[Fragment] = [{} for _ in range(count)]
    sizes = [0] * count
    others = []
    for name, shape in shapes.items():
        numbers = [int(part) for part in name.split('.') if part.isdecimal()]
        if numbers:
            parts[numbers[0] % count][name] = None
            sizes[numbers[0] % count] += math.prod(shape)
        elif layers and name in layers:
            for part, fragment in enumerate(parts):
                rows = [row for row, layer in enumerate(layers[name]) if layer % count == part]
                if rows:
                    fragment[name] = tuple((row, row + 1) for row in rows)
                    sizes[part] += len(rows) * math.prod(shape[1:])
        else:
            others.append(name)
    for name in sorted(others, key=lambda name: (-math.prod(shapes[name]), name)):
        part = sizes.index(min(sizes))
        parts[part][name] = None
        sizes[part] += math.prod(shapes[name])
    if not all(parts):
        raise UserError(f'federation.fragments={count}: the model has too few layers\nuse fewer fragments')
    return parts
