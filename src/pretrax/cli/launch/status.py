"""Show how a launched run is doing: what its engine says, its progress, and its newest crash report."""

from pretrax.cli._arguments import LaunchedRun
from pretrax.errors import UserError


def status(
    run: LaunchedRun,
) -> None:
    from pretrax.launch.crash import newest_reports
    from pretrax.launch.record import read_record
    from pretrax.launch.registry import engine_of
    from pretrax.storage import locate_run
    from pretrax.view.run_list import list_runs, runs_text

    run_dir = locate_run(run)
    record = read_record(run_dir)
    print(engine_of(record).status(record))
    try:
        print('\n'.join(runs_text(list_runs([str(run_dir)]))))
    except UserError:  # it has no files of a run yet
        print('no step is done yet')
    for path in newest_reports(run_dir):
        print(f'crash report: {path}')
