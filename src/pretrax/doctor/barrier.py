"""Waits for all processes, once JAX has connected them."""

import re

from pretrax.doctor.findings import Context
from pretrax.jax_compat import coordination_client


class MissingError(Exception):
    """Some processes did not arrive; the message names them."""


def wait_for_all(name: str, context: Context) -> None:
    """Waits until all processes have arrived, without a collective of the devices.

    Args:
        name: name of this wait, the same in all processes, and used once.

    Raises:
        MissingError: some did not arrive within four fifths of `context.seconds`.
    """
    if context.processes == 1:
        return
    seconds = 0.8 * context.seconds
    try:
        coordination_client().wait_at_barrier(f'pretrax doctor {name}', int(seconds * 1000))
    except Exception as error:
        _, _, names = str(error).partition('timed out task names:\n')
        missing = sorted({int(number) for number in re.findall(r'(\d+)$', names.partition('\n\n')[0], re.MULTILINE)})
        who = ', '.join(f'process {number}' for number in missing) or 'another process'
        raise MissingError(f'{who} did not come to this check within {seconds:.0f} s') from error
