"""The compiled step in the run directory: its picture (`log.graph`), and its text, with which traces are joined."""

import importlib.util
import pathlib

from pretrax.errors import Report, first_line
from pretrax.observe.profile import STEPS_FILE
from pretrax.run.compiled_step import CompiledStep, is_recorded
from pretrax.run.directory import local_directory
from pretrax.run.setup import Run
from pretrax.view.program.file import TEXT, write_program

DIRECTORY = 'program'


def record_program(run: Run, step: CompiledStep, report: Report) -> None:
    """Writes `program/`, if `log.graph` or a trace asks for it. A failure is a warning: the run goes on."""
    directory = local_directory(run.run_dir) / DIRECTORY
    if not is_recorded(run):
        return
    try:
        before = (directory / TEXT).read_bytes() if (directory / TEXT).exists() else b''
        program = write_program(directory, step.call, run.mesh.shape)
        if before and before != (directory / TEXT).read_bytes():
            _keep_beside_traces(directory.parent / 'profile', before)
        if not run.log.graph:
            return
        from pretrax.view.program.picture import write_picture

        where = f'{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}'
        others = ['program.svg'] if importlib.util.find_spec('quickjs') else []
        for name in ('program.html', *others):
            write_picture(directory / name, program, run.name or run.run_dir.name, where)
    except Exception as error:  # whatever is wrong with a picture, training goes on
        what = first_line(error) or type(error).__name__
        report(f'WARNING: {directory}: the picture of the program was not written: {what}')
        return
    report(f'program: {directory / "program.html"} (also {" and ".join([*others, TEXT])})')


def _keep_beside_traces(traces: pathlib.Path, program: bytes) -> None:
    """Writes the program that was replaced, for smaller batches, beside the traces of its steps."""
    for about in traces.rglob(STEPS_FILE):
        if not (about.parent / TEXT).exists():
            (about.parent / TEXT).write_bytes(program)
