"""Compile the training step for hardware that is not here.

Prints whether it fits, how much memory it needs and how fast it can be. Without --topology, it is compiled for the
devices of this machine. The exit code is 1 if the step does not fit.

--graph draws the compiled step: the operations by named scope, collectives with their bytes, forward and backward
apart. With it, CONFIG may also be a file that contains a compiled step as text, such as RUN/program/program.hlo.txt.gz;
nothing is compiled then.
"""

from pretrax.cli._arguments import ConfigFile, HardwareOption, Overrides, SlicesOption
from pretrax.errors import UserError
from pretrax.option import option

DOES_NOT_FIT = 1


def compile_(
    config: ConfigFile,
    overrides: Overrides = (),
    topology: HardwareOption = None,
    slices: SlicesOption = None,
    save: str | None = option('Write the compiled step to this file.', metavar='FILE'),
    graph: str | None = option('Draw the compiled step: .html, .svg; or write its text: .txt.gz.', metavar='FILE'),
) -> int:
    from pretrax.config import load
    from pretrax.cost.topology import parse_topology
    from pretrax.storage import locate
    from pretrax.view.program.file import check_name, is_text

    picture = None if graph is None else check_name(locate(graph))
    if is_text(config):
        if picture is None:
            raise UserError(f'{config} is a compiled step\n  to draw it: pretrax compile {config} --graph FILE.html')
        from pretrax.view.program.file import read_program
        from pretrax.view.program.picture import write_picture

        text = locate(config)
        write_picture(picture, read_program(text), text.name.partition('.')[0])
        print(f'wrote {picture}')
        return 0
    place = None if save is None else locate(save)
    loaded = load(config, overrides)  # before the slow import of JAX: report mistakes at once
    if slices is not None and topology is None:
        raise UserError(f'--slices {slices} needs --topology\n  for example: --topology v5e-256 --slices {slices}')
    hardware = parse_topology(topology, slices or 1) if topology else None
    import jax

    if hardware is not None:
        jax.config.update('jax_platforms', 'cpu')  # a plugin must not look for a TPU or GPU that is not here
    # The time to compile is reported; and a CPU program from XLA's cache lacks parts when it is serialized again.
    jax.config.update('jax_enable_compilation_cache', False)
    from pretrax.amounts import size
    from pretrax.plan.auto import settled
    from pretrax.plan.report import report
    from pretrax.plan.saved import check_one_size
    from pretrax.plan.saved import save as save_step
    from pretrax.plan.step import compile_ahead

    if place is not None:
        check_one_size(loaded, f'--save {save}')
    planned = compile_ahead(settled(loaded, print, hardware), hardware, print)
    print('\n'.join([*map(str, planned.run.startup), '', *report(planned)]))
    if place is not None:
        print(f'\nwrote {save}, {size(save_step(planned, place))}; run it with: pretrax train CONFIG --compiled {save}')
    if picture is not None:
        from pretrax.plan.drawn import draw

        print(f'\nwrote {graph}: {draw(planned, picture)}')
    return DOES_NOT_FIT if not planned.fits and planned.limit is not None else 0
