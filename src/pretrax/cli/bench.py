"""Time the training steps of a grid of configurations.

Each configuration runs in its own process. Results that are already there are kept, so the same command resumes a sweep. The exit code is 1 if a row failed, and 130
after Ctrl-C.
"""

import functools
import signal
import sys
from typing import Annotated, NoReturn

import typer


def bench(
    sweep: Annotated[str, typer.Argument(metavar='SWEEP', help='A YAML file, such as configs/sweeps/quick.yaml.')],
    out: Annotated[
        str | None, typer.Option('--out', '-o', metavar='DIR', help='Directory for the results. [default: sweeps/NAME]')
    ] = None,
) -> None:
    from pretrax.launch.bench import FINAL, RESULTS, Bench, Result, measure_command, probe
    from pretrax.launch.sweep import read_sweep
    from pretrax.machine.atomic import write_file
    from pretrax.storage import BucketPath, locate
    from pretrax.storage.working_directory import working_directory
    from pretrax.view.sweep_report import table_text, write_report

    file = locate(sweep)
    place = locate(out or f'sweeps/{file.stem}')
    directory = working_directory(place)
    say = functools.partial(print, flush=True)
    grid, rows = read_sweep(file, directory / 'run')
    if isinstance(place, BucketPath) and (place / RESULTS).is_file():
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / RESULTS, (place / RESULTS).read_bytes())
    hardware = probe()
    command = f'pretrax bench {sweep}' + (f' --out {out}' if out else '')
    with Bench(grid, rows, directory, hardware, measure_command(), say) as running:
        here = hardware['cpu'] if hardware['platform'] == 'cpu' else f'{hardware["count"]} x {hardware["device"]}'
        say(f'{len(rows)} rows on {here}; results in {place}')
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell that starts this in the background ignores SIGINT
            signal.signal(number, _interrupt)

        def report(results: list[Result]) -> None:
            write_report(directory, file.stem, hardware, command, results)
            if isinstance(place, BucketPath):
                for path in directory.glob('results.*'):
                    (place / path.name).write_bytes(path.read_bytes())

        try:
            for _ in running.run():
                report(running.results())  # after each row, so that the table survives whatever comes next
        except KeyboardInterrupt:
            report(running.results())
            left = sum(result['status'] not in FINAL for result in running.results())
            say(f'stopped; {len(rows) - left} of {len(rows)} rows are done; the same command resumes')
            raise typer.Exit(130) from None
        results = running.results()
        report(results)
    say('\n' + '\n'.join(table_text(results)))
    say(f'\nwrote {place}/results.md, .csv, .html and .jsonl')
    if any(result['status'] not in FINAL for result in results):
        say('some rows failed; the same command tries them again')
        raise typer.Exit(1)


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    print('asked to stop', file=sys.stderr)
    raise KeyboardInterrupt
