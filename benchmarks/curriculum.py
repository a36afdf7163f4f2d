"""Compares the order in which a model sees two domains, at equal tokens of each: `data.mixture` with weights that
change.

    uv run python benchmarks/curriculum.py [--seeds 3] [--steps 200] [--out DIR]

The model is that of configs/curriculum.yaml. The target domain is documentation, a quarter of all tokens; the other is
code. Of the documentation, most comes in the last fifth of the steps, or in the first fifth, or it has a quarter of
each step. The loss is that of held-out text of each domain, in nats per byte. It writes results/curriculum-DATE.json
and .md, and the picture of docs/research.md beside them.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from result_files import circumstances, write_result

from pretrax import pretrain
from pretrax.config import load
from pretrax.observe.metrics import read_metrics
from pretrax.run.setup import prepare
from pretrax.system.software import versions
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.charts.picture import chart_picture

CONFIG = 'configs/curriculum.yaml'
ARMS = ('constant', 'docs last', 'docs first')
TARGET, OTHER = 'docs', 'code'
RESULTS = Path(__file__).parent / 'results'


def main() -> None:
    """Trains all arms, prints the table, and writes the result and the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--out', type=Path, default=RESULTS)
    chosen = parser.parse_args()
    start = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        curves = train_all(Path(scratch), chosen.seeds, chosen.steps)
    result = circumstances() | {'versions': versions(), 'steps': chosen.steps, 'curves': curves}
    result['processor_seconds'] = round(time.process_time() - start)
    write_result(result, table, chosen.out, 'curriculum')
    path = chosen.out / f'curriculum-{result["date"]}.png'
    path.write_bytes(chart_picture(chart(result), '.png'))
    print(f'and {path}')


def shares(arm: str, steps: int) -> list[list[int]]:
    """The share of the target domain in percent, as [step, share]. Its mean is 25 for each arm."""
    if arm == 'constant':
        return [[0, 25]]
    before, after, first = (10, 85, steps - steps // 5) if arm == 'docs last' else (85, 10, steps // 5)
    return [[0, before], [first - 1, before], [first, after]]


def train_all(scratch: Path, seeds: int, steps: int) -> dict[str, list[dict[str, list[float]]]]:
    """{arm: for each seed {'step', TARGET, OTHER: held-out loss at each evaluation}}."""
    prepare(load(CONFIG, [f'run_dir={scratch / "prepared"}', 'mesh.r=1']), print)  # the text becomes tokens once
    tokens = {name: next((scratch / 'prepared' / 'data' / name).glob('tokens-*')) for name in (OTHER, TARGET)}
    curves: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm in ARMS:
            target = shares(arm, steps)
            weights = {TARGET: target, OTHER: [[step, 100 - share] for step, share in target]}
            mixture = [{'name': name, 'tokens': str(tokens[name]), 'weight': weights[name]} for name in tokens]
            run_dir = scratch / f'{arm.replace(" ", "-")}-{seed}'
            pretrain(load(CONFIG, [
                f'steps={steps}', f'seed={seed}', f'run_dir={run_dir}', 'mesh.r=1', 'log.report=false',
                'data.tokenizer=null', f'data.mixture={json.dumps(mixture)}',
            ]))  # fmt: skip
            lines = [line for line in read_metrics(run_dir / 'metrics.jsonl', print) if f'val_loss/{TARGET}' in line]
            losses = {name: [line[f'val_loss/{name}'] for line in lines] for name in (TARGET, OTHER)}
            curves[arm].append({'step': [line['step'] for line in lines], **losses})
    return curves


def table(result: dict[str, Any]) -> str:
    """The result as Markdown: means and their standard errors over the seeds; differences are of the same seed."""
    last = {
        arm: {name: [curve[name][-1] for curve in curves] for name in (TARGET, OTHER)}
        for arm, curves in result['curves'].items()
    }
    lines = [
        f'| order | loss on {TARGET} | less constant | loss on {OTHER} | less constant |',
        '|---|---|---|---|---|',
    ]
    for arm in ARMS:
        cells = []
        for name in (TARGET, OTHER):
            differences = [a - b for a, b in zip(last[arm][name], last['constant'][name], strict=True)]
            cells += [_mean(last[arm][name], ''), '' if arm == 'constant' else _mean(differences, '+')]
        lines.append(f'| {arm} | ' + ' | '.join(cells) + ' |')
    seeds = len(last['constant'][TARGET])
    return '\n'.join([
        *lines,
        '',
        f'Nats per byte of held-out text after {result["steps"]} steps, mean ± standard error over {seeds} seeds.',
        f'Command: `{result["command"]}`, {result["date"]}, {result["processor"]}, {result["cores"]} cores, '
        f'{result["processor_seconds"]} s of processor time.',
        f'Versions: {json.dumps(result["versions"])}.',
    ]) + '\n'  # fmt: skip


def _mean(values: list[float], sign: str) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f'{statistics.mean(values):{sign}.3f} ± {error:.3f}'


def chart(result: dict[str, Any]) -> Chart:
    """The held-out loss of each domain over the steps, the mean over the seeds."""

    def panel(name: str) -> Panel:
        lines = [
            Line(arm, curves[0]['step'], [statistics.mean(at) for at in zip(*(c[name] for c in curves), strict=True)],
                 color=number, style=number)
            for number, (arm, curves) in enumerate(result['curves'].items())
        ]  # fmt: skip
        return Panel(f'held-out loss on {name}, nats per byte', lines)

    return Chart([panel(TARGET), panel(OTHER)])


if __name__ == '__main__':
    main()
