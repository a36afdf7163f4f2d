"""Every collective in the source, broken one at a time: the loss or a gradient on eight devices then differs from
one's.

    uv run python tests/parallel/mutations.py [part of a place]

A broken collective gives a value of the right shape and type, of this device alone: nothing is sent, nothing is added
up. So it is not the types that see it, but the comparison. It takes about ten minutes on two cores, and ends with code
1 if a broken collective is not seen.
"""

import ast
import contextlib
import functools
import importlib
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import jax
import jax.numpy as jnp

import conftest  # noqa: F401  eight devices
import pretrax
from parallel.cases import MIXTURE, MODELS, gradients, largest
from pretrax.shardlib import ops
from pretrax.shardlib.replication import known_same, settle

SOURCE = Path(pretrax.__file__).parent
FILES = [*sorted(SOURCE.glob('model/*.py')), SOURCE / 'train' / 'step.py']
LEARNED = {'family': 'gpt2', 'n_layers': 1, 'd_model': 32, 'n_heads': 4, 'layers': 'scan'}

# (options, mesh, accumulation, whether it is evaluated too): between them every collective has an axis of two devices.
CONFIGURATIONS = {
    'dense ring': (MODELS['dense'] | {'n_layers': 1}, {'d': 2, 'c': 4}, 1, False),
    'dense all_to_all': (LEARNED | {'context': 'all_to_all', 'dropout': 0.2}, {'d': 2, 'c': 2, 't': 2}, 1, True),
    'experts': (MIXTURE | {'n_layers': 1, 'context': 'ring', 'shared_gate': True}, {'d': 2, 'e': 2, 'c': 2}, 1, False),
    'experts t': (
        MIXTURE | {'n_layers': 1, 'balance_over': 'batch', 'qk_norm': 'full'},
        {'r': 2, 'e': 2, 't': 2},
        1,
        False,
    ),
    'stages': (MIXTURE | {'pipeline_rounds': 2, 'n_layers': 4}, {'r': 2, 't': 2, 'p': 2}, 1, False),
    'stages, 1f1b': (
        MIXTURE | {'pipeline_rounds': 2, 'n_layers': 4, 'save': 'none'},
        {'r': 2, 't': 2, 'p': 2},
        1,
        False,
    ),
    'experts, capacity': (
        MIXTURE | {'n_layers': 1, 'capacity': 0.75, 'balance_over': 'batch'},
        {'d': 2, 'e': 2, 't': 2},
        2,
        False,
    ),
}


def sites():
    """'model/mlp.py:20 all_gather' -> (module, line, name) of every call of a collective."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BROKEN:
                place = path.relative_to(SOURCE)
                module = 'pretrax.' + '.'.join(place.with_suffix('').parts)
                inside = (
                    node.func.id == 'all_gather' and place.name == 'matmul.py'
                )  # of `gather`, whose calls are sites
                # Without it devices run different numbers of rounds, and wait for each other: it hangs, and is not run.
                hangs = node.func.id == 'pmax' and place.name == 'exchange.py'
                # Of products in eight bits, which tests/model/test_eight_bits.py compares on meshes.
                other = place.name == 'eight_bits.py'
                if not (inside or hangs or other):
                    found[f'{place}:{node.lineno} {node.func.id}'] = (module, node.lineno, node.func.id)
    return dict(sorted(found.items()))


@contextlib.contextmanager
def patched(every, broken=None):
    """Runs with one call broken; yields the set of those that communicated along an axis of several devices."""
    reached = set()
    by_name = {}
    for place, (module, line, name) in every.items():
        by_name.setdefault((module, name), {})[line] = place
    before = {}
    for (module, name), places in by_name.items():
        loaded = importlib.import_module(module)
        before[loaded, name] = true = getattr(loaded, name)

        def call(*args, _true=true, _name=name, _places=places, **options):
            place = _places.get(sys._getframe(1).f_lineno)
            if place is not None and along(_name, args) > 1:
                reached.add(place)
                if place == broken:
                    return BROKEN[_name](*args, **options)
            return _true(*args, **options)

        setattr(loaded, name, call)
    try:
        yield reached
    finally:
        for (loaded, name), true in before.items():
            setattr(loaded, name, true)


def moved(spec):
    """The axes that stand on one side of '->' and not, or elsewhere, on the other, by dimension: (position, axes)."""
    (before,), after = ops._parse('', spec, operands=1)
    longer, shorter = (
        (before, after) if sum(len(d.axes) for d in before) > sum(len(d.axes) for d in after) else (after, before)
    )
    return [(i, a.axes[len(b.axes) :]) for i, (a, b) in enumerate(zip(longer, shorter, strict=True)) if a != b]


def size(axes):
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def along(name, args):
    """How many devices a call communicates between."""
    if name in ('psum', 'pmax', 'pmean', 'ppermute'):
        return size(args[0].split())
    (before,), after = ops._parse('', args[0], operands=1)
    changed = {axis for a, b in zip(before, after, strict=True) for axis in set(a.axes) ^ set(b.axes)}
    return size(changed)


def own(axes, x, **_):
    """psum, pmax: what this device has."""
    return jax.tree.map(lambda leaf: settle(known_same(leaf, axes.split()), axes.split()), x)


def own_copies(spec, x, *_, **__):
    """all_gather: this device's slice, again and again."""
    for position, axes in moved(spec):
        x = ops.vary(x, axes)
        x = known_same(jnp.concatenate([x] * size(axes), axis=position), axes)
    return x


def own_slice(spec, x):
    """psum_scatter: a slice of what this device has."""
    for position, axes in moved(spec):
        x = jnp.split(ops.vary(x, axes), size(axes), axis=position)
        x = functools.reduce(lambda a, b: jnp.where(jax.lax.axis_index(axes) == b[0], b[1], a), enumerate(x), x[0])
    return x


def own_pieces(spec, x, **_):
    """all_to_all: this device's pieces, put together as if they had come from all."""
    (before,), after = ops._parse('', spec, operands=1)
    source, target = sorted(
        (i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b),
        key=lambda i: -len(before[i].axes) + len(after[i].axes)
    )  # fmt: skip
    (axis,) = before[source].axes[len(after[source].axes) :]
    return jnp.concatenate(jnp.split(ops.vary(x, (axis,)), size((axis,)), axis=target), axis=source)


BROKEN = {
    'psum': own, 'pmax': own, 'all_gather': own_copies, 'gather': own_copies, 'psum_scatter': own_slice,
    'all_to_all': own_pieces, 'ppermute': lambda axis, x, **_: jax.tree.map(lambda leaf: ops.vary(leaf, (axis,)), x),
}  # fmt: skip


@functools.cache
def expected(configuration):
    options, _, accumulation, evaluates = CONFIGURATIONS[configuration]
    return gradients(options, {}, accumulation, evaluates)


def difference(configuration, every, broken):
    """The largest relative difference of a gradient or term, and whether the broken call was reached; or an error."""
    options, mesh, accumulation, evaluates = CONFIGURATIONS[configuration]
    with patched(every, broken) as reached:
        ours = gradients(options, mesh, accumulation, evaluates)
    pairs = zip(ours, expected(configuration), strict=True)
    # The gradient of a bias of keys is zero, since the softmax does not see it: what there is of it is rounding.
    return max(largest(a, b, floor=1e-3) for a, b in pairs), reached


SEEN = 1e-3  # a relative difference; unbroken it is below 1e-5


def main() -> int:
    every = sites()
    reaches = {}
    for configuration in CONFIGURATIONS:
        error, reaches[configuration] = difference(configuration, every, None)
        print(f'unbroken, {configuration}: {error:.1e}', flush=True)
        assert error < 1e-5
    wanted = sys.argv[1] if len(sys.argv) > 1 else ''
    missed = []
    for place in every:
        if wanted not in place:
            continue
        tried = []
        for configuration in CONFIGURATIONS:
            if place in reaches[configuration]:
                error, _ = difference(configuration, every, place)
                tried.append(f'{error:.1e} ({configuration})')
                if not error <= SEEN:  # NaN is seen too
                    break
        else:
            missed.append(place)
        print(f'{place}: {", ".join(tried) or "communicates in none of the configurations"}', flush=True)
    print(f'{len(missed)} not seen: {", ".join(missed) or "none"}')
    return int(bool(missed))


if __name__ == '__main__':
    sys.exit(main())
