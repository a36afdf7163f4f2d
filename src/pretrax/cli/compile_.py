"""Compile the training step for hardware that is not here.

Prints whether it fits, how much memory it needs and how fast it can be. Without --topology, it is compiled for the devices of this machine. The exit code is 1 if the step does not fit.
"""

from pathlib import Path
from typing import Annotated

import typer

from pretrax.cli._arguments import ConfigFile, HardwareOption, Overrides, SlicesOption
from pretrax.errors import UserError

DOES_NOT_FIT = 1


def compile_(
    config: ConfigFile,
    overrides: Overrides = None,
    topology: HardwareOption = None,
    slices: SlicesOption = None,
    save: Annotated[Path | None, typer.Option(metavar='FILE', help='Write the compiled step to this file.')] = None,
) -> None:
    from pretrax.config import load
    from pretrax.scale.topology import parse_topology

    loaded = load(config, overrides or [])  # before the slow import of JAX: report mistakes at once
    if slices is not None and topology is None:
        raise UserError(f'--slices {slices} needs --topology\n  for example: --topology v5e-256 --slices {slices}')
    hardware = parse_topology(topology, slices or 1) if topology else None
    import jax

    if hardware is not None:
        jax.config.update('jax_platforms', 'cpu')  # a plugin must not look for a TPU or GPU that is not here
    # The time to compile is reported; and a CPU program from XLA's cache lacks parts when it is serialized again.
    jax.config.update('jax_enable_compilation_cache', False)
    from pretrax.ahead.auto import settled
    from pretrax.ahead.report import report
    from pretrax.ahead.step import compile_ahead
    from pretrax.scale.memory import size

    ahead = compile_ahead(settled(loaded, print, hardware), hardware, print)
    print('\n'.join([*map(str, ahead.run.startup), '', *report(ahead)]))
    if save is not None:
        from pretrax.ahead.saved import save as save_step

        save = save.expanduser()
        print(f'\nwrote {save}, {size(save_step(ahead, save))}; run it with: pretrax train CONFIG --compiled {save}')
    if not ahead.fits and ahead.limit is not None:
        raise typer.Exit(DOES_NOT_FIT)
