"""The compiled step: compiled now, from the program cache or a file; and its picture and text in the run directory."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax

from pretrax.errors import Report, first_line
from pretrax.model.loss import Batch
from pretrax.observe.profile import STEPS_FILE
from pretrax.run.directory import local_directory
from pretrax.run.out_of_memory import explaining_full_memory
from pretrax.run.program_cache import compile_or_load
from pretrax.run.setup import Run
from pretrax.system.process_memory import return_free_memory
from pretrax.train.step import TrainState, make_step
from pretrax.view.program.file import TEXT, write_program

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
LoadStep = Callable[[Run, jax.stages.Lowered], Any]  # the run and the lowered step -> a compiled step


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiled step, and how it was made."""

    call: Any  # a jax.stages.Compiled; call(state, batch) is a `Step`
    how: str
    seconds: float
    is_new: bool  # compiled now, not loaded
    run: Run

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step. Raises UserError if the memory of a device is full."""
        with explaining_full_memory(self.run, 'training', self.call):
            return self.call(state, batch)

    def __str__(self) -> str:
        size = self.run.size
        of = f' for batches of {size.tokens:,} tokens = {size.sequences} sequences x {size.sequence_length}'
        return f'{self.how}{of if len(self.run.sizes.sizes) > 1 else ""} in {self.seconds:.1f} s'


def lower_step(run: Run) -> jax.stages.Lowered:
    """The step of a run before XLA compiles it, from abstract arrays. The mesh of the run must be set."""
    return make_step(run.recipe).lower(run.like, run.abstract_batch())


def compile_step(run: Run, state: TrainState, load: LoadStep | None = None) -> CompiledStep:
    """Compiles the step of a run, or loads it. The mesh of the run must be set."""
    began = time.perf_counter()
    lowered = make_step(run.recipe).lower(state, run.abstract_batch())
    if load is None:
        with explaining_full_memory(run, 'compiling the step'):
            call, cache = compile_or_load(lowered, is_recorded(run), run.compiler_options.values)
        how = f'loaded the compiled step from {cache}' if cache else 'compiled the step'
    else:
        call, cache, how = load(run, lowered), None, 'loaded the compiled step'
    return_free_memory()
    seconds = time.perf_counter() - began
    return CompiledStep(call, how, seconds, is_new=load is None and cache is None, run=run)


def is_recorded(run: Run) -> bool:
    """Whether the text of the program is written: for its picture, or for traces, which are joined with it."""
    log = run.log
    return bool(log.graph or log.profile or log.profile_on_slow)


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
            for about in (directory.parent / 'profile').rglob(STEPS_FILE):  # of steps with smaller batches
                if not (about.parent / TEXT).exists():
                    (about.parent / TEXT).write_bytes(before)
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
