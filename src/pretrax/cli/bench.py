"""Time the training steps of a grid of configurations.

Each configuration runs in its own process. Results that are already there are kept, so the same command resumes a
sweep. The exit code is 1 if a row failed, and 130 after Ctrl-C.
"""

import contextlib
import functools
import importlib.util
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pretrax.option import argument, option

if TYPE_CHECKING:
    from pretrax.storage import AnyPath

_LEASE = 60.0  # seconds


def bench(
    sweep: str = argument('A YAML file, such as configs/sweeps/quick.yaml.', metavar='SWEEP'),
    out: str | None = option('Directory for the results. [default: sweeps/NAME]', '-o', metavar='DIR'),
    row: int | None = option('Run only row N, counted from 1; several may run at once.', metavar='N'),
    show: bool = option('Run nothing; show the newest results of all rows, on any hardware.', default=False),
) -> int:
    from pretrax.errors import UserError, install_extra
    from pretrax.experiments.bench import FINAL, ROWS, Bench, Result, earlier_results, measure_command, probe
    from pretrax.experiments.sweep import read_sweep
    from pretrax.storage import BucketPath, locate
    from pretrax.storage.index import Guard
    from pretrax.storage.lease import held_for
    from pretrax.storage.locate import working_directory
    from pretrax.view.sweep_report import table_text, write_report

    if show and row is not None:
        raise UserError('--show shows all rows; leave out --row')
    file = locate(sweep)
    place = locate(out or f'sweeps/{file.stem}')
    directory = working_directory(place)
    say = functools.partial(print, flush=True)
    grid, rows = read_sweep(file, directory / 'run')
    command = f'pretrax bench {sweep}' + (f' --out {out}' if out else '')

    part = '' if row is None else f'{ROWS}/{row}/'

    def report(results: list[Result], hardware: dict[str, Any], guard: Guard) -> None:
        if row is None:
            directory.mkdir(parents=True, exist_ok=True)
            write_report(directory, file.stem, hardware, command, results)
        if isinstance(place, BucketPath):
            for path in directory.glob(f'{part}results.*'):
                guard.write(place / f'{part}{path.name}', path.read_bytes())

    def end(results: list[Result]) -> None:
        say('\n' + '\n'.join(table_text(results)))
        say(f'\nwrote {place}/results.md, .csv, .html and .jsonl')
        if importlib.util.find_spec('matplotlib') is None:
            say(f'no plots, which need Matplotlib\n  {install_extra("pictures")}')

    if show:
        _fetch(place, directory)
        results, hardware = earlier_results(grid, rows, directory, say)
        report(results, hardware, Guard(lambda: None))
        end(results)
        return 0
    hardware = probe()
    with contextlib.ExitStack() as stack:
        guard = Guard(lambda: None)  # a directory on a disk has a lock
        if isinstance(place, BucketPath):
            guard = Guard(stack.enter_context(held_for(place / part if part else place, _LEASE, say)))
        _fetch(place, directory)
        running = stack.enter_context(Bench(grid, rows, directory, hardware, measure_command(), say=say, only=row))
        here = hardware['cpu'] if hardware['platform'] == 'cpu' else f'{hardware["count"]} x {hardware["device"]}'
        say(f'{f"row {row} of " if row else ""}{len(rows)} rows on {here}; results in {place}')
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell that starts this in the background ignores SIGINT
            signal.signal(number, _interrupt)
        try:
            for _ in running.run():
                report(
                    running.results(), hardware, guard
                )  # after each row, so that the table survives whatever comes next
        except KeyboardInterrupt:
            report(running.results(), hardware, guard)
            done = sum(result['status'] in FINAL for result in running.results())
            say(f'stopped; {done} of {len(rows)} rows are done; the same command resumes')
            return 130
        results = running.results()
        report(results, hardware, guard)
    if row is None:
        end(results)
    if any(result['status'] not in FINAL for result in (results if row is None else results[row - 1 : row])):
        say(f'{"some rows" if row is None else f"row {row}"} failed; the same command tries again')
        return 1
    return 0


def _fetch(place: 'AnyPath', directory: Path) -> None:
    """Copies the results in a bucket to this machine, including those of rows that ran as jobs of their own."""
    from pretrax.experiments.bench import RESULTS, ROWS
    from pretrax.storage import BucketPath
    from pretrax.system.atomic import write_file

    if isinstance(place, BucketPath):
        for name in place.files():
            if re.fullmatch(rf'({ROWS}/\d+/)?{re.escape(RESULTS)}', name):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(directory / name, (place / name).read_bytes())


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    print('asked to stop', file=sys.stderr)
    raise KeyboardInterrupt
