"""The program `pretrax`, and `python -m pretrax`: the command line, and its end after Ctrl-C."""

import os
import signal
import sys
from typing import Any

_INTERRUPTED = 128 + signal.SIGINT
_interrupts: list[int] = []


def main() -> None:
    """Runs the command line. After Ctrl-C, the exit code is 130, without a traceback, even during imports.

    Training handles Ctrl-C by itself once there is something to save.
    """
    if sys.getfilesystemencoding() == 'ascii':  # by PYTHONUTF8=0; paths, files and text are UTF-8 in any locale
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {'PYTHONUTF8': '1'})
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in the background of a script
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
    try:
        from pretrax.cli import main as run

        run()
    except BaseException:  # an interrupted import may raise anything
        if not _interrupts:
            raise
        sys.exit(_INTERRUPTED)
    finally:
        _interrupts.append(signal.SIGINT)  # from here on, Ctrl-C ends the process at once


def _interrupt(number: int, frame: Any) -> None:
    del frame
    if _interrupts:
        os._exit(_INTERRUPTED)
    _interrupts.append(number)
    raise KeyboardInterrupt


def _unraisable(error: Any) -> None:
    """Python ignores exceptions in callbacks of its garbage collector, and Ctrl-C with them."""
    if isinstance(error.exc_value, KeyboardInterrupt):
        os._exit(_INTERRUPTED)
    sys.__unraisablehook__(error)


if __name__ == '__main__':
    main()
