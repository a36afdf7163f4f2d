"""The compiled step as a picture or as text: `pretrax compile --graph FILE`."""

from pretrax.amounts import size
from pretrax.errors import UserError
from pretrax.hlo.program import parse_program
from pretrax.plan.step import PlannedStep
from pretrax.storage import AnyPath
from pretrax.view.program.file import packed, write
from pretrax.view.program.picture import write_picture


def draw(planned: PlannedStep, path: AnyPath) -> str:
    """Writes the file, and returns a summary: operations, size.

    Raises:
        UserError: the step does not fit, so it was not compiled; or the file cannot be written.
    """
    if planned.compiled is None:
        raise UserError(f'--graph {path}: the step does not fit, so there is no program to draw')
    run, text = planned.run, planned.compiled.as_text()
    mesh, device = dict(run.mesh.shape), run.mesh.devices.flat[0].device_kind
    program = parse_program(text, mesh)
    title = run.name or run.run_dir.name
    if path.suffix == '.gz':
        content = packed(text, mesh)
        write(path, content)
        written = len(content)
    else:
        written = write_picture(path, program, title, f'{run.mesh.size} x {device}')
    return f'{sum(1 for _ in program.kernels()):,} operations, {size(written)}'
