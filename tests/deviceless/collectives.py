"""What a compiled step of each mesh sends, beside the formulas of docs/parallelism.md: the collectives promised, and no
others.

    JAX_PLATFORMS=cpu python tests/deviceless/collectives.py [part of a row's name]

in an environment with the extra `tpu`. The real step of a small decoder is compiled for the real topology; a row takes
a minute or two. It ends with code 1 where a promised collective has other bytes, or something else is sent.

Bytes are those of the program: of what a gather gives, what a scatter takes, and what is added up, sent on or
exchanged. What a device receives of them is (n - 1) / n, or all of it (twice that for an added-up value). Times are
those of the compiled schedule (`hlo/schedule.py`), not measured.
"""

import sys
import time
from collections import Counter
from typing import Any

import jax
from targets import compile_step, devices_of

from pretrax.cost.links import places_of
from pretrax.cost.topology import parse_topology
from pretrax.hlo.parse import collectives, summarize
from pretrax.hlo.schedule import read_schedule
from pretrax.model.axes import AXES

W = 2  # bytes of the compute dtype, bf16
VOCABULARY = 32_768
DENSE: dict[str, Any] = {
    'family': 'llama', 'n_layers': 4, 'd_model': 2048, 'n_heads': 16, 'n_kv_heads': 8, 'd_head': 128, 'd_ff': 8192,
    'layers': 'scan',
}  # fmt: skip
EXPERTS = DENSE | {'d_ff': 2048, 'n_experts': 8, 'experts_per_token': 2}

# name: (topology, slices, mesh, sequences, length, micro-batches, model)
ROWS: dict[str, tuple[str, int, dict[str, int], int, int, int, dict[str, Any]]] = {
    'r d t': ('v5e:16x16', 2, {'r': 2, 'd': 64, 't': 4}, 128, 2048, 1, DENSE),
    'd t': ('v5p:8x8x8', 1, {'d': 128, 't': 4}, 128, 2048, 1, DENSE),
    'd c t, ring': ('v5p:8x8x8', 1, {'d': 16, 'c': 8, 't': 4}, 16, 16384, 1, DENSE | {'context': 'ring'}),
    'd c, all_to_all': ('v5p:8x8x8', 1, {'d': 64, 'c': 8}, 64, 16384, 1, DENSE | {'context': 'all_to_all'}),
    'v5e d t, sums in f32': ('v5e:16x16', 1, {'d': 64, 't': 4}, 64, 2048, 1, DENSE),
    'v5e d t, sums over d in bf16': ('v5e:16x16', 1, {'d': 64, 't': 4}, 64, 2048, 1, DENSE | {'reduction': 'bf16_r_d'}),
    'd e': ('v6e:16x16', 1, {'d': 32, 'e': 8}, 256, 2048, 1, EXPERTS),
    'd t p': ('v5p:8x8x8', 1, {'d': 32, 't': 4, 'p': 4}, 256, 2048, 8, DENSE),
}

# Padding to whole tiles makes a scattered sum over t 3 % larger, and sends its edges on; XLA may add up where it is
# asked to scatter, and keep a part.
NEAR, OWN = 0.04, 0.03


def promised(
    mesh: dict[str, int], tokens: int, micro_batches: int, model: dict[str, Any]
) -> dict[tuple[str, str], float]:
    """Bytes of one step by (kind, axes). `tokens`: of a micro-batch, on one device."""
    _, d, e, c, t, p = (mesh.get(axis, 1) for axis in AXES)
    sums = 2 if model.get('reduction') == 'bf16_r_d' else 4  # bytes of a gradient over d
    layers, m, f, x = model['n_layers'], model['d_model'], model['d_ff'], model.get('n_experts', 0)
    heads, keys = model['n_heads'] * model['d_head'], model['n_kv_heads'] * model['d_head']
    attention, norms = m * (2 * heads + 2 * keys), m * (2 * layers + 1)
    forward = 3 * m * f * (x or 1)
    ends = 2 * VOCABULARY * m  # embedding and unembedding
    stream = W * tokens * m
    found: Counter[tuple[str, str]] = Counter()

    def add(kind: str, axes: str, n_bytes: float) -> None:
        along = ' '.join(axis for axis in axes.split() if mesh.get(axis, 1) > 1)
        if along:
            found[kind, along] += n_bytes

    # A stage's layers run once for each micro-batch; the scan over the ticks of the pipeline includes the idle ones.
    passes, stages = (micro_batches + p - 1, p) if p > 1 else (1, 1)
    per_layer = (attention + forward / e) / t
    add('all-gather', 'd', 2 * W * per_layer * layers / stages * passes + W * ends / t)
    add('reduce-scatter', 'd', sums * (per_layer * layers / stages * passes + ends / t))
    if x:
        add('all-gather', 'd', 2 * 4 * m * x * layers)
        add('reduce-scatter', 'd', 4 * m * x * layers)
    # Every stage looks all embeddings up; of the head it has its share of the micro-batches, twice in the forward
    # direction.
    heads_here = micro_batches / p
    add('all-gather', 't', stream * (6 * layers / stages * passes + micro_batches + heads_here * (1 + (p > 1))))
    add('reduce-scatter', 't', stream * (4 * layers / stages * passes + micro_batches + heads_here))
    add('all-reduce', 't', 12 * tokens)
    # Once a step, of this device's shard: gradients of what an axis of tokens does not shard.
    shards = layers * (attention + m * x) / d / t / p + ends / d / t
    add('all-reduce', 'r e c', 4 * shards)
    add('all-reduce', 'r c', 4 * layers * forward / d / e / t / p)
    if c > 1 and model['context'] == 'ring':
        add('collective-permute', 'c', layers * c * ((2 * W + 2 * W + 8) * tokens * keys / t + 2 * 4 * tokens))
    elif c > 1:
        add('all-to-all', 'c', layers * W * tokens * (5 * heads + 6 * keys) / t)
        add('all-gather', 'c', 4 * tokens * c * (layers + 1))  # which document a token is of
    if e > 1:
        choices = tokens * model['experts_per_token']
        places = e * 8 * round(1.25 * choices / e / 8 + 0.5)
        add('all-to-all', 'e', layers * places * (5 * W * m + 2 * 4 + 3 * 4))
    if p > 1:
        add('collective-permute', 'p', 2 * passes * stream / t)
        add('reduce-scatter', 'p', micro_batches * stream / t)
        add('all-gather', 'p', micro_batches * stream / t)
        add('all-reduce', 'p', 4 * ends / d / t)
    small = 4 * norms * 4  # gradients of norms, the global norm, counts: below this each
    return {key: n for key, n in found.items() if n > small}


def compare(name: str) -> tuple[list[str], bool]:
    """The lines of a row, and whether all is as promised."""
    topology, slices, mesh, rows, length, micro_batches, model = ROWS[name]
    began = time.monotonic()
    compiled = compile_step(
        devices_of(topology, slices), mesh, rows, length, documents=1, micro_batches=micro_batches,
        vocab_size=VOCABULARY, **model,
    )  # fmt: skip
    seconds, text = time.monotonic() - began, compiled.as_text()
    arranged = jax.tree.leaves(compiled.input_shardings)[0].mesh
    tokens = rows * length // micro_batches // (mesh.get('r', 1) * mesh['d'] * mesh.get('e', 1) * mesh.get('c', 1))
    lines, good = table(name, text, arranged.shape, tokens, seconds)
    places = places_of(arranged.devices.flat)
    schedule = read_schedule(text, dict(arranged.shape), parse_topology(topology, slices), places)
    for row in schedule.rows():
        lines.append(
            f'{row.kind} over {" ".join(row.axes)}: {row.seconds * 1e3:.2f} ms, exposed {row.exposed * 1e3:.2f} ms'
        )
    lines.append(f'all: {schedule.seconds * 1e3:.1f} ms, exposed {schedule.exposed * 1e3:.1f} ms')
    lines.append(f'other work: {schedule.compute * 1e3:.1f} ms')
    return lines, good


def table(name: str, text: str, sizes: Any, tokens: int, seconds: float) -> tuple[list[str], bool]:
    topology, slices, mesh, _, _, micro_batches, model = ROWS[name]
    sent = {
        (kind, ' '.join(sorted(axes, key=AXES.index))): (times, n_bytes, behind)
        for kind, axes, times, n_bytes, behind in summarize(collectives(text, sizes))
    }
    wanted = promised(mesh, tokens, micro_batches, model)
    where = f'{f"{slices} x " * (slices > 1)}{topology}, ' + ' '.join(f'{a}={n}' for a, n in mesh.items())
    lines, good, total = [f'{name} ({where}; compiled in {seconds:.0f} s)'], True, sum(n for _, n, _ in sent.values())
    for (kind, axes), n in sorted(wanted.items(), key=lambda item: -item[1]):
        times, found, behind = sent.pop((kind, axes), (0, 0, 0))
        added = (
            sent.pop(('all-reduce', axes), (0, 0, 0))
            if kind == 'reduce-scatter' and ('all-reduce', axes) not in wanted
            else (0, 0, 0)
        )
        found += added[1]
        near = abs(found / n - 1) <= NEAR
        good &= near
        lines.append(
            f'| {name} | `{kind}` over {axes} | {times + added[0]} | {behind} | {n / 1e6:,.2f} | {found / 1e6:,.2f} '
            f'| {"" if near else "**"}{found / n - 1:+.1%}{"" if near else "**"} |'
        )
    others = sum(n for _, n, _ in sent.values()) / total
    good &= others <= OWN
    names = ', '.join(f'{kind} over {axes} {n / 1e6:,.2f} MB' for (kind, axes), (_, n, _) in sent.items())
    lines.append(f'others: {others:.2%} of all bytes: {names or "none"}')
    return lines, good


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ''
    wrong = 0
    print('| mesh | collective | times | behind work | MB, formula | MB, compiled | |\n' + '|---' * 7 + '|')
    for name in ROWS:
        if wanted in name:
            lines, good = compare(name)
            wrong += not good
            print('\n'.join(lines), flush=True)
    return int(wrong > 0)


if __name__ == '__main__':
    sys.exit(main())
