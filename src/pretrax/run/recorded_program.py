"""The compiled step in the run directory: its picture (`log.graph`), and its text, with which traces are joined."""

from pretrax.errors import Report, first_line
from pretrax.run.compiled_step import CompiledStep, is_recorded
from pretrax.run.directory import local_directory
from pretrax.run.setup import Run
from pretrax.view.program.file import TEXT, write_program

DIRECTORY = 'program'


def record_program(run: Run, step: CompiledStep, report: Report) -> None:
    """Writes `program/`, if `log.graph` or a trace asks for it. A failure is a warning: the run does not depend on it."""
    directory = local_directory(run.config.run_dir) / DIRECTORY
    if not is_recorded(run):
        return
    try:
        program = write_program(directory, step.call, run.mesh.shape)
        if not run.config.log.graph:
            return
        from pretrax.view.program.picture import write_pictures  # QuickJS is not needed otherwise

        where = f'{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}'
        write_pictures(directory, program, run.config.name or run.config.run_dir.name, where)
    except Exception as error:  # whatever is wrong with a picture, training goes on
        what = first_line(error) or type(error).__name__
        report(f'WARNING: {directory}: the picture of the program was not written: {what}')
        return
    report(f'program: {directory / "program.html"} (also program.svg and {TEXT})')
