"""The speedrun: bits per byte of held-out text after ten minutes, compared with the reference configuration.

    uv run python benchmarks/speedrun.py benchmarks/speedrun/muon.yaml
    uv run python benchmarks/speedrun.py --check

docs/tutorials/speedrun.md has the rules. The first command trains the reference and the entry at the same time, so that
they share the machine and whatever else it does, and writes benchmarks/speedrun/entries/NAME. The second one verifies
every entry from its metrics, and writes benchmarks/speedrun/leaderboard.md.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import processor
from omegaconf import OmegaConf

from pretrax.config import RunConfig, load
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.system.cores import usable_cores

HERE = Path(__file__).parent / 'speedrun'
REFERENCE = HERE / 'reference.yaml'
SIDES = ('reference', 'entry')
MINUTES = 10.0
FREE = {'vocab_size', 'tokenizer'}  # keys of `data` that an entry may change
FORBIDDEN = ('init_from', 'distill')  # what others have trained
_TRIAL = 24  # steps that are timed before the clock starts
_ENOUGH = 4  # of them
_USED = 0.8  # part of the time that the steps are planned for; the speed of the machine varies
_SHARE = 1.1  # of the cores that the reference used, an entry may use at most this many times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('entry', nargs='?', type=Path, help='a configuration')
    parser.add_argument('--by', default='', help='who made the entry')
    parser.add_argument(
        '--minutes', type=float, default=MINUTES, help='another time, to try an idea; never on the board'
    )
    parser.add_argument('--out', type=Path, help='directory of the result; default: benchmarks/speedrun/entries/NAME')
    parser.add_argument('--check', action='store_true', help='verify the entries and write the leaderboard')
    given = parser.parse_args()
    try:
        if given.entry:
            compete(given.entry, given.minutes, given.out, given.by)
        elif given.check:
            publish(HERE / 'entries', HERE / 'leaderboard.md')
        else:
            parser.error('give the configuration of an entry, or --check')
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        raise SystemExit(2) from None


def compete(path: Path, minutes: float, out: Path | None, by: str) -> None:
    """Trains the reference and an entry at the same time, and writes what the leaderboard needs to verify the entry."""
    configs = {'reference': load(REFERENCE), 'entry': load(path)}
    for config in configs.values():
        follow_rules(config)
    out = out or HERE / 'entries' / configs['entry'].name
    if out.exists():
        raise UserError(f'{out} exists; give the entry another name, or another --out')
    with tempfile.TemporaryDirectory(prefix='speedrun-') as scratch:
        files = {'reference': REFERENCE, 'entry': path}
        short = [f'steps={_TRIAL}', 'schedule.name=constant', 'eval.every=0', 'log.every=1']
        trial = _train(files, dict.fromkeys(SIDES, short), Path(scratch, 'trial'))
        changes = {}
        speed = seconds_per_step({side: trial[side]['run_dir'] for side in SIDES})
        for side, step in speed.items():
            steps = int(60 * minutes * _USED / step)
            tokens = configs[side].batch.tokens
            assert isinstance(tokens, int)  # follow_rules
            batches = math.ceil(held_out(trial[side]['run_dir'])['tokens'] / tokens) + 1
            print(f'{side}: {step:.3f} s per step, so {steps} steps', flush=True)
            if steps < (warmup := getattr(configs[side].schedule.options, 'warmup', None) or 0):
                raise UserError(
                    f'{minutes:g} minutes are too few on this machine: the {side} would make {steps} steps, '
                    f'and its warmup is {warmup}\n'
                    + ('quiet the machine, or give more --minutes' if side == 'reference' else 'lower schedule.warmup')
                )
            changes[side] = [f'steps={steps}', f'eval.every={steps}', f'eval.batches={batches}']
        busy = os.getloadavg()[0]
        ran = _train(files, changes, Path(scratch, 'runs'))
        result = {
            'name': configs['entry'].name, 'by': by, 'date': datetime.date.today().isoformat(), 'minutes': minutes,
            'processor': processor(), 'cores': usable_cores(), 'python': sys.version.split()[0], 'load': [busy,
            os.getloadavg()[0]],
        }  # fmt: skip
        written = Path(scratch, 'entry')
        for side in SIDES:
            run = ran[side]['run_dir']
            (written / side).mkdir(parents=True)
            for name in ('metrics.jsonl', 'attempts.jsonl'):
                shutil.copy(run / name, written / side / name)
            values = _values(run / 'config.yaml')
            del values['run_dir']  # a directory of this machine, as are the comments, which say where values come from
            OmegaConf.save(OmegaConf.create(values), written / side / 'config.yaml')
            result[side] = {'cores_used': round(ran[side]['cores_used'], 3), 'held_out': held_out(run)}
        shutil.copy(path, written / 'entry.yaml')
        (written / 'result.json').write_text(json.dumps(result, indent=1) + '\n')
        row = verify(written, minutes)
        shutil.copytree(written, out)
    print(f'\n{_table([row])}\nwritten to {out}', unfair(row, minutes), sep='\n')


def follow_rules(config: RunConfig) -> None:
    """Raises UserError for a configuration that may not compete."""
    ours, theirs = (dict(each.data.options) for each in (load(REFERENCE), config))
    if theirs.get('text') != 'stdlib':
        raise UserError(f'{config.name}: the text of the speedrun is data.text=stdlib')
    if changed := [key for key, value in theirs.items() if key not in FREE and value != ours[key]]:
        raise UserError(
            f'{config.name}: an entry may not change data.{changed[0]}; of data, only {", ".join(sorted(FREE))}'
        )
    if not isinstance(config.batch.tokens, int):
        raise UserError(f'{config.name}: batch.tokens has to be a number, since the steps are planned with it')
    if set_ := [key for key in FORBIDDEN if getattr(config, key) is not None]:
        raise UserError(f'{config.name}: an entry starts from random weights and has no teacher; remove {set_[0]}')


def _train(files: dict[str, Path], changes: dict[str, list[str]], place: Path) -> dict[str, dict[str, Any]]:
    """Trains both sides at the same time. Gives the run directory of each, and the cores that it used on average."""
    place.mkdir(parents=True)
    program = [sys.executable, '-m', 'pretrax', 'train']
    running = {}
    for side, path in files.items():
        command = [
            *program,
            str(path),
            f'run_dir={place / side}',
            *changes[side],
            'checkpoint.every=1000000',
            'log.report=false',
        ]
        with (place / f'{side}.txt').open('w') as output:
            running[side] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    started, ran = time.monotonic(), {}
    while len(ran) < len(running):
        pid, status, usage = os.wait4(-1, 0)
        side = next(side for side, process in running.items() if process.pid == pid)
        running[side].returncode = os.waitstatus_to_exitcode(status)
        cores = (usage.ru_utime + usage.ru_stime) / (time.monotonic() - started)
        ran[side] = {'run_dir': place / side, 'cores_used': cores}
    for side, process in running.items():
        if process.returncode:
            raise UserError(f'{side} failed:\n{(place / f"{side}.txt").read_text()[-2000:]}')
    return ran


def seconds_per_step(runs: dict[str, Path]) -> dict[str, float]:
    """The mean time of the steps that both sides trained while the other one trained too, from runs that log every
    step.

    The first steps are left out. If the two hardly overlap, all other steps count.
    """
    times = {side: [line['time'] for line in _metrics(run_dir)][3:] for side, run_dir in runs.items()}
    start, end = max(each[0] for each in times.values()), min(each[-1] for each in times.values())
    found = {}
    for side, each in times.items():
        steps = list(itertools.pairwise(each))
        both = [(before, after) for before, after in steps if start <= before and after <= end]
        found[side] = statistics.mean(after - before for before, after in (both if len(both) >= _ENOUGH else steps))
    return found


def held_out(run_dir: Path) -> dict[str, Any]:
    """Counts of the held-out tokens of a run, and the digest of the text that they come from."""
    [file] = run_dir.glob('data/tokens-*/validation/zarr.json')
    attributes = json.loads(file.read_text())['attributes']
    counts = {key: attributes['counts'][key] for key in ('documents', 'tokens', 'predicted_bytes', 'targets')}
    return {**counts, 'text': attributes['source']['text']}


def verify(entry: Path, minutes: float = MINUTES) -> dict[str, Any]:
    """The row of the leaderboard of an entry, from its metrics. Raises UserError if it breaks a rule."""
    result = json.loads((entry / 'result.json').read_text())
    row = {key: result[key] for key in ('name', 'by', 'date', 'processor', 'cores', 'load')}
    if result['minutes'] != minutes:
        raise UserError(f'{entry}: ran for {result["minutes"]:g} minutes, not {minutes:g}')
    for side in SIDES:
        row[side] = _verify_side(entry / side, result[side]['held_out'])
        row[side]['cores_used'] = result[side]['cores_used']
    texts = {result[side]['held_out']['text'] for side in SIDES}
    if len(texts) > 1:
        raise UserError(f'{entry}: the reference and the entry have different held-out text')
    if minutes == MINUTES and (why := unfair(row, minutes)):
        raise UserError(f'{entry}: {why}\nrun it again')
    row['ratio'] = row['entry']['bits_per_byte'] / row['reference']['bits_per_byte']
    return row


def unfair(row: dict[str, Any], minutes: float) -> str:
    """Why the two sides cannot be compared; '' if they can be."""
    for side in SIDES:
        if row[side]['seconds'] > 60 * minutes:
            return f'{side} took {row[side]["seconds"]:.0f} s of {60 * minutes:.0f}'
    reference, own = (row[side]['cores_used'] for side in SIDES)
    if own > _SHARE * reference:
        return f'unfair: the entry used {own:.2f} cores on average, and the reference {reference:.2f}'
    return ''


def _verify_side(directory: Path, held_out: dict[str, Any]) -> dict[str, Any]:
    config = _values(directory / 'config.yaml')
    lines = _metrics(directory)
    steps, times = ([line[key] for line in lines] for key in ('step', 'time'))
    events = [json.loads(line) for line in (directory / 'attempts.jsonl').read_text().splitlines()]
    began = [event['time'] for event in events if event['event'] == 'began']
    if config['data']['text'] != 'stdlib' or any(config.get(key) is not None for key in FORBIDDEN):
        raise UserError(f'{directory}: the configuration breaks a rule of docs/tutorials/speedrun.md')
    if len(began) != 1:
        raise UserError(f'{directory}: the run began {len(began)} times, not once')
    is_whole = (steps[0], steps[-1]) == (1, config['steps']) and 'val_loss' in lines[-1]
    if not is_whole or steps != sorted(steps) or times != sorted(times) or times[0] < began[0]:
        raise UserError(f'{directory}: the lines of metrics.jsonl are not those of one run to its end')
    seconds = times[-1] - times[0]
    if config['eval']['batches'] * config['batch']['tokens'] < held_out['tokens']:
        raise UserError(f'{directory}: eval.batches covers only a part of the held-out text')
    bits = lines[-1]['val_loss'] / math.log(2) * held_out['targets'] / held_out['predicted_bytes']
    if not math.isclose(bits, lines[-1]['val_bits_per_byte'], rel_tol=1e-6):
        raise UserError(f'{directory}: val_loss and val_bits_per_byte do not belong together')
    return {'steps': steps[-1], 'seconds': seconds, 'bits_per_byte': bits}


def publish(entries: Path, board: Path) -> None:
    """Verifies all entries and writes the leaderboard."""
    rows = [verify(path) for path in sorted(entries.iterdir()) if path.is_dir()]
    board.write_text(leaderboard(rows))
    print(f'{len(rows)} entries are verified\n\n{leaderboard(rows)}')


def leaderboard(rows: Sequence[dict[str, Any]]) -> str:
    """The entries as Markdown, the lowest ratio first."""
    head = '# Speedrun\n\nWritten by `uv run python benchmarks/speedrun.py --check`. '
    rules = '[The tutorial](../../docs/tutorials/speedrun.md) has the rules and explains the columns.\n\n'
    return head + rules + _table(sorted(rows, key=lambda row: row['ratio']))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        '| entry | bits per byte | reference | ratio | steps, entry and reference | cores used | machine | load | '
        'date | by |',
        '|---|---|---|---|---|---|---|---|---|---|',
    ]
    for row in rows:
        entry, reference = row['entry'], row['reference']
        used = ' and '.join(f'{side["cores_used"]:.2f}' for side in (entry, reference))
        lines.append(
            f'| {row["name"]} | {entry["bits_per_byte"]:.4f} | {reference["bits_per_byte"]:.4f} | {row["ratio"]:.4f} | '
            f'{entry["steps"]} and {reference["steps"]} | {used} | {row["processor"]}, {row["cores"]} cores | '
            f'{row["load"][0]:.1f} to {row["load"][1]:.1f} | {row["date"]} | {row["by"]} |'
        )
    return '\n'.join(lines) + '\n'


def _values(path: Path) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _metrics(directory: Path) -> list[dict[str, Any]]:
    return list(read_metrics(directory / 'metrics.jsonl', lambda text: None))


if __name__ == '__main__':
    main()
