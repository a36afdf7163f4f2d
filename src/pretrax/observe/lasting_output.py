"""Output that a program can write although nobody reads it any more: a closed terminal, or `tee` after Ctrl-C."""

import errno
import os
from typing import Any, TextIO


class LastingOutput:
    """A text stream. Once its reader has gone, what is written is discarded, and the program continues."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes text. Raises OSError if that fails while there is a reader, as on a full disk."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard_if_gone(error)
            return len(text)

    def flush(self) -> None:
        """Writes what is buffered. Raises OSError as `write`."""
        try:
            self._stream.flush()
        except OSError as error:
            self._discard_if_gone(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _discard_if_gone(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what is buffered goes there, too
        os.close(nowhere)
