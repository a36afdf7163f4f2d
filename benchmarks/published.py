"""Compares the predictions of `pretrax plan` with published speeds of pretraining.

    python benchmarks/published.py [part of a source or id] [--held-out] [--picture docs/images/published.svg] [--fit]

`published.yaml` has the rows. Each is planned with its model, batch, layout, recomputation and hardware; nothing is
compiled. Prints the predicted step time beside the published one, with the error by chip, and writes
results/published.json. A third of the rows is held out by `is_held_out`: it is only planned with `--held-out`, so that
no constant of the formula is ever set by looking at it.

`--fit` fits the constants of `reach:` in src/pretrax/cost/devices.yaml to the other rows and to steps that pretrax
itself ran (results/accelerator-nvidia-h200.json), and prints them. Without it, the quantiles of the errors are also
written to src/pretrax/cost/interval.yaml, from which `pretrax plan` makes its interval.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import numpy as np
import yaml

from pretrax.config import from_values
from pretrax.cost.devices import GIGA, Reach, gpus
from pretrax.cost.flops import flops_per_token
from pretrax.cost.interval import ALL
from pretrax.cost.topology import Topology, parse_topology
from pretrax.errors import UserError
from pretrax.plan.plan import Candidate, Planner
from pretrax.system.software import versions
from pretrax.view.charts.chart import COLORS
from pretrax.view.charts.picture import figure_bytes

HERE = pathlib.Path(__file__).parent
TABLE = HERE / 'published.yaml'
RESULTS = HERE / 'results' / 'published.json'
SOURCE = HERE.parent / 'src' / 'pretrax' / 'cost'
MEASURED = HERE / 'results' / 'accelerator-nvidia-h200.json'

KINDS = ('dense, bf16', 'dense, 8 bits', 'mixtures of experts')

# What `model.save` is for the recomputation of a row. 'selective' keeps every second product and attention.
SAVES: dict[str, Any] = {
    'full': 'none',
    'none': 'all',
    'minimal': 'dots',
    'minimal flash': 'full',
    'minimal offloaded': dict.fromkeys(('q', 'k', 'v', 'attention_out', 'up', 'gate', 'mlp_out'), 'offload'),
    'selective': dict.fromkeys(('q', 'v', 'attention', 'up'), 'keep'),
}
# MaxText's names of activations, and those of `model.save`
ACTIVATIONS = {
    'decoder_layer_input': 'input', 'query_proj': 'q', 'key_proj': 'k', 'value_proj': 'v', 'context': 'attention',
    'out_proj': 'attention_out', 'mlpwo': 'mlp_out',
}  # fmt: skip
# Tried where a source does not state the recomputation
UNSTATED: tuple[Any, ...] = ('all', 'dots', 'attention', {'attention': 'keep'}, 'none')
# Programs of MaxText: `DenseGeneral` casts a weight to bf16 before its product, so its gradient is summed in bf16.
SUMS_IN_BF16 = ('maxtext', 'tpu-recipes')
MATMULS = {'bf16': 'compute', 'fp8': 'fp8', 'mxfp8': 'fp8', 'int8': 'int8'}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of published.yaml, whose head describes the fields. `sizes`: of the model."""

    source: str
    id: str
    chip: str
    model: str
    sizes: dict[str, Any]
    chips: int
    topology: str | None = None
    nodes: int = 1
    network: float | None = None
    batch: int | None = None
    length: int | None = None
    micro: int | None = None
    precision: str = 'bf16'
    fsdp: int = 1
    dp: int | None = None
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: Any = None
    capacity: float | None = None
    step: float | None = None
    tokens: float | None = None
    samples: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    counts: str | None = None
    note: str | None = None
    incomplete: str | None = None

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.source, self.id)

    @property
    def devices(self) -> int:
        """JAX devices: two per chip of tpu7x."""
        return self.chips * (2 if self.chip == 'TPU v7 (half a chip)' else 1)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh axes of the parallelism. Copies of the weights are along r.

        Raises:
            UserError: the sizes do not divide the devices.
        """
        sizes = {'d': self.fsdp, 'e': self.ep, 'c': self.cp, 't': self.tp, 'p': self.pp}
        copies, rest = divmod(self.devices, math.prod(sizes.values()))
        if rest:
            raise UserError('experts are spread over the devices of another axis, which pretrax cannot do')
        return {'r': copies, **sizes}


def is_held_out(source: str, name: str) -> bool:
    """Whether a row is held out: a third of all rows, by a hash of its source and id."""
    return int(hashlib.sha256(f'{source}|{name}'.encode()).hexdigest(), 16) % 3 == 0


def read_rows(path: pathlib.Path = TABLE) -> list[Row]:
    """All rows, with the fields that the rows of a source share."""
    table = yaml.safe_load(path.read_text(encoding='utf-8'))
    return [
        Row(source=name, **source['common'] | row, sizes=table['models'][(source['common'] | row)['model']])
        for name, source in table['sources'].items()
        for row in source['rows']
    ]


@dataclasses.dataclass(frozen=True)
class Hardware(Topology):
    """Hardware of a row, whose nodes may have another network than those of the table."""

    network: float | None = None  # Gb/s of a node

    @property
    def target(self) -> Any:
        row = super().target
        if self.network is None:
            return row
        between = self.network / 8 * GIGA / self.chips
        return dataclasses.replace(row, link=dataclasses.replace(row.link, between=between))


def hardware(row: Row) -> Hardware:
    """The hardware of a row.

    Raises:
        UserError: the plan does not know it.
    """
    topology, nodes = row.topology, row.nodes
    if topology is None:
        version = row.chip.lower()
        if version not in gpus():
            raise UserError(f'the plan does not know {row.chip}')
        each = math.gcd(row.chips, 64 if gpus()[version].domain > 8 else 8)  # Megatron-Bridge uses 64 of a rack's 72
        topology, nodes = f'{version}x{each}', row.chips // each
    return Hardware(**vars(parse_topology(topology, nodes)), network=row.network)


def saved(recompute: Any) -> Any:
    """`model.save` for the recomputation of a row. MaxText recomputes what is not named."""
    if isinstance(recompute, str):
        return SAVES[recompute]
    return {ACTIVATIONS[name]: choice for choice, names in recompute.items() for name in names}


def model_options(row: Row) -> dict[str, Any]:
    """The section `model:` of a row without `save`."""
    sizes = row.sizes
    capacity = {'experts': {'capacity': row.capacity}} if row.capacity else {}
    pipeline = {'pipeline': {'rounds': row.vp}} if row.vp > 1 else {}
    if 'preset' in sizes:
        return {'preset': sizes['preset'], **pipeline, **capacity}
    heads = {'n_heads': sizes['heads'], 'd_head': sizes.get('d_head', sizes['width'] // sizes['heads'])}
    kv_heads = {'n_kv_heads': sizes['kv_heads']} if sizes['kv_heads'] != sizes['heads'] else {}
    return {
        'family': sizes['family'], 'n_layers': sizes['layers'], 'd_model': sizes['width'],
        'attention': heads | kv_heads, 'feed_forward': {'d_ff': sizes['hidden']},
        'embedding': {'tied': sizes.get('tied', False)}, **pipeline,
    }  # fmt: skip


def values(row: Row, save: Any) -> dict[str, Any]:
    """The configuration of a row."""
    assert row.batch is not None
    assert row.length is not None
    return {
        'name': 'published', 'steps': 1, 'model': {**model_options(row), 'save': save},
        'data': {'name': 'synthetic', 'vocab_size': row.sizes['vocabulary']},
        'batch': {'tokens': row.batch * row.length, 'sequence_length': row.length, 'micro': micro(row)},
        'optimizer': {'name': 'adamw', 'learning_rate': 1e-4}, 'mesh': row.mesh,
        'precision': {
            'matmul': MATMULS[row.precision],
            'reduction': 'bf16_r_d' if row.source.startswith(SUMS_IN_BF16) else 'f32',
        },
    }  # fmt: skip


def micro(row: Row) -> int | None:
    """Sequences per device and pass: the published number, or the largest divisor below it, since the batch of an
    accelerator may be cut into unequal passes. None: not stated, and there is one pass.
    """
    assert row.batch is not None
    mesh = row.mesh
    each = row.batch // (mesh['r'] * mesh['d'] * mesh['e'])
    if row.micro is None:
        return 1 if row.pp > 1 else None
    return next(n for n in range(min(row.micro, each), 0, -1) if each % n == 0)


def planned(row: Row) -> tuple[Planner, Candidate]:
    """The plan of a row with its layout. Where the recomputation is not stated, the fastest one that fits.

    Raises: as `candidates`.
    """
    planner, every = candidates(row)
    return planner, min(every, key=lambda one: one.prediction.seconds)


def candidates(row: Row) -> tuple[Planner, list[Candidate]]:
    """The candidates with the layout of a row that fit, or the last one if none fits.

    Raises:
        UserError: it cannot be planned; the first line says why.
    """
    if row.incomplete:
        raise UserError(row.incomplete)
    if row.precision not in MATMULS:
        raise UserError(f'pretrax has no {row.precision}')
    where = hardware(row)
    choices = UNSTATED if row.recompute is None else (saved(row.recompute),)
    planner = Planner(from_values(values(row, choices[0])), where, lambda text: None)
    stated = planner.as_configured()
    every = [stated, *(planner.candidate(planner.choice(stated.mesh, stated.micro, save)) for save in choices[1:])]
    return planner, [one for one in every if one.memory.total <= where.memory] or every[-1:]


def published_seconds(row: Row, planner: Planner) -> float:
    """Seconds of the published step, from whichever speed the source has."""
    assert row.batch is not None
    assert row.length is not None
    tokens = row.batch * row.length
    if row.step or row.samples:
        return row.step or row.batch / row.samples  # type: ignore[operator]
    if row.tokens:
        return tokens / row.tokens / row.chips
    peak = planner.hardware.device.bf16 * row.devices
    reached = row.mfu / 100 * peak if row.mfu else (row.tflops or 0) * 1e12 * row.chips
    return tokens * counted_flops(row, planner) / reached


def counted_flops(row: Row, planner: Planner) -> float:
    """FLOPs per token as the source counts them (`counts` of the row)."""
    assert row.counts is not None
    assert row.length is not None
    params, attention = row.counts.split()
    arch, by_us = planner.arch, flops_per_token(planner.arch, row.length)
    weights = {
        'all': planner.n_stored_params - arch.n_padding_params,
        'matmul': arch.n_matmul_params,
        'layers': arch.n_matmul_params - arch.vocab_size * arch.d_model,
    }[params]
    full = by_us.full - 6 * arch.n_matmul_params
    return 6 * weights + {'full': full, 'causal': by_us.causal - 6 * arch.n_matmul_params, 'none': 0}[attention]


def compare(row: Row) -> dict[str, Any]:
    """The published and the predicted step of a row, or why there is no prediction."""
    facts = {'source': row.source, 'id': row.id, 'chip': row.chip, 'precision': row.precision}
    try:
        planner, found = planned(row)
    except UserError as error:
        return facts | {'why_not': str(error).splitlines()[0]}
    published, predicted = published_seconds(row, planner), found.prediction.seconds
    return facts | {
        'experts': 'experts' in row.sizes,
        'published': published,
        'predicted': predicted,
        'error': predicted / published - 1,
        'save': found.save,
        'bound': found.prediction.bound,
        'memory': found.memory.total,
        'fits': found.memory.total <= planner.hardware.memory,
    }


# `Reach` before the fit, by generation, and the spread of the logarithm: how far the fit may move it. First stands what
# GPUs and TPUs share. Products and copies of GPUs are those of benchmarks/results/accelerator-nvidia-h200.md.
_GPU = {'products': (0.75, 0.1), 'attention': (0.5, 0.12), 'far_hop': (1e-4, 1.0)}
_TPU = {'products': (0.9, 0.15), 'attention': (0.45, 0.25)}
START: dict[str, dict[str, tuple[float, float]]] = {
    'gpu': {
        'memory': (0.68, 0.15), 'links': (0.8, 0.1), 'network': (0.85, 0.15), 'hop': (2e-6, 1.0), 'launch': (5e-5, 1.0),
        'beside': (0.15, 0.5),
    },
    'tpu': {
        'memory': (0.8, 0.2), 'network': (0.9, 0.15), 'hop': (1e-6, 0.5), 'far_hop': (3e-4, 1.5), 'launch': (2e-5, 1.0),
        'beside': (0.05, 1.0),
    },
    'ampere': _GPU, 'hopper': _GPU, 'blackwell': _GPU, 'v5e': _TPU, 'v5p': _TPU, 'v6e': _TPU, 'tpu7x': _TPU,
}  # fmt: skip
ENOUGH = 8  # rows of a kind on a chip for an interval of their own
SPREAD, LARGE = 0.1, 0.15  # of log(predicted / published); larger errors count linearly
OURS = 5  # weight of a measured step; all rows of a source together have weight 1


@dataclasses.dataclass
class Step:
    """A published or measured step that constants are fitted to, and how it is planned."""

    planner: Planner
    every: list[Candidate]
    published: float
    weight: float


def measured() -> list[Row]:
    """The steps that pretrax ran on an H200."""
    rows, parts = [], json.loads(MEASURED.read_text())['parts']
    for name in ('124M', '1.3B'):
        spec, seconds = (parts[f'{name}, pretrax'][key] for key in ('spec', 'result'))
        of = spec['model']
        sizes = {
            'family': of['family'], 'layers': of['n_layers'], 'width': of['d_model'], 'heads': of['n_heads'],
            'kv_heads': of['n_heads'], 'hidden': of.get('d_ff', 4 * of['d_model']), 'vocabulary': 50304, 'tied': True,
        }  # fmt: skip
        rows.append(
            Row(
                'pretrax', name, 'H200 SXM', name, sizes, 1, 'h200', batch=spec['rows'], length=spec['length'],
                recompute='none', step=seconds['step_seconds'],
            )
        )  # fmt: skip
    return rows


def steps_to_fit() -> list[Step]:
    """Dense steps that are not held out, and the measured ones. The rows of a source weigh as much as one row."""
    found = []
    for row in [row for row in read_rows() if not row.is_held_out and 'experts' not in row.sizes] + measured():
        try:
            planner, every = candidates(row)
        except UserError:
            continue
        found.append((row.source, planner, every, published_seconds(row, planner)))
    rows_of = Counter(source for source, *_ in found)
    weights = {source: 1 / n for source, n in rows_of.items()} | {'pretrax': OURS}
    return [Step(planner, every, seconds, weights[source]) for source, planner, every, seconds in found]


def fit(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Constants with the smallest errors of log(predicted / published): Gauss-Newton steps with Huber's weights."""
    keys = [(group, name) for group, names in START.items() for name in names]
    start, spread = np.array([START[group][name] for group, name in keys]).T
    start, most = np.log(start), np.log([0.95 if name in ('products', 'memory') else 1.0 for _, name in keys])
    devices = yaml.safe_load((SOURCE / 'devices.yaml').read_text())['devices']
    generations = [devices[step.planner.hardware.device.name]['reach'] for step in steps]  # keys of `reach:`
    weights = np.array([step.weight for step in steps]) / SPREAD**2

    def constants(at: np.ndarray) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {group: {} for group in START}
        for (group, name), value in zip(keys, np.exp(at), strict=True):
            found[group][name] = float(value)
        return found

    def errors(at: np.ndarray, group: str = '') -> np.ndarray:
        """log(predicted / published) of the steps of a group, and 0 for other steps; '': of all steps."""
        found, result = constants(at), np.zeros(len(steps))
        for i, (step, generation) in enumerate(zip(steps, generations, strict=True)):
            shared = 'tpu' if step.planner.hardware.platform == 'tpu' else 'gpu'
            if group in ('', shared, generation):
                reach = Reach(**found[shared] | found[generation])
                result[i] = math.log(seconds_with(step, reach) / step.published)
        return result

    def loss(at: np.ndarray, off: np.ndarray) -> float:
        size = np.abs(off)
        each = np.where(size < LARGE, size**2 / 2, LARGE * (size - LARGE / 2))
        return float(np.sum(weights * each) + np.sum(((at - start) / spread) ** 2) / 2)

    at, by = start, 0.03
    off = errors(at)
    for _ in range(10):
        slopes = np.zeros((len(steps), len(keys)))
        for k, (group, _) in enumerate(keys):
            moved = errors(at + by * (np.arange(len(keys)) == k), group)
            slopes[:, k] = np.where(moved == 0, 0, (moved - off) / by)
        robust = weights * np.minimum(1, LARGE / np.maximum(np.abs(off), 1e-9))
        matrix = slopes.T @ (robust[:, None] * slopes) + np.diag(spread**-2)
        change = np.linalg.solve(matrix, -slopes.T @ (robust * off) - (at - start) / spread**2)
        tried = [np.minimum(at + share * change, most) for share in (1, 0.5, 0.25, 0.1)]
        better = next((one for one in tried if loss(one, errors(one)) < loss(at, off) - 0.01), None)
        if better is None:
            break
        at, off = better, errors(better)
    return constants(at)


def seconds_with(step: Step, reach: Reach) -> float:
    """The predicted seconds of a step with other constants."""
    planner = step.planner
    planner.hardware = dataclasses.replace(planner.hardware, reach=reach)
    return min(planner.candidate(one).prediction.seconds for one in step.every)


def kind_of(result: dict[str, Any]) -> str:
    """One of KINDS."""
    return KINDS[2] if result['experts'] else KINDS[result['precision'] != 'bf16']


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """Errors by chip, by kind, and in all. A negative error: the plan is faster than the published step."""
    compared = [one for one in results if 'error' in one]
    groups = {chip: [one for one in compared if one['chip'] == chip] for chip in {one['chip'] for one in compared}}
    kinds = {kind: [one for one in compared if kind_of(one) == kind] for kind in KINDS} | {'all': compared}
    lines = ['| | rows | median error | mean error | median of absolute errors | worst |', '|' + '---|' * 6]
    for name, rows in [*sorted(groups.items()), *kinds.items()]:
        if rows:
            errors = [one['error'] for one in rows]
            sizes = [abs(error) for error in errors]
            lines.append(
                f'| {name} | {len(rows)} | {statistics.median(errors):+.0%} | {statistics.mean(errors):+.0%} '
                f'| {statistics.median(sizes):.0%} | {max(errors, key=abs):+.0%} |'
            )
    return lines


def intervals(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Quantiles of published over predicted seconds, by kind and by chip with at least `ENOUGH` rows of the kind."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in KINDS:
        rows = [one for one in results if 'error' in one and kind_of(one) == kind]
        of = Counter(one['chip'] for one in rows)
        for chip in (ALL, *sorted(chip for chip, n in of.items() if n >= ENOUGH)):
            ratios = [one['published'] / one['predicted'] for one in rows if chip in (ALL, one['chip'])]
            low, high = (round(float(x), 3) for x in np.quantile(ratios, (0.1, 0.9)))
            found.setdefault(kind, {})[chip] = {'runs': len(ratios), 'low': low, 'high': high}
    return found


def table(results: Iterable[dict[str, Any]]) -> list[str]:
    """Every row: published and predicted seconds of a step."""
    lines = ['| source | row | chip | published | predicted | error |', '|' + '---|' * 6]
    for one in results:
        if 'error' in one:
            cells = f'{one["published"]:.4g} s | {one["predicted"]:.4g} s | {one["error"]:+.0%}'
            cells += '' if one['fits'] else ' (planned out of memory)'
        else:
            cells = f'| | {one["why_not"]}'
        lines.append(f'| {one["source"]} | {one["id"]} | {one["chip"]} | {cells} |')
    return lines


def picture(results: Sequence[dict[str, Any]]) -> bytes:
    """An .svg with a point for each row: its published seconds, and the predicted ones, by chip."""
    compared = [one for one in results if 'error' in one]
    chips = sorted({one['chip'] for one in compared})

    def draw(figure: Any) -> None:
        columns = 4
        every = figure.subplots(-(-len(chips) // columns), columns, sharex=True, sharey=True, squeeze=False).flat
        both = [one[key] for one in compared for key in ('published', 'predicted')]
        ends = (min(both) / 1.5, max(both) * 1.5)
        for axes, chip in zip(every, chips, strict=False):
            axes.set_title(chip, fontsize=10)
            axes.set(xscale='log', yscale='log', xlim=ends, ylim=ends, aspect='equal')
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter('{x:g}')
            axes.plot(ends, ends, color='#888888', linewidth=0.8)
            for color, marker, kind in zip(COLORS, 'os^', KINDS, strict=False):
                rows = [one for one in compared if one['chip'] == chip and kind_of(one) == kind]
                x, y = ([one[key] for one in rows] for key in ('published', 'predicted'))
                axes.scatter(x, y, s=14, color=color, marker=marker, alpha=0.7, linewidths=0, label=kind)
        for axes in every[len(chips) :]:
            axes.set_visible(False)
        figure.supxlabel('published seconds of a step', fontsize=10)
        figure.supylabel('predicted', fontsize=10)
        figure.legend(
            *every[0].get_legend_handles_labels(), loc='outside upper center', ncols=len(KINDS), frameon=False
        )

    return figure_bytes(draw, '.svg', 5.4)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description='Compare the plan with published speeds')
    parser.add_argument('part', nargs='?', default='', help='only rows whose "source: id" contains this')
    parser.add_argument('--held-out', action='store_true', help='the held-out third, and only it')
    parser.add_argument('--out', type=pathlib.Path, help='where the results go; default: results/published.json')
    parser.add_argument(
        '--picture', type=pathlib.Path, help='an .svg file for predicted beside published steps, by chip'
    )
    parser.add_argument('--fit', action='store_true', help='fit the constants of devices.yaml, and print them')
    asked = parser.parse_args(arguments)
    if asked.fit:
        for group, names in fit(steps_to_fit()).items():
            print(f'  {group}: {{{", ".join(f"{name}: {value:.3g}" for name, value in names.items())}}}')
        return 0
    chosen = [
        row for row in read_rows() if row.is_held_out == asked.held_out and asked.part in f'{row.source}: {row.id}'
    ]
    results = [compare(row) for row in chosen]
    out = asked.out or RESULTS.with_stem('published-held-out' if asked.held_out else 'published')
    if not asked.part or asked.out:
        command = ' '.join(['python benchmarks/published.py', *(['--held-out'] if asked.held_out else [])])
        out.write_text(json.dumps({'command': command, 'versions': versions(), 'rows': results}, indent=1) + '\n')
    if not (asked.part or asked.out or asked.held_out):
        head = '# Written by benchmarks/published.py: see cost/interval.py.\n'
        (SOURCE / 'interval.yaml').write_text(head + yaml.safe_dump(intervals(results), default_flow_style=None))
    if asked.picture:
        asked.picture.write_bytes(picture(results))
    print('\n'.join([*table(results), '', *summary(results)]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
