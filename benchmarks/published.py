"""Compares the predictions of `pretrax plan` with published speeds of pretraining.

    python benchmarks/published.py [part of a source or id] [--held-out] [--picture docs/images/published.svg]

`published.yaml` has the rows. Each is planned with its model, batch, layout, recomputation and hardware; nothing is
compiled. Prints the predicted step time beside the published one, with the error by chip, and writes
results/published.json. A third of the rows is held out by `is_held_out`: it is only planned with `--held-out`, so that
no constant of the formula is ever set by looking at it.
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
from collections.abc import Iterable, Sequence
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import yaml

from pretrax.config import from_values
from pretrax.cost.devices import GIGA, gpus
from pretrax.cost.flops import flops_per_token
from pretrax.cost.topology import Topology, parse_topology
from pretrax.errors import UserError
from pretrax.plan.plan import Candidate, Planner
from pretrax.system.software import versions
from pretrax.view.charts.chart import COLORS
from pretrax.view.charts.picture import figure_bytes

HERE = pathlib.Path(__file__).parent
TABLE = HERE / 'published.yaml'
RESULTS = HERE / 'results' / 'published.json'

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
    found = Hardware(**vars(parse_topology(topology, nodes)))
    if row.network is not None:
        object.__setattr__(found, 'network', row.network)
    return found


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
        'attention': heads | kv_heads, 'feed_forward': {'d_ff': sizes['hidden']}, **pipeline,
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
    fits = [one for one in every if one.memory.total <= where.memory] or every[-1:]
    return planner, min(fits, key=lambda one: one.prediction.seconds)


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
    asked = parser.parse_args(arguments)
    chosen = [
        row for row in read_rows() if row.is_held_out == asked.held_out and asked.part in f'{row.source}: {row.id}'
    ]
    results = [compare(row) for row in chosen]
    out = asked.out or RESULTS.with_stem('published-held-out' if asked.held_out else 'published')
    if not asked.part or asked.out:
        command = ' '.join(['python benchmarks/published.py', *(['--held-out'] if asked.held_out else [])])
        out.write_text(json.dumps({'command': command, 'versions': versions(), 'rows': results}, indent=1) + '\n')
    if asked.picture:
        asked.picture.write_bytes(picture(results))
    print('\n'.join([*table(results), '', *summary(results)]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
