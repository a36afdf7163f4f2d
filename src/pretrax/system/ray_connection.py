"""Connects this process to a Ray cluster."""

import logging
import os
import re
import socket
from typing import Any

from pretrax.errors import UserError, first_line, install_extra

_SECONDS = 10.0  # for the cluster to accept a connection; Ray itself waits for several minutes


def connect_ray(address: str | None, prefix: str = '') -> Any:
    """Connects to a cluster, and returns the module `ray`.

    Args:
        address: 'auto' for the cluster of this machine, 'HOST:PORT' or 'ray://HOST:PORT'; None: a local Ray, which is
            started. The variable RAY_ADDRESS takes the place of None and of 'auto'.
        prefix: begins the messages of errors, for example with the key of the configuration.

    Raises:
        UserError: Ray is not installed, or no cluster answers.
    """
    # The nodes have pretrax. Under `uv run`, Ray would build another environment for the workers there.
    os.environ.setdefault('RAY_ENABLE_UV_RUN_RUNTIME_ENV', '0')
    try:
        import ray
    except ImportError:
        raise UserError(f'{prefix}ray is not installed\n  {install_extra("ray")}') from None
    named = address if address not in (None, 'auto') else os.environ.get('RAY_ADDRESS') or address
    if named and (match := re.fullmatch(r'(?:ray://)?\[?([^\]]+?)\]?:(\d+)', named)):
        try:
            socket.create_connection((match[1], int(match[2])), _SECONDS).close()
        except OSError as error:
            raise _no_answer(prefix, named, error.strerror or str(error)) from None
    try:
        # Without an address, Ray would join a cluster that another program has started on this machine.
        ray.init(
            address=named or 'local',
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if named else False,
        )
    except (ConnectionError, TimeoutError) as error:
        raise _no_answer(prefix, named or 'this machine', first_line(error)[:200]) from None
    except (RuntimeError, ValueError) as error:  # other versions of Ray or Python there
        raise UserError(f'{prefix}Ray: {first_line(error)[:300]}') from None
    return ray


def _no_answer(prefix: str, address: str, reason: str) -> UserError:
    return UserError(
        f'{prefix}no Ray cluster answers at {address}: {reason}\n'
        'start one with `ray start --head`, or give its address: RAY_ADDRESS=HOST:PORT'
    )
