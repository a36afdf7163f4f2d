"""Kills processes of real runs at random moments, and compares every loss with that of an undisturbed run.

    uv run python benchmarks/kills.py                       # 500 kills, an hour
    uv run python benchmarks/kills.py muon fp16 --kills 20  # some features, until there are 20 kills of them

For each feature of `FEATURES`, a small run trains in two processes, or `--processes`, under `pretrax launch local`.
SIGKILL ends one process, another one while the run starts again, all processes, or a standby; the moments come from
the seed. After each kill it waits until the run has logged a step that it had not logged before, and counts the steps
that were trained again. In the end, an undisturbed run of the same length has to have the same loss in every step:
the exit code is 1 if one differs, or if a run does not recover. `--minutes` ends the campaign early, with the kills
that it had time for.

A row is added to `kills.jsonl` for each `--each` kills of a feature. The same command continues after an interruption,
and a larger number adds to what is there. Delete the file to begin again.
"""

import argparse
import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_files import circumstances, write_result
from soak import Injected, Soak, inject, losses

from pretrax.checkpoint.memory_pieces import newest_in

TESTS = Path(__file__).parents[1] / 'tests'
sys.path.append(str(TESTS))

from runs import write_documents  # type: ignore[import-not-found]  # noqa: E402 - of the tests

LONGEST = 2.0  # seconds from a recovery to the next kill
STEPS = 1000000  # more than a run has time for
LAST_CHANGE = 160  # a run that ends before one of its changes is refused
KINDS = {'kill': 5, 'kill-twice': 2, 'kill-all': 2, 'kill-standby': 1}  # and how often each is drawn

DOCUMENTS = {'name': 'text', 'text': 'DIRECTORY/documents.jsonl', 'tokenizer': 'bytes', 'streaming': True}
LLAMA = {'family': 'llama', 'n_layers': 1, 'd_model': 32, 'attention': {'n_heads': 4}}
# What each feature changes in the configuration. DIRECTORY is that of the run.
FEATURES: dict[str, dict[str, Any]] = {
    'dense': {},
    'experts': {'model': LLAMA | {'experts': {'n_experts': 4, 'experts_per_token': 2}}},
    'muon': {'optimizer': {'name': 'muon'}},
    'fp16': {'precision': {'compute': 'fp16', 'loss_scale_steps': 20}},
    'dropout': {'model': LLAMA | {'dropout': 0.1}},
    'ema': {'optimizer': {'ema_decay': 0.99}},
    'growing-batches': {'batch': {'tokens': [[0, 256], [40, 512], [150, 1024]], 'sequence_length': 64}},
    'streaming': {'data': DOCUMENTS | {'validation_documents': 0}},
    'distillation': {'distill': {'teacher': f'hf:{TESTS / "goldens" / "llama2"}', 'temperature': 2.0}},
    'nnx': {'model': {'name': 'nnx', 'target': 'nnx_modules:Plain', 'arguments': {'rate': 0.1}}},
}  # fmt: skip


def values(feature: str, directory: Path) -> dict[str, Any]:
    """The configuration of a run."""
    base: dict[str, Any] = {
        'name': 'kills', 'steps': STEPS, 'model': LLAMA, 'data': {'name': 'synthetic', 'vocab_size': 96},
        'batch': {'tokens': 512, 'sequence_length': 64}, 'optimizer': {}, 'schedule': {'name': 'constant', 'warmup': 2},
        'precision': {'compute': 'f32'}, 'checkpoint': {'every': 50, 'memory': {'every': 1}},
        'log': {'every': 1, 'report': False}, 'eval': {'every': 0}, 'faults': {'heartbeat_seconds': 5},
    }  # fmt: skip
    changes = json.loads(json.dumps(FEATURES[feature]).replace('DIRECTORY', str(directory)))
    return base | changes | {'optimizer': {'learning_rate': 1e-3} | changes.get('optimizer', {})}


def prepared(feature: str, name: str, directory: Path, processes: int, seed: int) -> Soak:
    """A run that has not been started."""
    place = directory / name
    place.mkdir(parents=True)
    write_documents(place)
    (place / 'run.yaml').write_text(json.dumps(values(feature, place)))
    environment = os.environ | {
        'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0', 'PYTHONPATH': str(TESTS),
        'XDG_CACHE_HOME': str(directory.parent / 'cache'),
    }  # fmt: skip
    kinds = [kind for kind, times in KINDS.items() for _ in range(times)]
    options = argparse.Namespace(processes=processes, kinds=kinds)
    return Soak(place / 'run', place / 'run', place, options, random.Random(f'{feature} {seed}'), None, environment)


def disturbed(soak: Soak, kills: int, end: float) -> list[Injected]:
    """Trains until the run has survived this many kills, did not survive one, or it is late: one at least."""
    injected: list[Injected] = []
    soak.start()
    try:
        while len(injected) < kills and (time.monotonic() < end or not injected):
            time.sleep(soak.draw.uniform(0, LONGEST))
            soak.is_done()  # starts a launcher that gave up again
            injected += [kill for kill in [inject(soak)] if kill]
            if injected and injected[-1].recovered is None:
                break
    finally:
        assert soak.launcher is not None
        soak.launcher.terminate()
        soak.launcher.wait()
    return injected


def undisturbed(soak: Soak, steps: int) -> dict[int, float]:
    """Trains for at least `steps` steps. Returns the loss of each step."""
    soak.start()
    assert soak.launcher is not None
    while soak.step() < steps and soak.launcher.poll() is None:
        time.sleep(0.1)
    soak.launcher.terminate()
    if soak.launcher.wait():
        raise RuntimeError(soak.output.read_text()[-3000:])
    return losses(soak.run_dir)


def campaign(feature: str, kills: int, end: float, directory: Path, processes: int, seed: int) -> dict[str, Any]:
    """Kills a run of a feature. Returns what happened to it, for the table."""
    soak = prepared(feature, 'disturbed', directory, processes, seed)
    injected = disturbed(soak, kills, end)
    found = losses(soak.run_dir)
    expected = undisturbed(prepared(feature, 'undisturbed', directory, processes, seed), max(found, default=1))
    result = {
        'feature': feature,
        'processes': processes,
        'kills': collections.Counter(kill.kind for kill in injected),
        'survived': sum(kill.recovered is not None for kill in injected),
        'starts_of_the_launcher': soak.starts,
        'steps': max(found, default=0),
        'different': sum(expected.get(step) != found.get(step) for step in range(1, max(found, default=1) + 1)),
        # A state may be in memory before its step is logged.
        'lost': [max(0, kill.lost) for kill in injected if kill.lost is not None],
        'recovered': [round(kill.recovered, 1) for kill in injected if kill.recovered is not None],
    }
    print(json.dumps(result), flush=True)
    return result


def forked_campaign(feature: str, kills: int, end: float, directory: Path, seed: int) -> dict[str, Any]:
    """Kills a run without a launcher, whose attempts are forked from a process that has imported everything.

    So an attempt takes a second. It is killed before a change of the memory, or some time after its first step.
    """
    draw, run = random.Random(f'{feature} {seed}'), directory / 'run'
    write_documents(directory)
    config = values(feature, directory) | {'mesh': {'r': 1, 'd': 1}}
    killed, lost, times, newest = collections.Counter(), [], [], 0
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0'}
    environment |= {'PYTHONPATH': str(TESTS), 'XDG_CACHE_HOME': str(directory.parent / 'cache')}
    command = [sys.executable, TESTS / 'run' / 'nursery.py', directory.parent / 'cache']
    with (
        tempfile.TemporaryDirectory(dir='/dev/shm') as memory,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as nursery,
    ):

        def attempt(run: Path, steps: int, **kill: float) -> int:
            order: dict[str, Any] = {'event': None, 'seconds': None, 'memory': memory if run.name == 'run' else None}
            order |= {'values': config | {'run_dir': str(run), 'steps': steps}} | kill
            assert nursery.stdin
            assert nursery.stdout
            nursery.stdin.write(json.dumps(order) + '\n')
            nursery.stdin.flush()
            return int(nursery.stdout.readline())

        while killed.total() < kills and time.monotonic() < end:
            kind, began = draw.choice(['event', 'seconds']), time.monotonic()
            when = draw.randrange(2, 70) if kind == 'event' else draw.uniform(0, LONGEST)
            if (code := attempt(run, STEPS, **{kind: when})) != -signal.SIGKILL:
                raise RuntimeError(f'an attempt ended with {code}: {kind} {when}')
            killed['before a change of the memory' if kind == 'event' else 'at a moment'] += 1
            newest = newest_in(Path(memory))
            lost.append(max(0, max(losses(run), default=0) - newest))
            times.append(round(time.monotonic() - began, 1))
        steps = max(newest + 1, LAST_CHANGE)
        codes = attempt(run, steps), attempt(directory / 'undisturbed', steps)
    found, expected = losses(run), losses(directory / 'undisturbed')
    result = {
        'feature': feature,
        'processes': 1,
        'kills': killed,
        'survived': killed.total() if codes == (0, 0) else 0,
        'steps': steps,
        'different': sum(expected.get(step) != found.get(step) for step in range(1, steps + 1)),
        'lost': lost,
        'recovered': times,
    }
    print(json.dumps(result), flush=True)
    return result


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    kinds = sum((collections.Counter(row['kills']) for row in result['features']), collections.Counter())
    lines = [
        f'# Kills, {result["date"]}', '',
        f'`{result["command"]}` on {result["cores"]} cores of {result["processor"]}.',
        f'Programs in the queue of the cores, averaged over the last minutes: {result["load"]}.',
        f'Kills: {", ".join(f"{kind} {n}" for kind, n in kinds.items())}.',
        'Several commands made these rows; the command and the load are those of the last one.',
        'The seconds are those from a kill until a new step, or with `--forked` those of an attempt.',
        '`different` counts the steps whose loss is not, bit for bit, that of the undisturbed run.', '',
        '| feature | kills | survived | steps | different | steps lost: median, most | seconds, median |',
        '|---|---|---|---|---|---|---|',
    ]  # fmt: skip
    for feature in dict.fromkeys(row['feature'] for row in result['features']):
        row = together([row for row in result['features'] if row['feature'] == feature])
        lines.append(
            f'| {feature} | {row["kills"].total()} | {row["survived"]} | {row["steps"]} | {row["different"]} | '
            f'{statistics.median(row["lost"] or [0]):g}, {max(row["lost"], default=0)} | '
            f'{statistics.median(row["recovered"] or [0.0]):.1f} |'
        )
    row = together(result['features'])
    total = row['kills'].total(), row['survived'], row['steps'], row['different']
    lost = collections.Counter(row['lost'])
    counted = ', '.join(f'{steps}: {lost[steps]}' for steps in sorted(lost))
    lines += [f'| all | {" | ".join(map(str, total))} | | |', '', f'Steps lost, and after how many kills: {counted}.']
    return '\n'.join(lines) + '\n'


def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums of rows, with all their lists."""
    kills = sum((collections.Counter(row['kills']) for row in rows), collections.Counter())
    lists = {key: [one for row in rows for one in row[key]] for key in ('lost', 'recovered')}
    return {'kills': kills, **lists} | {
        key: sum(row[key] for row in rows) for key in ('survived', 'steps', 'different')
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('features', nargs='*', choices=[[], *FEATURES], help='default: all')
    parser.add_argument('--kills', type=int, default=500, help='of these features in all, with those in the rows')
    parser.add_argument('--each', type=int, default=25, help='kills of a run')
    parser.add_argument('--processes', type=int, default=2)
    parser.add_argument('--forked', action='store_true', help='one process without a launcher, in a second an attempt')
    parser.add_argument('--minutes', type=float, default=float('inf'), help='after which no further kill is made')
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'results')
    asked = parser.parse_args()
    features, end = asked.features or list(FEATURES), time.monotonic() + 60 * asked.minutes
    name = 'kills-forked' if asked.forked else f'kills-{asked.processes}-processes'
    file = asked.out / f'{name}.jsonl'
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with tempfile.TemporaryDirectory(prefix='kills-') as temporary:
        while time.monotonic() < end:
            kills = {feature: together([row for row in rows if row['feature'] == feature])['kills'].total()
                     for feature in features}  # fmt: skip
            left, feature = asked.kills - sum(kills.values()), min(kills, key=lambda feature: kills[feature])
            if left <= 0:
                break
            seed = sum(row['feature'] == feature for row in rows)
            directory, each = Path(temporary) / f'{feature}-{seed}', min(left, asked.each)
            directory.mkdir()
            if asked.forked:
                rows.append(forked_campaign(feature, each, end, directory, seed))
            else:
                rows.append(campaign(feature, each, end, directory, asked.processes, seed))
            with file.open('a') as lines:
                lines.write(json.dumps(rows[-1]) + '\n')
    result = circumstances() | {'load': round(os.getloadavg()[2], 1), 'features': rows}
    write_result(result, table, asked.out, name)
    return any(row['different'] or row['survived'] < sum(row['kills'].values()) for row in rows)


if __name__ == '__main__':
    sys.exit(main())
