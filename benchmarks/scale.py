"""Compiles the rows of MaxText's scaling tables: do they fit, and how long does the step wait for communication?

    uv sync --inexact --extra tpu
    python benchmarks/scale.py [part of a name] [--predict] [--again]

Each row runs `pretrax compile configs/scale/NAME.yaml` in a process of its own, and prints the command. It takes
minutes and up to a few GB of memory, but no device. Results are written to results/scale.json after each row, and
finished rows are skipped, so the table can be made in parts. `--predict` compiles nothing. Memory and communication are
compared with `pretrax plan`. The published MFU comes from MaxText's READMEs of its v5e and v5p configurations, which
count attention in full (MaxText counts causal attention since July 2025, and its tables are older); mesh, sequences and
recomputation come from its scripts of the same names.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from schedule import facts

from pretrax.config import from_values, load
from pretrax.cost.flops import flops_per_token
from pretrax.cost.links import places_of
from pretrax.cost.memory import size
from pretrax.cost.topology import parse_topology
from pretrax.hlo.costs import ASSUMED
from pretrax.hlo.schedule import read_schedule
from pretrax.plan.plan import Planner
from pretrax.plan.step import compile_ahead

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / 'results' / 'scale.json'
LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table. `sequences`: per chip; `t`: of the mesh; `published`: MFU in percent;
    `copies`: r within a slice.
    """

    decoder: str
    hardware: str
    slices: int
    sequences: int
    published: float
    t: int = 1
    save: str = 'none'
    copies: int = 1

    @property
    def name(self) -> str:
        return f'{self.decoder} {self.slices}x {self.hardware}'

    def arguments(self) -> list[str]:
        """Arguments of `pretrax compile` and `pretrax plan`."""
        chips = parse_topology(self.hardware).n_devices
        r, d = self.slices * self.copies, chips // self.t // self.copies
        mesh = [f'mesh.{axis}={n}' for axis, n in (('r', r), ('d', d), ('t', self.t)) if n > 1]
        tokens = self.slices * chips * self.sequences * LENGTH
        options = [f'model.save={self.save}'] * (self.save != 'none') + [
            'model.batch_parts=2'
        ] * self.hardware.startswith('v5p')
        return [*mesh, f'batch.tokens={tokens}', *options]

    def command(self) -> str:
        slices = f' --slices {self.slices}' if self.slices > 1 else ''
        file = f'configs/scale/{self.decoder}.yaml'
        return f'pretrax compile {file} --topology {self.hardware}{slices} {" ".join(self.arguments())}'


def _v5e(decoder: str, sequences: int, published: tuple[float, ...], t: int = 1) -> list[Row]:
    return [Row(decoder, 'v5e-256', 2**i, sequences, mfu, t) for i, mfu in enumerate(published)]


# MaxText's 128b on v5e keeps products in host memory; here its layers are recomputed. On v5p, 'minimal' keeps products:
# model.save=dots. The last row was published for a decoder of 1,160 billion parameters, whose sizes were not published.
ROWS = (
    *_v5e('16b', 6, (61.10, 59.37, 59.14, 58.27, 56.56, 54.65)),
    *_v5e('32b', 4, (66.86, 64.81, 64.10, 63.67, 62.26, 60.40)),
    *_v5e('64b', 2, (59.90, 56.66, 55.85, 54.96, 53.29, 50.18)),
    *_v5e('128b', 1, (56.06, 55.82, 54.93, 52.93, 50.86, 46.25), t=16),
    Row('32b', 'v5p-128', 1, 6, 71.47, 4, 'dots'),
    Row('32b', 'v5p-128', 2, 6, 69.43, 4, 'dots'),
    Row('64b', 'v5p-128', 1, 3, 70.31, 4, 'dots'),
    Row('64b', 'v5p-128', 2, 3, 67.26, 4, 'dots'),
    Row('128b', 'v5p-256', 1, 1, 68.68, 8, 'dots'),
    Row('128b', 'v5p-256', 2, 1, 66.34, 8, 'dots'),
    Row('128b', 'v5p-512', 1, 1, 68.83, 8, 'dots'),
    Row('128b', 'v5p-512', 2, 1, 59.66, 8, 'dots'),
    Row('256b', 'v5p-1024', 1, 1, 67.09, 8, 'dots'),
    Row('256b', 'v5p-1024', 2, 1, 62.99, 8, 'dots'),
    Row('512b', 'v5p-1024', 1, 2, 63.99, 8),
    Row('512b', 'v5p-1024', 2, 2, 61.45, 8),
    Row('1024b', 'v5p-2048', 1, 2, 55.35, 16),
    Row('1024b', 'v5p-2048', 2, 2, 51.55, 16),
    Row('1024b', 'v5p-4096', 1, 2, 64.80, 16),
    Row('1024b', 'v5p-4096', 2, 2, 60.83, 16),
    Row('1024b', 'v5p-12288', 1, 2, 66.23, 16, copies=3),  # 6,144 chips = 3 x 128 x 16: d must divide the width
)


@dataclasses.dataclass(frozen=True)
class GpuStep:
    """A published bf16 step, in tokens/s per GPU. Its settings are not fully known."""

    stack: str
    model: dict[str, Any]
    hardware: str
    length: int
    published: float


GPU_STEPS = (
    GpuStep('llm.c', {'preset': 'gpt2-124m'}, 'h100', 1024, 463_000),
    GpuStep('llm.c', {'preset': 'gpt2-1.5b'}, 'h100x8', 1024, 46_800),
    GpuStep('JAX-Toolbox MaxText', {'preset': 'llama2-7b'}, 'h100x8', 4096, 11_400),
    GpuStep('torchtitan, compiled', {'preset': 'llama3-8b'}, 'h100x8', 8192, 6_700),
    GpuStep('KempnerForge', {'preset': 'llama2-7b'}, 'h200', 4096, 10_500),
)
GPU_SEQUENCES = 16  # per GPU and step; the plan splits them into passes


def gpu_table() -> list[str]:
    """Each published step with the fastest combination that `plan` finds for the same model, length and hardware."""
    lines = [
        '| stack | model | hardware | tokens/s per GPU, published | plan, at best | published / plan | limited by |',
        '|' + '---|' * 7,
    ]
    for step in GPU_STEPS:
        hardware = parse_topology(step.hardware)
        tokens = GPU_SEQUENCES * hardware.n_devices * step.length
        vocabulary = {'gpt2': 50257, 'llama2': 32000, 'llama3': 128256}[step.model['preset'].split('-')[0]]
        config = from_values({
            'name': 'published', 'steps': 1, 'model': step.model, 'data': {'name': 'synthetic',
            'vocab_size': vocabulary},
            'batch': {'tokens': tokens, 'sequence_length': step.length}, 'optimizer': {'learning_rate': 1e-4},
        })  # fmt: skip
        planner = Planner(config, hardware, lambda text: None)
        best = 'nothing fits, with f32 weights, moments and gradients | | '
        if fits := planner.search().found:
            speed = tokens / fits[0].prediction.seconds / hardware.n_devices
            best = f'{speed:,.0f} | {step.published / speed:.0%} | {fits[0].prediction.bound}; `{fits[0].written()}`'
        lines.append(f'| {step.stack} | {step.model["preset"]} | {step.hardware} | {step.published:,.0f} | {best} |')
    return lines


def compiled(row: Row, programs: pathlib.Path | None) -> dict[str, Any]:
    """The compiler's result for a row, and the cost of compiling. Call it in a process that does nothing else."""
    config = load(HERE.parent / f'configs/scale/{row.decoder}.yaml', row.arguments())
    topology = parse_topology(row.hardware, row.slices)
    planned = compile_ahead(config, topology, lambda text: None)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result: dict[str, Any] = {
        'bytes': planned.needed, 'fits': planned.fits, 'cpu_seconds': round(usage.ru_utime + usage.ru_stime),
        'peak_memory_bytes': usage.ru_maxrss * 1024, 'compiler_options': planned.run.compiler_options.values,
    }  # fmt: skip
    if planned.compiled is None:
        return result
    text, mesh = planned.compiled.as_text(), planned.run.mesh
    if programs is not None:
        (programs / f'{row.name.replace(" ", "_")}.txt').write_text(text)
    schedule = read_schedule(text, dict(mesh.shape), topology, places_of(mesh.devices.flat))
    return result | {'schedule': facts(schedule, dict(mesh.shape))}


def predicted(row: Row) -> dict[str, Any]:
    """The prediction of `pretrax plan` for a row.

    `_exposed`: with what schedules are assumed to reach, and no latency. `_full`: attention counts in full, as in the
    published tables. `seconds_at_peak_full`: those FLOPs over the peak of the chips.
    """
    config = load(HERE.parent / f'configs/scale/{row.decoder}.yaml', row.arguments())
    planner = Planner(config, parse_topology(row.hardware, row.slices), lambda text: None)
    found, flops = planner.as_configured(), flops_per_token(planner.arch, LENGTH)
    in_full = flops.full / flops.causal
    planner.hardware = dataclasses.replace(planner.hardware, reach=ASSUMED['tpu'])
    as_read = planner.as_configured().prediction
    return {
        'predicted_bytes': found.memory.total,
        'predicted_mfu': round(100 * found.prediction.mfu, 1),
        'predicted_mfu_full': round(100 * found.prediction.mfu * in_full, 1),
        'predicted_exposed': as_read.exposed / as_read.seconds,
        'bound': found.prediction.bound,
        'seconds_at_peak_full': found.prediction.mfu * in_full * found.prediction.seconds,
    }


def exposed_share(schedule: dict[str, Any]) -> float:
    """Share of a compiled step in which it waits for communication."""
    return schedule['exposed'] / (schedule['compute'] + schedule['exposed'])


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Every row, as compiled and as predicted; `at most` is the MFU if the step takes as long as its schedule."""
    lines = [
        '| decoder | hardware | memory per chip, compiled | predicted | exposed, compiled | predicted '
        '| MFU with attention in full: published | predicted | at most, by the schedule | causal: predicted |',
        '|' + '---|' * 10,
    ]
    errors, shares = [], {}
    for row in ROWS:
        plan, found = predicted(row), results.get(row.name, {})
        limit = parse_topology(row.hardware).memory
        taken, off, waits, at_most = 'not compiled', '', '', ''
        if found:
            taken = f'{size(found["bytes"])} of {size(limit)}' + ('' if found['fits'] else ': does not fit')
            off = f' ({plan["predicted_bytes"] / found["bytes"] - 1:+.0%})'
        if schedule := found.get('schedule'):
            shares[row] = exposed_share(schedule), plan['predicted_exposed']
            waits = f'{shares[row][0]:.1%}'
            at_most = f'{plan["seconds_at_peak_full"] / (schedule["compute"] + schedule["exposed"]):.1%}'
        lines.append(
            f'| {row.decoder} | {row.slices} x {row.hardware} | {taken} | {size(plan["predicted_bytes"])}{off} '
            f'| {waits} | {plan["predicted_exposed"]:.1%} | {row.published:.1f}% '
            f'| {plan["predicted_mfu_full"]:.1f}% ({plan["predicted_mfu_full"] - row.published:+.1f}) | {at_most} '
            f'| {plan["predicted_mfu"]:.1f}% |'
        )
        errors.append((row.hardware, abs(plan['predicted_mfu_full'] - row.published)))
    v5p = [compiled for row, (compiled, _) in shares.items() if row.hardware.startswith('v5p')]
    differences = [100 * abs(compiled - plan) for compiled, plan in shares.values()]
    return [
        *lines, '', *_mean_errors(errors),
        f'of the exposed share: {sum(differences) / max(1, len(differences)):.1f} points, at most '
        f'{max(differences, default=0):.1f}, in {len(differences)} compiled rows',
        f'v5p: {sum(share < 0.1 for share in v5p)} of {len(v5p)} compiled rows are exposed for less than 10 % of the '
        'step',
    ]  # fmt: skip


def _mean_errors(errors: list[tuple[str, float]]) -> list[str]:
    kinds = {name: [off for hardware, off in errors if hardware.startswith(name)] for name in ('v5', 'v5e', 'v5p')}
    return [
        f'mean absolute error of the predicted MFU, attention in full, {name}: {sum(off) / len(off):.1f} points in '
        f'{len(off)} rows'
        for name, off in kinds.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile and predict MaxText's scaling tables")
    parser.add_argument(
        'part', nargs='?', default='', help='compile only rows whose names contain this, such as 16b or v5p-128'
    )
    parser.add_argument('--predict', action='store_true', help='compile nothing')
    parser.add_argument('--again', action='store_true', help='compile finished rows again')
    parser.add_argument('--programs', type=pathlib.Path, help='also write the optimized programs to this directory')
    parser.add_argument('--one', help=argparse.SUPPRESS)  # for the process of one row
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(compiled(next(row for row in ROWS if row.name == asked.one), asked.programs)))
        return 0
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    programs = ['--programs', str(asked.programs)] if asked.programs else []
    for row in ROWS:
        if asked.predict or asked.part not in row.name or (row.name in results and not asked.again):
            continue
        print(row.command(), flush=True)
        done = subprocess.run(
            [sys.executable, __file__, '--one', row.name, *programs], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            print(f'    failed with exit code {done.returncode}', flush=True)
            continue
        results[row.name] = json.loads(done.stdout.splitlines()[-1]) | {'command': row.command()}
        print(f'    {results[row.name]}', flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + '\n')
    print('\n'.join([*table(results), '', *gpu_table()]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
