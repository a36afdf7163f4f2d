"""Compares training speed with PyTorch on one accelerator, part by part, in one command that can be resumed.

    python benchmarks/accelerator.py                      # everything, on the device of this machine
    python benchmarks/accelerator.py --list               # the parts, most important first
    python benchmarks/accelerator.py --limit-seconds 570  # as many as fit; the same command resumes (exit code 75)
    python benchmarks/accelerator.py --tiny               # the same parts with toy shapes, to check that they run

Every part is a process of its own, so the two frameworks never hold the device at the same time. The result of each
part is written at once to `<out>/accelerator-<device>.json`; the next call resumes from this file, and the table is
made from it. Nothing is downloaded. A machine with JAX, Optax and PyTorch may lack pydantic and PyYAML:
`--make-wheels DIR` downloads their wheels on a machine with a network, and `--wheels DIR` uses them on
a machine without one.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / 'src'))  # pretrax need not be installed

from machine import QUIET, busy  # noqa: E402
from torch_environment import BenchmarkError, has_torch  # noqa: E402

from pretrax.cost.devices import lookup  # noqa: E402
from pretrax.cost.flops import FORMULA_VERSION, Flops, count_flops  # noqa: E402

WHEELS = ('pydantic', 'pydantic-core', 'annotated-types', 'typing-inspection', 'pyyaml')
MORE_TO_DO = 75
SETTINGS = {'learning_rate': 1e-3, 'weight_decay': 0.1, 'b1': 0.9, 'b2': 0.95, 'eps': 1e-8, 'clip_norm': 1.0}
TOLERANCE = {'f32': 2e-4, 'bf16': 2e-2}  # nats, over the first steps from the same weights
LLAMA = {'family': 'llama', 'tied': True}
MODELS: dict[str, dict[str, Any]] = {
    '124M': {'model': {'family': 'gpt2', 'n_layers': 12, 'd_model': 768, 'n_heads': 12}, 'length': 1024},
    '1.3B': {'model': LLAMA | {'n_layers': 24, 'd_model': 2048, 'n_heads': 16, 'd_ff': 5504}, 'length': 2048},
    '2.6B': {'model': LLAMA | {'n_layers': 32, 'd_model': 2560, 'n_heads': 20, 'd_ff': 6848}, 'length': 4096},
}
ROWS = (
    (130e9, (64, 16, 4)),
    (70e9, (32, 8, 1)),
    (30e9, (16, 2, 1)),
    (0, (4, 1, 1)),
)  # sequences of each model, by memory
TARGETS = {'124M': 600e3, '1.3B': 72e3, '2.6B': 35e3, '1.3B, fp8': 90e3}  # tokens/s on an H200
TORCH = {
    'PyTorch, compile': {'compile': True},
    'PyTorch, eager': {},
    'PyTorch, compile max-autotune': {'compile': True, 'mode': 'max-autotune-no-cudagraphs'},
}
CHECKED = {'PyTorch, eager': {}, 'PyTorch, compile': {'compile': True}}
# Optimizations to switch on or off: model, change, expected effect
LEVERS: dict[str, tuple[str, dict[str, Any], str]] = {
    'fp8': ('1.3B', {'matmul': 'fp8'}, '1.2x'),
    'layers in a loop': ('1.3B', {'options': {'layers': 'scan'}}, '0.95x, and more memory'),
    'products differentiated by JAX': ('1.3B', {'off': 'own products'}, '0.7x: backward products are f32'),
    'loss differentiated by JAX': ('124M', {'off': 'own loss'}, '0.88x: 14 ms longer for 65,536 tokens'),
    'products differentiated by JAX, 124M': ('124M', {'off': 'own products'}, '0.75x'),
    'layers in a loop, 124M': ('124M', {'options': {'layers': 'scan'}}, '0.95x'),
    'loss in chunks, 124M': ('124M', {'options': {'loss_chunks': 8}}, '0.92x, and a fifth less memory'),
    'attention in plain XLA': ('124M', {'options': {'attention': 'blockwise'}}, '0.6x'),
    'recomputed layers': ('1.3B', {'options': {'save': 'none'}}, '0.78x'),
    'attention kept, the rest recomputed': ('1.3B', {'options': {'save': 'attention'}}, '0.82x'),
    'fp8, 124M': ('124M', {'matmul': 'fp8'}, '1.0x'),
    'int8, 124M': ('124M', {'matmul': 'int8'}, '0.5x: no hardware units'),
    'f32 products': ('124M', {'compute': 'f32'}, '0.3x'),
    'q, k, v in one product': ('124M', {'compiler_options': {'xla_gpu_dot_merger_threshold_mb': 4096}}, '0.98x'),
    'state not donated': ('124M', {'off': 'donation'}, '1.0x, and 0.6 GB more'),
    'no Triton products': ('124M', {'compiler_options': {'xla_gpu_enable_triton_gemm': False}}, '1.0x'),
    'no command buffers': ('124M', {'compiler_options': {'xla_gpu_enable_command_buffer': ''}}, '0.98x'),
    'latency-hiding scheduler': (
        '124M', {'compiler_options': {'xla_gpu_enable_latency_hiding_scheduler': True}}, '1.0x on one device',
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """One or more processes and their specification. `seconds`: upper end of the usual duration."""

    name: str
    side: str  # 'pretrax', 'torch', or 'check' for both, one after the other
    spec: dict[str, Any]
    seconds: float


Launch = Callable[[str, dict[str, Any], float], dict[str, Any]]


class NoMemory(Exception):  # noqa: N818  not an error
    """A process ran out of device memory."""


@dataclasses.dataclass
class Processes:
    """Runs one side of a part in a process of its own."""

    python: dict[str, str]  # interpreter of each side
    path: str  # PYTHONPATH

    def __call__(self, side: str, spec: dict[str, Any], seconds: float) -> dict[str, Any]:
        script = HERE / {'pretrax': 'accelerator_pretrax.py', 'torch': 'torch_accelerator.py'}[side]
        environment = {
            **os.environ, 'PYTHONPATH': self.path, 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.95',
            'PYTORCH_ALLOC_CONF': 'expandable_segments:True', 'TF_CPP_MIN_LOG_LEVEL': '2',
        }  # fmt: skip
        process = subprocess.Popen(
            [self.python[side], str(script), json.dumps(spec)], env=environment, cwd=tempfile.gettempdir(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            out, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # PyTorch compiles in processes of its own
            process.communicate()
            raise
        if process.returncode:
            if re.search('RESOURCE_EXHAUSTED|out of memory|OutOfMemory', error):
                raise NoMemory
            raise BenchmarkError(f'{side} failed with exit code {process.returncode}:\n{error.strip()[-3000:]}')
        return json.loads(out.strip().splitlines()[-1])


def parts(device: dict[str, Any], tiny: bool, with_torch: bool, seconds: float) -> list[Part]:
    """All parts, most important first."""
    rows = dict(zip(MODELS, next(rows for memory, rows in ROWS if tiny or device['memory'] >= memory), strict=True))
    specs = {
        name: {
            'kind': 'train', **sizes, 'rows': rows[name], 'vocab_size': 50304, 'compute': 'bf16', 'training': SETTINGS,
            'seconds': seconds,
        }
        for name, sizes in MODELS.items()
    }  # fmt: skip
    if tiny:
        small = {'n_layers': 2, 'd_model': 64, 'n_heads': 2}
        for name, spec in specs.items():
            d_ff = {'d_ff': 128} if 'd_ff' in spec['model'] else {}
            specs[name] = spec | {'model': spec['model'] | small | d_ff, 'length': 32, 'rows': 4, 'vocab_size': 384}
    found = [
        Part('ceilings', 'pretrax', {'kind': 'ceilings', 'size': 256 if tiny else 8192,
        'values': 2**16 if tiny else 2**31}, 45)
    ]  # fmt: skip
    if with_torch:
        for name in ('124M', '1.3B'):
            shallow = specs[name]['model'] | {'n_layers': 2}
            spec = specs[name] | {'kind': 'check', 'model': shallow, 'rows': 4, 'steps': 5}
            found += [Part(f'check {name}', 'check', spec, 240)]
    for name, spec in specs.items():
        found.append(Part(f'{name}, pretrax', 'pretrax', spec, 150))
        for peer, how in TORCH.items() if with_torch else ():
            found.append(Part(f'{name}, {peer}', 'torch', spec | how, 200))
    for lever, (name, change, _) in LEVERS.items():
        fits = {'exempt': ['head']} if tiny and 'matmul' in change else {}
        spec = specs[name] | change | fits | {'seconds': seconds / 2}
        if not (tiny and 'compiler_options' in change):
            found.append(Part(f'lever: {lever}', 'pretrax', spec, 120))
    for name in ('1.3B', '124M'):
        spec = specs[name]
        M, F = spec['model']['d_model'], spec['model'].get('d_ff', 4 * spec['model']['d_model'])
        products = {'q': (M, M), 'up': (M, F), 'down': (F, M), 'head': (M, spec['vocab_size'])}
        attention = (spec['rows'], spec['length'], spec['model']['n_heads'], M // spec['model']['n_heads'])
        tokens = spec['rows'] * spec['length']
        found.append(Part(f'kernels {name}', 'pretrax', {'kind': 'kernels', 'products': products, 'tokens': tokens,
        'attention': attention}, 120))  # fmt: skip
        for batch in (1, 32):
            decode = spec | {'kind': 'decode', 'rows': batch, 'new': 8 if tiny else 128}
            found.append(Part(f'decode {name}, batch {batch}', 'pretrax', decode, 150))
    first = ['ceilings', *(f'check {name}' for name in MODELS), '1.3B, pretrax', '1.3B, PyTorch, compile']
    first += ['124M, pretrax', '124M, PyTorch, compile', '2.6B, pretrax', '2.6B, PyTorch, compile', 'lever: fp8']
    return sorted(found, key=lambda part: first.index(part.name) if part.name in first else len(first))


def run_part(part: Part, launch: Launch, seconds: float) -> dict[str, Any]:
    """Result of a part. If memory runs out, the batch is split into more passes,
    and the result records their number.
    """
    if part.side == 'check':
        return compare_losses(part, launch, seconds)
    passes = 1
    while True:
        try:
            found = launch(part.side, part.spec | ({'passes': passes} if passes > 1 else {}), seconds)
            return found | {'passes': passes}
        except NoMemory:
            passes *= 2
            if part.spec['kind'] != 'train' or passes > part.spec['rows']:
                return {'failed': 'out of memory'}


def compare_losses(part: Part, launch: Launch, seconds: float) -> dict[str, Any]:
    """Losses of both sides from the same weights on the same batches, in f32 and in bf16.

    Raises:
        BenchmarkError: the losses differ, so the speeds are not comparable.
    """
    losses, largest = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        for compute in ('f32', 'bf16'):
            spec = part.spec | {'compute': compute, 'inputs': str(Path(directory) / f'{compute}.npz')}
            ours = losses[f'pretrax, {compute}'] = launch('pretrax', spec, seconds)['losses']
            for peer, how in CHECKED.items():
                if compute == 'f32' and how:
                    continue
                theirs = losses[f'{peer}, {compute}'] = launch('torch', spec | how, seconds)['losses']
                difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
                largest[f'{peer}, {compute}'] = difference
                if not difference <= TOLERANCE[compute]:
                    raise BenchmarkError(
                        f'{part.name}: pretrax and {peer} in {compute} do not train the same model: losses differ by '
                        f'{difference:.2e}\n{losses}'
                    )
    return {'losses': losses, 'largest_difference': largest}


def flops(spec: dict[str, Any]) -> Flops:
    """Training FLOPs per token."""
    model, M = spec['model'], spec['model']['d_model']
    layer = 12 * M * M if model['family'] == 'gpt2' else 4 * M * M + 3 * M * model['d_ff']
    return count_flops(
        n_matmul_params=model['n_layers'] * layer + spec['vocab_size'] * M, n_layers=model['n_layers'],
        n_heads=model['n_heads'], d_head=M // model['n_heads'], sequence_length=spec['length'],
    )  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    done, device = result['parts'], result['device']
    known = lookup(device['kind'])
    peak = known.bf16 if known else None
    lines = [
        f'# {device["kind"]}, {result["date"]}', '', f'`{result["command"]}`', '',
        ', '.join(f'{name} {version}' for name, version in result['versions'].items()) + '.', '',
    ]  # fmt: skip
    if result['tiny']:
        lines += ['**Toy shapes: these numbers only show that the benchmark runs.**', '']
    if result['busy'] > QUIET:
        lines += [f"**Other programs used {result['busy']:.0%} of the host's cores.**", '']
    ceiling = done.get('ceilings', {}).get('result', {})
    if ceiling:
        lines += [f'Ceilings: product {ceiling["matmul"] / 1e12:,.4g} TFLOP/s in bf16, copy '
        f'{ceiling["copy"] / 1e12:,.3g} TB/s.', '']  # fmt: skip
    lines += [
        'The limit is the rate of the product divided by the FLOPs per token (causal attention): no step can be '
        'faster. '
        f'MFU (formula {FORMULA_VERSION}) is relative to the published peak, with causal and with full attention.', '',
        '| model | | batch | tokens/s | ms per step | pretrax is faster by | of the limit | MFU causal, full | target '
        '(H200) |',
        '|---|---|---|---|---|---|---|---|---|',
    ]  # fmt: skip
    for name in MODELS:
        ours = speed(done, f'{name}, pretrax')
        for peer in ('pretrax', *TORCH):
            part = done.get(f'{name}, {peer}')
            if part is None:
                continue
            spec, found = part['spec'], part['result']
            batch = f'{spec["rows"]} x {spec["length"]}'
            if 'failed' in found:
                lines.append(f'| {name} | {peer} | {batch} | {_rate(found)} |' + ' |' * 5)
                continue
            each, rate = flops(spec), found['tokens_per_second']
            limit = f'{rate * each.causal / ceiling["matmul"]:.0%}' if ceiling else ''
            mfu = f'{rate * each.causal / peak:.1%}, {rate * each.full / peak:.1%}' if peak else 'unknown peak'
            ratio = f'{ours / rate:.2f}x' if ours and peer != 'pretrax' else ''
            target = f'{TARGETS[name]:,.0f}' if peer == 'pretrax' else ''
            batch += f' in {found["passes"]} passes' if found.get('passes', 1) > 1 else ''
            lines.append(
                f'| {name} | {peer} | {batch} | {rate:,.0f} | {1e3 * found["step_seconds"]:.4g} '
                f'(± {found["spread"] / 2:.1%}) | {ratio} | {limit} | {mfu} | {target} |'
            )
    lines += [
        '',
        '| change | model | tokens/s | relative to default | expected | temporaries |',
        '|---|---|---|---|---|---|',
    ]
    for lever, (name, _, expected) in LEVERS.items():
        part = done.get(f'lever: {lever}')
        if part is None:
            continue
        found, default = part['result'], speed(done, f'{name}, pretrax')
        if 'failed' in found:
            lines.append(f'| {lever} | {name} | {_rate(found)} | | {expected} | |')
            continue
        ratio = f'{found["tokens_per_second"] / default:.3f}x' if default else ''
        lines.append(
            f'| {lever} | {name} | {found["tokens_per_second"]:,.0f} | {ratio} | {expected} '
            f'| {found["temporary_bytes"] / 1e9:.3g} GB |'
        )
    decoded = {name: part['result'] for name, part in done.items() if name.startswith('decode')}
    if decoded:
        lines += ['', '| generated | tokens/s |', '|---|---|']
        lines += [f'| {name.removeprefix("decode ")} | {_rate(found)} |' for name, found in decoded.items()]
    rates = {name: part['result']['rates'] for name, part in done.items() if 'rates' in part['result']}
    if rates:
        lines += ['', '| kernel alone | TFLOP/s |', '|---|---|']
        lines += [f'| {name.removeprefix("kernels ")}: {one} | {r / 1e12:,.4g} |' for name,
        each in rates.items() for one, r in each.items()]  # fmt: skip
    chose = next((part['result']['chose'] for part in done.values() if 'chose' in part['result']), {})
    lines += ['', 'Chosen by pretrax:', '', *(f'- {key}: {value}' for key, value in chose.items())] * bool(chose)
    agreed = {name: part['result']['largest_difference'] for name, part in done.items() if name.startswith('check')}
    for name, differences in agreed.items():
        largest = ', '.join(f'{peer} {difference:.1e}' for peer, difference in differences.items())
        lines += ['', f'{name}: losses of the first steps from the same weights differ by at most (nats): {largest}.']
    for name, part in done.items():
        if part['result'].get('failed', 'out of memory') != 'out of memory':
            lines += ['', f'{name} failed:', '', '```text', part['result']['failed'], '```']
    return '\n'.join(lines) + '\n'


def speed(done: dict[str, Any], name: str) -> float | None:
    return done.get(name, {}).get('result', {}).get('tokens_per_second')


def _rate(found: dict[str, Any]) -> str:
    if 'failed' in found:
        return found['failed'].splitlines()[0] + (', see below' if '\n' in found['failed'] else '')
    return f'{found["tokens_per_second"]:,.0f}'


def make_wheels(directory: Path) -> None:
    """Downloads the wheels that a machine with JAX lacks, in the versions installed here,
    for x86-64 and Python 3.12.
    """
    names = [f'{name}=={importlib.metadata.version(name)}' for name in WHEELS]
    platforms = [f'--platform=manylinux_2_{n}_x86_64' for n in (17, 27, 28)] + ['--platform=manylinux2014_x86_64']
    subprocess.run(
        [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:',
        '--python-version=3.12',
         '--implementation=cp', *platforms, '-d', str(directory), *names], check=True,
    )  # fmt: skip
    print(f'{len(list(directory.glob("*.whl")))} wheels in {directory}')


def unpacked(wheels: Path | None, into: Path) -> str:
    """PYTHONPATH with pretrax and the unpacked wheels."""
    found = sorted(wheels.glob('*.whl')) if wheels else []
    if wheels and not found:
        raise BenchmarkError(f'--wheels {wheels}: there are no .whl files\ndownload them with --make-wheels {wheels}')
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    path = [str(HERE.parent / 'src'), str(into), *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
    return os.pathsep.join(filter(None, path))


def find_torch(given: str | None) -> str | None:
    """A Python with PyTorch: the given one, this one, or the one of cpu.py; None if there is none."""
    candidates = [given] if given else [sys.executable, str(HERE.parent / '.cache' / 'torch-env' / 'bin' / 'python')]
    for python in candidates:
        if has_torch(python):
            return python
    if given:
        raise BenchmarkError(f'--torch-python {given} cannot import torch and numpy')
    return None


def read_earlier(paths: list[Path], result: dict[str, Any]) -> None:
    """Adds the parts that earlier calls have measured, on the same device with the same versions."""
    for path in paths:
        try:
            earlier = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BenchmarkError(f'{path} is not a result of this benchmark: {error}') from error
        for key in ('device', 'versions', 'tiny'):
            if earlier.get(key) != result[key]:
                raise BenchmarkError(
                    f'{path} has {key} {earlier.get(key)}, but here it is {result[key]}\nuse another --out, or --again'
                )
        result['parts'] |= earlier['parts']


def main(arguments: list[str] | None = None, launch: Launch | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('wanted', nargs='*', help='parts whose names contain one of these (default: all)')
    parser.add_argument('--list', action='store_true', help='print the parts')
    parser.add_argument('--tiny', action='store_true', help='toy shapes')
    parser.add_argument('--seconds', type=float, help='duration of a timed part (default 12; tiny 0.2)')
    parser.add_argument(
        '--limit-seconds', type=float, default=float('inf'), help='start no part that may exceed this limit'
    )
    parser.add_argument('--again', action='store_true', help='measure finished parts again')
    parser.add_argument('--from', dest='earlier', type=Path, nargs='*', default=[], help='results of earlier calls')
    parser.add_argument('--no-torch', action='store_true', help='skip PyTorch')
    parser.add_argument('--torch-python', help='a Python with PyTorch')
    parser.add_argument('--wheels', type=Path, help='directory with the wheels that this machine lacks')
    parser.add_argument(
        '--make-wheels', type=Path, metavar='DIR', help='download these wheels to a directory, and exit'
    )
    parser.add_argument('--out', type=Path, default=HERE / 'results', help='directory of the JSON and the table')
    given = parser.parse_args(arguments)
    if given.make_wheels:
        make_wheels(given.make_wheels)
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as site:
        torch = None if given.no_torch else find_torch(given.torch_python)
        if torch is None:
            print('PyTorch is not installed: skipping its parts')
        python = {'pretrax': sys.executable, 'torch': torch or ''}
        launch = launch or Processes(python, unpacked(given.wheels, Path(site)))
        device = launch('pretrax', {'kind': 'device'}, 300)
        versions = device.pop('versions') | (launch('torch', {'kind': 'device'}, 300)['versions'] if torch else {})
        every = parts(device, given.tiny, torch is not None, given.seconds or (0.2 if given.tiny else 12))
        chosen = [part for part in every if not given.wanted or any(one in part.name for one in given.wanted)]
        if given.list or not chosen:
            print(*(part.name for part in every), sep='\n')
            return 0 if given.list else 2
        result = {
            'date': datetime.date.today().isoformat(), 'command': shlex.join(['python', 'benchmarks/accelerator.py',
            *(arguments or sys.argv[1:])]),
            'device': device, 'versions': versions, 'tiny': given.tiny, 'busy': busy(), 'parts': {},
        }  # fmt: skip
        name = re.sub(r'\W+', '-', device['kind'].lower()).strip('-')
        path = given.out / f'accelerator-{"tiny-" * given.tiny}{name}.json'
        read_earlier([*given.earlier, *([path] if path.exists() and not given.again else [])], result)
        given.out.mkdir(parents=True, exist_ok=True)
        left = [part for part in chosen if part.name not in result['parts'] or given.again]
        print(f'{device["kind"]}: {len(left)} of {len(chosen)} parts left')
        for number, part in enumerate(left):
            remaining = given.limit_seconds - (time.monotonic() - began)
            if remaining < (part.seconds if not given.tiny else 1):
                print(f'time limit: {len(left) - number} parts left; the same command resumes with {part.name}')
                return MORE_TO_DO
            start = time.monotonic()
            try:
                found = run_part(part, launch, min(remaining, 4 * part.seconds))
            except subprocess.TimeoutExpired:
                if remaining < 4 * part.seconds:
                    print(f'time limit during {part.name}: {len(left) - number} parts left; the same command resumes')
                    return MORE_TO_DO
                found = {'failed': f'not done after {time.monotonic() - start:.0f} s'}
            except BenchmarkError as error:
                if part.side == 'check':  # speeds of different models are not comparable
                    raise
                found = {'failed': str(error)}
            result['parts'][part.name] = {'spec': part.spec, 'result': found, 'seconds': time.monotonic() - start}
            path.write_text(json.dumps(result, indent=1) + '\n')
            path.with_suffix('.md').write_text(table(result))
            outcome = _rate(found) if 'failed' in found else 'done'
            outcome = f'{_rate(found)} tokens/s' if 'tokens_per_second' in found else outcome
            print(f'  {part.name}: {outcome} ({time.monotonic() - start:.0f} s)', flush=True)
    print(f'\n{table(result)}\nwritten to {path} and .md')
    return 0


if __name__ == '__main__':
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(str(error))
