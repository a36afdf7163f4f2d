"""Where the time of a step has to go on an H200, from the program compiled for one that is not there
(docs/performance.md).

    JAX_PLATFORMS=cpu python tests/deviceless/performance.py 1.3B [rows] [key=value of the model ...]

in an environment with the extra `cuda`. Models and batches are those of benchmarks/accelerator.py. A step of 24 layers
takes minutes to compile; nothing is run.
"""

import sys
import time
from pathlib import Path

from targets import compile_step, devices_of

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmarks'))

from accelerator import MODELS, ROWS, flops

from pretrax.cost.memory import temporaries_of
from pretrax.cost.topology import parse_topology
from pretrax.hlo.costs import costs, total


def main() -> None:
    name, *rest = sys.argv[1:]
    device, options = parse_topology('h200').device, dict(one.split('=') for one in rest if '=' in one)
    given = MODELS[name]
    rows = next((int(one) for one in rest if one.isdigit()), dict(zip(MODELS, ROWS[0][1], strict=True))[name])
    matmul = options.pop('matmul', 'compute')
    began = time.monotonic()
    compiled = compile_step(
        devices_of('h200'), {}, rows=rows, length=given['length'], documents=1, vocab_size=50304, matmul=matmul,
        **given['model'], **options,
    )  # fmt: skip
    memory, tokens = compiled.memory_analysis(), rows * given['length']
    print(
        f'{name}, {rows} x {given["length"]} tokens: compiled in {time.monotonic() - began:.0f} s; arguments '
        f'{memory.argument_size_in_bytes / 1e9:.2f} GB, temporaries {temporaries_of(compiled) / 1e9:.2f} GB\n'
    )
    found = costs(compiled.as_text(), device)
    print('| phase | kernels | TFLOP | GB | at best, ms |\n|---|---|---|---|---|')
    whole = total(found)
    for cost in (*found, whole):
        print(
            f'| {cost.phase} | {cost.kernels} | {cost.flops / 1e12:.2f} | {cost.bytes / 1e9:.2f} | '
            f'{1e3 * cost.seconds:.2f} |'
        )
    model = flops({'model': given['model'], 'vocab_size': 50304, 'length': given['length']})
    print(
        f'\n{tokens / whole.seconds:,.0f} tokens/s at best, '
        f'MFU {model.causal * tokens / whole.seconds / device.bf16:.1%} (causal); '
    )
    print(f"the model's own FLOPs: {model.causal * tokens / 1e12:.2f} TFLOP")


if __name__ == '__main__':
    main()
