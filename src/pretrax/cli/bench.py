"""`pretrax bench SWEEP.yaml`: times the rows of a sweep, and writes them as a table and as plots."""

import functools
import pathlib
import signal
import sys
from typing import NoReturn

import typer

from pretrax.launch.bench import FINAL, Bench, measure_command, probe
from pretrax.launch.sweep import read_sweep
from pretrax.observe.sweep_report import table_text, write_report


def bench(path: str, out: str | None) -> None:
    """Runs what is missing; exits with 1 if a row failed, and with 130 after Ctrl-C, which keeps what is there."""
    file = pathlib.Path(path)
    directory = pathlib.Path(out) if out else pathlib.Path('sweeps') / file.stem
    say = functools.partial(print, flush=True)
    sweep, rows = read_sweep(file, directory / 'run')
    hardware = probe()
    with Bench(sweep, rows, directory, hardware, measure_command(), say) as running:
        here = hardware['cpu'] if hardware['platform'] == 'cpu' else f'{hardware["count"]} x {hardware["device"]}'
        say(f'{len(rows)} rows on {here}; results in {directory}')
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell that starts it in the background has SIGINT ignored
            signal.signal(number, _interrupt)
        report = functools.partial(
            write_report, directory, file.stem, hardware, f'pretrax bench {path}' + (f' --out {out}' if out else '')
        )  # fmt: skip
        try:
            for _ in running.run():
                report(running.results())  # after each row: whatever comes next, the table is there
        except KeyboardInterrupt:
            report(running.results())
            left = sum(result['status'] not in FINAL for result in running.results())
            say(f'stopped; {len(rows) - left} of {len(rows)} rows are done, the same command goes on')
            raise typer.Exit(130) from None
        results = running.results()
        report(results)
    say('\n' + '\n'.join(table_text(results)))
    say(f'\nwrote {directory}/results.md, .csv, .html and .jsonl')
    if any(result['status'] not in FINAL for result in results):
        say('some rows failed; the same command tries them again')
        raise typer.Exit(1)


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    print('asked to stop', file=sys.stderr)
    raise KeyboardInterrupt
