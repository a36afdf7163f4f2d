"""Stop a launched run: its processes save the state and end. The command that launched it continues it."""

from pretrax.cli._arguments import LaunchedRun


def stop(
    run: LaunchedRun,
) -> None:
    from pretrax.launch.record import read_record, run_named
    from pretrax.launch.registry import engine_of

    record = read_record(run_named(run))
    print(engine_of(record).stop(record))
