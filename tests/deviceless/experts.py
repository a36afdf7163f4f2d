"""The experts of two layers on a GPU that is not there: kernels, work, traffic and memory (docs/performance.md).

    JAX_PLATFORMS=cpu python tests/deviceless/experts.py [mixtral | gpt-oss | small] [h100 | b200 ...] [axis=size ...]

in an environment with the extra `cuda`; `small` takes seconds, the others a minute or two. `small` is also the test's.
"""

import json
import sys
from typing import Any

from targets import compile_step, devices_of, facts

from pretrax.cost.topology import parse_topology
from pretrax.hlo.costs import costs, total

SIZES: dict[str, dict[str, Any]] = {
    'mixtral': {
        'family': 'mixtral', 'd_model': 4096, 'n_heads': 32, 'n_kv_heads': 8, 'd_ff': 14336, 'n_experts': 8,
        'experts_per_token': 2,
    },
    'gpt-oss': {'preset': 'gpt-oss-20b'},
    'small': {
        'family': 'mixtral', 'd_model': 512, 'n_heads': 4, 'd_ff': 1024, 'n_experts': 8, 'experts_per_token': 2,
    },
}  # fmt: skip


def main() -> None:
    name, gpu, *mesh = sys.argv[1:]
    sizes = {axis: int(size) for axis, size in (one.split('=') for one in mesh)}
    compiled = compile_step(
        devices_of(gpu), sizes, rows=4, length=4096 if name != 'small' else 2048, documents=1,
        vocab_size=32768, save='none', n_layers=2, layers='unroll', **SIZES[name],
    )  # fmt: skip
    found = costs(compiled.as_text(), parse_topology(gpu).device)
    experts, whole, of_step = next(one for one in found if one.phase == 'experts'), total(found), facts(compiled)
    print(f'{"":10}kernels   TFLOP      GB  ms, best')
    for cost in (experts, whole):
        print(
            f'{cost.phase:10}{cost.kernels:7}{cost.flops / 1e12:8.2f}{cost.bytes / 1e9:8.1f}{1e3 * cost.seconds:10.1f}'
        )
    of_step |= {'flops': experts.flops, 'temporaries': of_step['temporary_bytes'] / 1e9}
    print(json.dumps({key: of_step[key] for key in ('calls', 'flops', 'temporaries')}))


if __name__ == '__main__':
    main()
