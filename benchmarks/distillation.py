"""Compares a student that learns from a teacher with the same student alone, and measures what the teacher costs.

    uv run pretrax train configs/quickstart.yaml
    uv run python benchmarks/distillation.py [--kinds KIND ...] [--teacher runs/quickstart] [--seeds 3] [--steps 100]
        [--hidden-weight 0.1] [--out DIR]

The teacher is the quickstart, or another run with its vocabulary. The student has 2 layers of width 64, and trains on
the same tokens, in the same order, for the same number of steps, once for each seed and kind:

    alone       without a teacher
    distilled   with one
    hidden      with one whose hidden states it learns too: those after layers 1 and 3, of 4, after its own two layers
    offline     with the 64 most likely tokens of one that were prepared before

`val_loss` is the usual cross-entropy on held-out text. Speed is the median of the steps that are logged; memory is what
the compiler counts for the step of one device, state included. The result is written to results/distillation-DATE.json
and .md.
"""

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from result_files import circumstances, write_result

from pretrax import pretrain
from pretrax.checkpoint import find_checkpoint, read_description
from pretrax.config import RunConfig, load
from pretrax.cost.memory import memory_of
from pretrax.distill.preparation import prepare_cache
from pretrax.observe.metrics import read_metrics
from pretrax.run.compiled_step import lower_step
from pretrax.run.setup import prepare
from pretrax.system.software import versions

STUDENT = ['model.n_layers=2', 'model.d_model=64', 'model.attention.n_heads=2', 'model.attention.n_kv_heads=1']
TOP_K = 64
KINDS = ('alone', 'distilled', 'hidden', 'offline')
RESULTS = Path(__file__).parent / 'results'


def main() -> None:
    """Trains the students, prints the table and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--teacher', type=Path, default=Path('runs/quickstart'))
    parser.add_argument('--kinds', nargs='+', choices=KINDS, default=KINDS)
    parser.add_argument('--hidden-weight', type=float, default=0.1, help='distill.hidden.weight')
    parser.add_argument('--out', type=Path, default=RESULTS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(Path(scratch), chosen.teacher, chosen.seeds, chosen.steps, chosen.kinds, chosen.hidden_weight)
    write_result(circumstances() | {'versions': versions()} | result, table, chosen.out, 'distillation')


def compare(
    scratch: Path, teacher: Path, seeds: int, steps: int, chosen: Sequence[str], hidden_weight: float
) -> dict[str, Any]:
    """`val_loss` of each seed, speed and memory of the chosen kinds of students,
    and `val_loss` of the teacher, if it has one.
    """
    directory, step = find_checkpoint(teacher)
    val_loss = read_description(directory, step).get('val_loss')
    found: dict[str, Any] = {'steps': steps, 'teacher': {'path': str(teacher), 'val_loss': val_loss, 'steps': step}}
    tokens = next((teacher / 'data').glob('tokens-*'))  # tokenized once
    data = ['data.text=null', 'data.vocab_size=null', f'data.tokens={tokens}']
    kinds = {
        'alone': [],
        'distilled': [f'distill.teacher={teacher}'],
        'hidden': [
            f'distill.teacher={teacher}',
            f'distill.hidden={{layers: [[0, 1], [1, 3]], weight: {hidden_weight}}}',
        ],
        'offline': [f'distill.cache={scratch / "cache"}'],
    }
    prepared = []
    for kind, changes in kinds.items():
        if kind not in chosen:
            continue
        if kind == 'offline':
            for seed in range(seeds):
                own = [f'seed={seed}', *STUDENT, *data, *kinds['distilled']]
                prepares = configured(scratch, f'prepare-{seed}', steps, *own)
                made = prepare_cache(prepares, scratch / 'cache', TOP_K, print)
                assert made is not None  # in one process
                prepared.append(dataclasses.asdict(made))
        configs = [
            configured(scratch, f'{kind}-{seed}', steps, f'seed={seed}', *STUDENT, *data, *changes)
            for seed in range(seeds)
        ]
        ends = [trained(config) for config in configs]
        found[kind] = {
            'val_loss': [end['val_loss'] for end in ends],
            'tokens_per_second': statistics.median(end['tokens_per_second'] for end in ends),
            'step_memory': step_memory(configs[0]),
        }
    return found | {'prepared': prepared}


def configured(scratch: Path, name: str, steps: int, *changes: str) -> RunConfig:
    """The quickstart with changes, in a directory of its own."""
    own = [f'name={name}', f'run_dir={scratch / name}', f'steps={steps}', 'eval.every=1000000', 'eval.batches=32']
    return load('configs/quickstart.yaml', [*own, 'mesh.r=1', 'log.report=false', *changes])


def trained(config: RunConfig) -> dict[str, float]:
    """Trains a run: its `val_loss` after the last step, and the median of `tokens_per_second`."""
    ended = pretrain(config)
    speeds = [line['tokens_per_second'] for line in read_metrics(config.run_dir / 'metrics.jsonl') if 'loss' in line]
    return {'val_loss': ended.validation['val_loss'], 'tokens_per_second': statistics.median(speeds[1:])}


def step_memory(config: RunConfig) -> int:
    """Bytes of the compiled step and its state, on one device."""
    run = prepare(config, lambda text: None)
    with jax.set_mesh(run.mesh):
        return memory_of(lower_step(run).compile())


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ['| student | val_loss by seed | mean | tokens/s | memory of a step |', '|---|---|---|---|---|']
    kinds = [kind for kind in KINDS if kind in result]
    for kind in kinds:
        one = result[kind]
        by_seed = ', '.join(f'{loss:.4f}' for loss in one['val_loss'])
        lines.append(
            f'| {kind} | {by_seed} | {statistics.mean(one["val_loss"]):.4f} | {one["tokens_per_second"]:,.0f} '
            f'| {one["step_memory"] / 2**20:.0f} MiB |'
        )
    teacher = result['teacher']
    lines.append('')
    of = kinds[0]
    for kind in kinds[1:]:
        gains = [a - b for a, b in zip(result[of]['val_loss'], result[kind]['val_loss'], strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        lines.append(
            f'Gain of {kind} over {of}: {statistics.mean(gains):.4f} +- {error:.4f} nats per token (standard error '
            'over '
            f'{len(gains)} seeds), after {result["steps"]} steps.'
        )
    if result['prepared']:
        first, last = result['prepared'][0], result['prepared'][-1]
        lines.append(
            f'Prepared: {last["rows"]:,} rows, {last["bytes_per_token"]:.0f} bytes per token, at '
            f'{first["tokens_per_second"]:,.0f} tokens/s; probability of the tail {first["tail"]:.3f}.'
        )
    lines += [
        f'Teacher: {teacher["path"]} after {teacher["steps"]} steps, val_loss {teacher["val_loss"]}.',
        f'Command: `{result["command"]}`, {result["date"]}, {result["processor"]}, {result["cores"]} cores.',
        f'Versions: {json.dumps(result["versions"])}.',
    ]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    main()
