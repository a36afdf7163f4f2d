"""Stop a launched run: its processes save the state and end. The command that launched it continues it."""

from pretrax.cli._arguments import LaunchedRun


def stop(
    run: LaunchedRun,
) -> None:
    from pretrax.launch.record import read_record
    from pretrax.launch.registry import engine_of
    from pretrax.storage import locate_run

    record = read_record(locate_run(run))
    print(engine_of(record).stop(record))
