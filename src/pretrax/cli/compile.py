"""`pretrax compile CONFIG topology=v5e-256 slices=2 save=PATH`: does the step fit hardware that is not here?"""

import pathlib

import typer

from pretrax.config import RunConfig
from pretrax.errors import UserError
from pretrax.scale.memory import size
from pretrax.scale.topology import Topology, parse_topology

DOES_NOT_FIT = 1


def compile_step(config: RunConfig, options: dict[str, str]) -> None:
    """Prints the report; exits with 1 if the step does not fit."""
    topology = asked_topology(options)
    if topology is not None:
        without_accelerators()
    import jax

    # How long it takes is told; and what XLA's cache gives back for a CPU lacks parts once it is serialised again.
    jax.config.update('jax_enable_compilation_cache', False)
    from pretrax.ahead.auto import settled
    from pretrax.ahead.report import report
    from pretrax.ahead.step import compile_ahead

    ahead = compile_ahead(settled(config, print, topology), topology, print)
    print('\n'.join([*map(str, ahead.run.startup), '', *report(ahead)]))
    if 'save' in options:
        from pretrax.ahead.saved import save

        place = pathlib.Path(options['save']).expanduser()
        print(f'\nwrote {place}, {size(save(ahead, place))}; run it with: pretrax train CONFIG compiled={place}')
    if not ahead.fits and ahead.limit is not None:
        raise typer.Exit(DOES_NOT_FIT)


def asked_topology(options: dict[str, str]) -> Topology | None:
    """What topology= and slices= name; None: the devices that are here."""
    slices = options.get('slices', '1')
    if not slices.isdigit():
        raise UserError(f'slices={slices}: expected a number')
    if 'slices' in options and 'topology' not in options:
        raise UserError(f'slices={slices}: of what?\n  give topology= as well, such as topology=v5e-256')
    return parse_topology(options['topology'], int(slices)) if 'topology' in options else None


def without_accelerators() -> None:
    """JAX on the CPU alone: the plugin of a TPU or GPU that is not here must not look for it."""
    import jax

    jax.config.update('jax_platforms', 'cpu')
