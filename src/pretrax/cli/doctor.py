"""Check the machines, devices and network of a run before training.

Start it on all nodes as training is started. The first node prints a table, which names slow and failing nodes.
"""

from pretrax.cli._arguments import Overrides
from pretrax.errors import UserError
from pretrax.option import argument, option


def doctor(
    config: str | None = argument(
        'The configuration that is to be trained. [default: only the machines]',
        default=None,
        metavar='CONFIG',
        show_default=False,
    ),
    overrides: Overrides = (),
    limit: float = option(
        'Time limit of each check, and of the arrival of each node.', default=120, min=1, metavar='SECONDS'
    ),
    as_json: bool = option('Print the table as JSON.', '--json', default=False),
) -> int:
    from pretrax.config import load

    if config is not None and '=' in config:
        raise UserError(f'{config}: expected a configuration first\n  write: pretrax doctor CONFIG {config}')
    loaded = load(config, overrides) if config else None
    from pretrax.doctor.diagnosis import diagnose
    from pretrax.doctor.findings import Context
    from pretrax.run.processes import identity

    who = identity((loaded or load('quickstart')).processes)
    context = Context(loaded, who.index, who.count, limit)
    found = diagnose(context, who.coordinator, [config, *overrides] if config else [], limit)
    if isinstance(found, int):
        return found
    print(found.to_json() if as_json else '\n'.join(found.lines()))
    return found.exit_code
