"""Times the matrix products of a training step on this CPU: XLA with each of its libraries, PyTorch and NumPy.

    python benchmarks/products.py [--dtype f32|bf16] [--torch-python PYTHON]

XLA for CPUs hands products to YNNPACK by default; Eigen and oneDNN are in it too, and are chosen by options of the
program. PyTorch uses oneDNN or MKL, and NumPy OpenBLAS. All take turns, and the table has the median over the rounds.
The machine must be quiet; the script says how busy it was.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import QUIET, busy, processor
from torch_environment import torch_python

from pretrax.system.cores import usable_cores

# Rows, inner size, columns: the feed-forward of the models of benchmarks/cpu.py, forward and for its weight, the logits
# of GPT-2's vocabulary, and a product that is large for a laptop.
SHAPES = ((768, 128, 512), (128, 768, 512), (2048, 384, 1536), (384, 2048, 1536), (768, 128, 50304), (2048, 2048, 2048))
LIBRARIES: dict[str, dict[str, Any]] = {
    'XLA, YNNPACK': {},
    'XLA, Eigen': {'xla_cpu_experimental_ynn_fusion_type': ''},
    'XLA, oneDNN': {
        'xla_cpu_use_onednn': True,
        'xla_cpu_experimental_onednn_fusion_type': 'LIBRARY_FUSION_TYPE_DOT',
    },
}
TORCH = """
import json, sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
dtype = {'f32': torch.float32, 'bf16': torch.bfloat16}[sys.argv[2]]
for line in sys.stdin:
    m, k, n, seconds = json.loads(line)
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    print(sorted(times)[len(times) // 2], flush=True)
"""


def median_time(product: Callable[[], Any], seconds: float) -> float:
    """Median seconds of a product, over about `seconds`."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description='Time matrix products on this CPU')
    parser.add_argument('--dtype', choices=('f32', 'bf16'), default='f32')
    parser.add_argument('--torch-python', help='a Python with PyTorch (default: creates .cache/torch-env)')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=0.3, help='duration of a turn')
    asked = parser.parse_args()
    dtype = {'f32': jnp.float32, 'bf16': jnp.bfloat16}[asked.dtype]
    used = [busy()]
    with contextlib.ExitStack() as stack:
        torch = stack.enter_context(subprocess.Popen(
            [torch_python(asked.torch_python), '-c', TORCH, str(usable_cores()), asked.dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ))  # fmt: skip
        assert torch.stdin is not None
        assert torch.stdout is not None
        sides = [*LIBRARIES, 'PyTorch', *(['NumPy'] if asked.dtype == 'f32' else [])]
        print(f'{processor()}, {usable_cores()} cores, {asked.dtype}, GFLOP/s\n')
        print('| product |', ' | '.join(sides), '|')
        print('|' + '---|' * (1 + len(sides)))
        for m, k, n in SHAPES:
            rng = np.random.default_rng(0)
            left, right = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
            a, b = jnp.asarray(left, dtype), jnp.asarray(right, dtype)
            products: dict[str, Callable[[], Any]] = {}
            for name, options in LIBRARIES.items():
                compiled = jax.jit(jnp.matmul).lower(a, b).compile(compiler_options=options)
                products[name] = lambda compiled=compiled, a=a, b=b: compiled(a, b).block_until_ready()
            products['NumPy'] = lambda left=left, right=right: left @ right
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(asked.rounds):
                turn = number % len(sides)
                for side in sides[turn:] + sides[:turn]:
                    if side == 'PyTorch':
                        print(json.dumps([m, k, n, asked.seconds]), file=torch.stdin, flush=True)
                        seconds[side].append(float(torch.stdout.readline()))
                    else:
                        seconds[side].append(median_time(products[side], asked.seconds))
            rates = (f'{2 * m * k * n / statistics.median(seconds[side]) / 1e9:,.0f}' for side in sides)
            print(f'| {m:,} x {k:,} x {n:,} |', ' | '.join(rates), '|', flush=True)
            used.append(busy())
        torch.stdin.close()
    if statistics.median(used) > QUIET:
        print(f'\nOther programs used {statistics.median(used):.0%} of the cores: not a fair comparison.')


if __name__ == '__main__':
    sys.exit(main())
