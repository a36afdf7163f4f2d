"""The signals that reach a launched training. Imports nothing slow."""

import signal

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
PASSED_ON = (*STOP, signal.SIGUSR1, signal.SIGUSR2)


def signals_from_now_on() -> list[int]:
    """Keeps signals for a `Node` until there is one. The first process of a container ignores others."""
    waiting: list[int] = []
    for number in PASSED_ON:
        signal.signal(number, lambda got, _: waiting.append(got))
    return waiting
