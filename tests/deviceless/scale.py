"""Published shapes compiled for slices of TPUs that are not there: do they fit? (`pretrax compile` tells what one
sends.)

    JAX_PLATFORMS=cpu python tests/deviceless/scale.py [part of a name]

in an environment with the extra `tpu`. A row is one `mesh:` line; each takes a minute or a few, and nothing is run.
"""

import sys
import time
from typing import Any

from targets import compile_step, devices_of

from pretrax.cost.memory import memory_of, temporaries_of

GB = 1e9
Row = tuple[str, int, float, dict[str, int], int, int, dict[str, Any]]


def staged(schedule: str, rounds: int, rows: int = 256) -> Row:
    """A 405B-shaped Llama in two stages, one sequence per micro-batch and device."""
    model = {'preset': 'llama3.1-405b', 'save': 'none', 'pipeline_rounds': rounds, 'pipeline_schedule': schedule}
    mesh = {'r': 2, 'd': 16, 't': 8, 'p': 2}
    return 'v5p:8x8x8', 1, 95 * GB, mesh, rows, 8192, model | {'micro_batches': rows // 32}


# name: (topology, slices, bytes of a chip, mesh, sequences, length, model)
ROWS: dict[str, Row] = {
    '70B, d t': ('v5p:8x8x8', 1, 95 * GB, {'d': 128, 't': 4}, 128, 8192, {'preset': 'llama3-70b'}),
    '405B, interleaved, 3 rounds': staged('interleaved', rounds=3),
    '405B, 1f1b, 3 rounds': staged('1f1b', rounds=3),
    '405B, 1f1b, 9 rounds': staged('1f1b', rounds=9),
    '405B, interleaved, 3 rounds, 1,024 sequences': staged('interleaved', rounds=3, rows=1024),
    '405B, 1f1b, 3 rounds, 1,024 sequences': staged('1f1b', rounds=3, rows=1024),
    'Mixtral 8x7B, d e': ('v5p:4x4x4', 1, 95 * GB, {'d': 8, 'e': 8}, 64, 4096, {'preset': 'mixtral-8x7b',
    'vocab_size': 32000}),
    '8B, 128k tokens, d c': (
        'v5p:4x4x4', 1, 95 * GB, {'d': 4, 'c': 16}, 4, 131072, {'preset': 'llama3-8b', 'context': 'ring'},
    ),
    '8B, two slices, r d t': ('v5e:16x16', 2, 16 * GB, {'r': 2, 'd': 64, 't': 4}, 256, 4096, {'preset': 'llama3-8b'}),
    '8B, d t': ('v6e:16x16', 1, 32 * GB, {'d': 64, 't': 4}, 256, 4096, {'preset': 'llama3-8b'}),
}  # fmt: skip


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ''
    print('| model | chips | mesh | weights and moments | temporary | of | compiled in |\n' + '|---' * 7 + '|')
    too_large = 0
    for name, (topology, slices, memory, mesh, rows, length, model) in ROWS.items():
        if wanted not in name:
            continue
        start = time.monotonic()
        compiled = compile_step(devices_of(topology, slices), mesh, rows, length, documents=4, **model)
        needs, temporary = memory_of(compiled), temporaries_of(compiled)
        too_large += needs > memory
        line = ' '.join(f'{axis}={size}' for axis, size in mesh.items())
        print(
            f'| {name} | {f"{slices} x " * (slices > 1)}{topology} | `{line}` | {(needs - temporary) / GB:.1f} GB '
            f'| {temporary / GB:.1f} GB | {memory / GB:.0f} GB | {time.monotonic() - start:.0f} s |',
            flush=True,
        )
    return int(too_large > 0)


if __name__ == '__main__':
    sys.exit(main())
